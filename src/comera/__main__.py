"""`python -m comera` runs the command line."""

import sys

if not sys.flags.safe_path:  # python -m looks for modules in the working folder first: a numpy.py there would be run
    del sys.path[0]

from comera.cli.main import main

sys.exit(main())
