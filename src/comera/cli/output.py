"""Output that cannot be written: who reads it may stop before its end, as `head` does, or a disk may be full."""

import os
import select
import sys

UNREAD = 141  # a shell's exit status for SIGPIPE


def unwritten() -> OSError | None:
    """Write out what was printed; the error if that is impossible, after which all further output is dropped.

    SIGPIPE itself, which ends other tools without a word, stays ignored as in all Python programs: it would also end a
    training run whose experiment tracker loses its connection.
    """
    if sys.stdout is None:  # closed from the start
        return None
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # Python flushes once more at its end
        os.close(null)
        return error
    return None


def is_unread() -> bool:
    """Whether who read the output has closed it."""
    if sys.stdout is None:
        return False
    asked = select.poll()
    asked.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in asked.poll(0))
