"""`comera`, and `python -m comera`: the command line, under which Ctrl-C leaves no traceback."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # python -m looks for modules in the working folder first: a numpy.py there would be run

from comera.cli.interrupt import at_once


def run() -> int:
    """Run the command line with the arguments of this process; returns its exit status."""
    at_once()
    from comera.cli.main import main  # takes a while

    return main()


if __name__ == "__main__":
    sys.exit(run())
