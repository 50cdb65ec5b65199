"""Recordings of what runs on a CPU, to be run again on other values without its Python (trainer/cpu_graph.py).

While one is made, no shape and no choice may depend on the values of tensors: then `fixed` is true. The tape of this
thread takes every call of a C++ kernel and the operands of our operations; torch's own operations it sees itself.
`memory` is where tensors are made then.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class Tape(Protocol):
    """Takes a recording."""

    def kernel(self, name: str, function: Callable[..., int], given: Sequence[object]) -> None:
        """A kernel was called with these numbers, addresses and bytes."""

    def keep(self, *values: object) -> None:
        """The memory of the tensors among these values, lists of tensors included, must stay where it is."""


class Memory(Protocol):
    """Makes tensors."""

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized float32 tensor of one element at least."""


class _Running(threading.local):
    tape: Tape | None = None
    memory: Memory | None = None
    fixed = False


_running = _Running()


def tape() -> Tape | None:
    """The tape of this thread, while it records."""
    return _running.tape


def memory() -> Memory | None:
    """What makes the tensors of this thread, if not the usual memory."""
    return _running.memory


def fixed() -> bool:
    """Whether no shape and no choice may depend on values now."""
    return _running.fixed


@contextmanager
def values_unread(recorded_by: Tape | None = None, memory: Memory | None = None) -> Iterator[None]:
    """A context in which no values are read: of a recording, or of a run that must be like one, to the bit."""
    before = _running.tape, _running.memory, _running.fixed
    _running.tape, _running.memory, _running.fixed = recorded_by or _running.tape, memory or _running.memory, True
    try:
        yield
    finally:
        _running.tape, _running.memory, _running.fixed = before
