"""What every test finds."""

import gc
import signal
from collections.abc import Iterator

import pytest
import torch

# What collecting ten thousand tests makes stays: to look for garbage in it takes a third of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()  # nor does any later search for garbage, or for copies of a model, walk through it
    gc.enable()


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore SIGINT; tests of interrupts need Python's own handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """After each test torch's threads are as before."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
