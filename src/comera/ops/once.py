"""Results that a forward keeps for its replay (memory/replay.py), which does not compute them again.

A replay decides operation by operation what to keep. Code that knows better, because a small result came from large
intermediates or from many random numbers, marks it with `keep_for_recompute`. Without a replay it is just the call.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class RecomputeStore(Protocol):
    """Records results in a forward and returns them in its replay."""

    def keep_for_recompute(self, make: Callable[[], T]) -> T:
        """What `make` returned in the forward: a tensor, or a tuple of tensors."""

    def paused(self) -> AbstractContextManager[object]:
        """A context in which nothing is recorded or returned."""


class _Running(threading.local):
    store: RecomputeStore | None = None


_running = _Running()


def keep_for_recompute(make: Callable[[], T]) -> T:
    """make(), a tensor or a tuple of tensors, called once for the forward and its replay.

    `make` may draw from torch's generators only and is not differentiated: call it inside an autograd.Function, or
    where nothing needs a gradient. Its result must not be written to in place.
    """
    if torch.compiler.is_compiling() or _running.store is None:
        return make()
    return _running.store.keep_for_recompute(make)


def unrecorded() -> AbstractContextManager[object]:
    """A context for results that outlive the forward, so that its replay finds them made: nothing is recorded."""
    if torch.compiler.is_compiling() or _running.store is None:
        return nullcontext()
    return _running.store.paused()


def exchange(store: RecomputeStore | None) -> RecomputeStore | None:
    """Make `store` the one of this thread; returns the previous one."""
    _running.store, before = store, _running.store
    return before
