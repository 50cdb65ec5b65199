"""Memory of wide tensors on a CPU: kept by memory.cpp when they are freed, and given to the next ones whole."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_void_p, py_object, pythonapi
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from comera.kernels.cpp.build import library, unavailable_reason
from comera.kernels.select import asked

WIDE = 2**20
"""Bytes from which on a tensor is wide: below, the C library's allocator is as fast and wastes little."""

_DIMENSIONS = 4


class Held(NamedTuple):
    """Bytes of wide tensors that live, and of all memory that is held for them."""

    in_use: int
    held: int


@cache
def _functions() -> tuple[Callable[..., int | None], Callable[..., object]]:
    take, capsule = library().take_memory, pythonapi.PyCapsule_New
    take.argtypes, take.restype = [c_int, POINTER(c_int64)], c_void_p
    capsule.argtypes, capsule.restype = [c_void_p, c_char_p, c_void_p], py_object
    return take, capsule


def empty(*shape: int) -> Tensor:
    """A float32 tensor of any numbers; a wide one in memory that goes to the next one when it is freed."""
    if (
        4 * prod(shape) >= WIDE
        and len(shape) <= _DIMENSIONS
        and asked("memory") is not False
        and unavailable_reason() is None
    ):
        take, capsule = _functions()
        tensor = take(len(shape), (c_int64 * len(shape))(*shape))
        if tensor is not None:
            return from_dlpack(capsule(tensor, b"dltensor", None))
    return torch.empty(shape, dtype=torch.float32)  # and where there is no memory left, its error


def held() -> Held:
    """What wide tensors take at this moment; only where there are native kernels."""
    in_use, every = c_int64(), c_int64()
    library().memory_held(byref(in_use), byref(every))
    return Held(in_use.value, every.value)
