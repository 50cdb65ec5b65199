"""`python -m comera` runs the command line."""

import sys

from comera.cli.main import main

sys.exit(main())
