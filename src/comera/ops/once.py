"""Results that are made once: the replay of a forward (memory/replay.py) takes them from the forward.

A replay decides operation by operation what to keep. Code that knows better, because a small result came from large
intermediates or from many random numbers, says so with `made_once`. Without a replay it is just the call.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Tape(Protocol):
    """Records results in a forward and returns them in its replay."""

    def made_once(self, make: Callable[[], T]) -> T:
        """What `make` returned in the forward: a tensor, or a tuple of tensors."""

    def paused(self) -> AbstractContextManager[object]:
        """A context in which nothing is recorded or returned."""


class _Running(threading.local):
    tape: Tape | None = None


_running = _Running()


def made_once(make: Callable[[], T]) -> T:
    """make(), a tensor or a tuple of tensors, called once for the forward and its replay.

    `make` may draw from torch's generators only and is not differentiated: call it inside an autograd.Function, or
    where nothing needs a gradient. Its result must not be written to in place.
    """
    if torch.compiler.is_compiling() or _running.tape is None:
        return make()
    return _running.tape.made_once(make)


def unrecorded() -> AbstractContextManager[object]:
    """A context for results that outlive the forward, so that its replay finds them made: nothing is recorded."""
    if torch.compiler.is_compiling() or _running.tape is None:
        return nullcontext()
    return _running.tape.paused()


def exchange(tape: Tape | None) -> Tape | None:
    """Make `tape` the one of this thread; returns the previous one."""
    _running.tape, before = tape, _running.tape
    return before
