"""State of a recording: a step on a CPU that is to run again on other values without its Python (graphs/cpu.py).

During a recording `fixed` is true: no shape and no choice may depend on the values of tensors. The sink of this thread
receives every call of a C++ kernel and the operands of our operations; a recording sees torch's own operations itself.
`memory` is where tensors are then allocated.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor


class KernelSink(Protocol):
    """Adds calls of kernels to a recording."""

    def kernel(self, name: str, function: Callable[..., int], given: Sequence[object]) -> None:
        """A kernel was called with these numbers, addresses and bytes."""

    def keep(self, *values: object) -> None:
        """The memory of the tensors among these values, lists of tensors included, must stay where it is."""


class Memory(Protocol):
    """Allocates tensors."""

    def empty(self, *shape: int) -> Tensor:
        """An uninitialized float32 tensor of one element at least."""


class _Running(threading.local):
    sink: KernelSink | None = None
    memory: Memory | None = None
    fixed = False


_running = _Running()


def sink() -> KernelSink | None:
    """The sink of this thread, while it records."""
    return _running.sink


def memory() -> Memory | None:
    """Where the tensors of this thread are allocated, if not in the usual memory."""
    return _running.memory


def fixed() -> bool:
    """Whether no shape and no choice may depend on values now."""
    return _running.fixed


@contextmanager
def no_host_reads(recorded_by: KernelSink | None = None, memory: Memory | None = None) -> Iterator[None]:
    """A context in which no values are read: of a recording, or of a run that must be like one, to the bit."""
    before = _running.sink, _running.memory, _running.fixed
    _running.sink, _running.memory, _running.fixed = recorded_by or _running.sink, memory or _running.memory, True
    try:
        yield
    finally:
        _running.sink, _running.memory, _running.fixed = before
