"""`python -m comera` is `comera`."""

import sys

from comera.cli import main

sys.exit(main())
