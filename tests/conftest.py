"""What every test finds."""

import signal


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore SIGINT; tests of interrupts need Python's own handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
