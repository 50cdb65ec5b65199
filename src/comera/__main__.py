"""`comera`, and `python -m comera`: the command line, under which neither Ctrl-C nor `| head` leaves a traceback.

From the call of `at_once` on, that is: while Python itself starts, and for the milliseconds that it takes to import
this file, Ctrl-C ends a command with Python's own traceback. No code of this package can change that."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # python -m looks for modules in the working folder first: a numpy.py there would be run

from comera.cli.interrupt import at_once

# Rounds that a thread of GNU OpenMP spins before it sleeps, instead of 300,000: beside another program on one of two
# cores a step is 7.5 times as fast with it, on an idle machine a tenth slower (docs/faq.md, benchmarks/busy.py).
SPIN_COUNT = "1000"


def run() -> int:
    """Run the command line with the arguments of this process; returns its exit status."""
    at_once()
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is imported
    from comera.cli.main import main  # takes a while
    from comera.cli.output import UNREAD, unwritten

    try:
        status = main()
    except SystemExit as ended:  # after a help text, or a command line that makes no sense
        status = int(ended.code or 0)
    lost = unwritten()
    if isinstance(lost, BrokenPipeError):
        return UNREAD
    if lost is not None and status == 0:
        print(f"comera: standard output: {lost.strerror}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(run())
