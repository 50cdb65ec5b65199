"""The first imports of a command: torch, transformers and the rooms."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """The first imports of a command. What they make stays: Python's garbage collector, which would look through it
    again and again (0.7 of 5.4 s of a command's start), pauses, and passes it over from then on."""
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # else libraries report at exit what they think is lost
        gc.enable()
