"""Operations of gradients.cpp, on contiguous tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from comera.native.build import library
from comera.native.ops import define


@cache
def _functions() -> tuple[Callable[..., float], Callable[..., None]]:
    norm, scale = library().norm, library().scale
    sizes: list[Any] = [c_long, POINTER(c_void_p), POINTER(c_long)]
    norm.argtypes, norm.restype = [*sizes, c_int], c_double
    scale.argtypes, scale.restype = [*sizes, c_float, c_int], None
    return norm, scale


def _memory(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    count = len(tensors)
    pointers = (c_void_p * count)(*(tensor.data_ptr() for tensor in tensors))
    return count, pointers, (c_long * count)(*(tensor.numel() for tensor in tensors))


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.tensor(_functions()[0](*_memory(tensors), torch.get_num_threads()), dtype=torch.float32)


def _scale(tensors: Sequence[Tensor], factor: float) -> None:
    _functions()[1](*_memory(tensors), factor, torch.get_num_threads())


norm = define("norm(Tensor[] tensors) -> Tensor", _norm)
"""√Σ x² over all numbers of all tensors, a float32 scalar."""

scale_ = define("scale_(Tensor(a!)[] tensors, float factor) -> ()", _scale)
"""Multiply all tensors by one factor, in place."""
