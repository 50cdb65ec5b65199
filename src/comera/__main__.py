"""`python -m comera` is `comera`."""

import sys

from comera.cli.main import main

sys.exit(main())
