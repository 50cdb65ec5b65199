"""Memory for large tensors on a CPU: memory.cpp keeps it when they are freed and hands it whole to the next ones."""

from contextlib import suppress
from ctypes import byref, c_char_p, c_int64, c_void_p, py_object, pythonapi
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from comera.kernels.cpp.library import call, dry_running, unavailable_reason, words
from comera.kernels.recording import memory
from comera.kernels.select import asked

LARGE = 2**20
"""Bytes from which on a tensor is large: below, the C library's allocator is as fast and wastes little."""

_MOST = 2**47  # bytes that a process can address
_DIMENSIONS = 4
_FLOATS = torch.empty(0, dtype=torch.float32, device="cpu")  # its new_empty takes half the time of torch.empty
_capsule = pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = [c_void_p, c_char_p, c_void_p], py_object


class Held(NamedTuple):
    """Bytes of large tensors that are alive, and of all memory held for such tensors."""

    in_use: int
    held: int


def empty(*shape: int) -> Tensor:
    """An uninitialized float32 tensor; a large one in memory that goes to the next one when it is freed."""
    if dry_running():
        return torch.empty(shape, dtype=torch.float32, device="meta")
    elements = prod(shape)
    if elements > 0 and (own := memory()) is not None:
        return own.empty(*shape)
    if LARGE <= 4 * elements < _MOST and len(shape) <= _DIMENSIONS and _available():
        with suppress(MemoryError):  # torch has the error for it
            return _taken(*shape)
    return _FLOATS.new_empty(*shape) if shape else _FLOATS.new_empty(())  # as integers: faster than as a tuple


def block(size: int) -> torch.UntypedStorage:
    """Uninitialized memory of at least `size` bytes, for many tensors."""
    if _available():
        with suppress(MemoryError):
            return _taken(-(-size // 4)).untyped_storage()
    return torch.UntypedStorage(size)


def _available() -> bool:
    return asked("memory") is not False and unavailable_reason() is None


def _taken(*shape: int) -> Tensor:
    """A tensor of the pool."""
    tensor = c_void_p()
    call("take_memory", len(shape), words(shape), byref(tensor))
    taken: Tensor = from_dlpack(_capsule(tensor, b"dltensor", None))
    return taken


def release() -> None:
    """Give the memory of large tensors that are no more back to the system, where the next steps make none."""
    if _available():
        call("release_memory")


def held() -> Held:
    """What large tensors take at this moment. Only where there are kernels."""
    in_use, every = c_int64(), c_int64()
    call("memory_held", byref(in_use), byref(every))
    return Held(in_use.value, every.value)
