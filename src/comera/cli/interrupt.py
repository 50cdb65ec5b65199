"""Ctrl-C, at any moment of a command, ends it with one line and a shell's exit status for it.

Modules cannot be interrupted while they are imported: some catch the exception and go on broken, others print it from a
callback. So a command starts under `at_once`, where Ctrl-C ends the process, and only its work, which has something to
clean up, is under `interruptible`, where Ctrl-C raises KeyboardInterrupt.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # a shell's exit status for SIGINT
MESSAGE = "comera: interrupted"


def at_once() -> None:
    """From here on, Ctrl-C ends the process; for the first line of a program. Where it is ignored, it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # of a process that was started under `held_back`


@contextmanager
def held_back() -> Iterator[None]:
    """A context: Ctrl-C does not reach a process that is started in it before its `at_once`.

    Otherwise Ctrl-C while that process starts, which Python does before any code of this package runs, would show a
    traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class interruptible:  # noqa: N801  # a context manager, like contextlib.suppress
    """A context in which Ctrl-C raises KeyboardInterrupt, in a process that `at_once` has prepared."""

    def __enter__(self) -> None:
        self._prepared = signal.getsignal(signal.SIGINT) is _end
        if self._prepared:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *raised: object) -> None:
        if self._prepared:
            signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: object) -> None:
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(INTERRUPTED)
