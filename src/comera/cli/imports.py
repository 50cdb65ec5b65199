"""The imports of torch, transformers and the rooms, most of what a short command takes."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """The first imports of a command. They make 700,000 objects that stay: Python's garbage collector, which would look
    through them again and again for a fifth of a command's start, pauses, and passes them over from then on."""
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
