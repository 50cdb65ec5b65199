"""Operations of residual.cpp: dropout from a seed, and layer norm after a residual sum, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int, c_long, c_uint32, c_void_p
from functools import cache

import torch
from torch import Tensor

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import define, pointer
from comera.kernels.cpp.memory import empty

_LEVELS = 2**16


def rounded(p: float) -> tuple[int, float]:
    """How many of 2¹⁶ equally probable numbers drop an entry, and the scale of what is kept. 0 <= p < 1."""
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    return dropped, _LEVELS / (_LEVELS - dropped)


class _Drop(Structure):
    _fields_ = (("seed", c_void_p), ("dropped", c_uint32), ("scale", c_float))


def _drop(seed: Tensor | None, p: float) -> _Drop:
    """The seed by its place: a recorded step draws another one into it."""
    return _Drop(None, 0, 1.0) if seed is None else _Drop(pointer(seed), *rounded(p))


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    made = library()
    dropping, forward, backward = made.dropout, made.residual_norm, made.residual_norm_backward
    drop, sizes = POINTER(_Drop), [c_long, c_long]
    dropping.argtypes = [c_long, c_void_p, drop, c_void_p, c_int]
    forward.argtypes = [*sizes, *[c_void_p] * 4, drop, c_float, *[c_void_p] * 4, c_int]
    backward.argtypes = [*sizes, *[c_void_p] * 5, drop, *[c_void_p] * 4, c_int]
    dropping.restype = forward.restype = backward.restype = None
    return dropping, forward, backward


def _dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    y = empty(*x.shape)
    _functions()[0](x.numel(), pointer(x), byref(_drop(seed, p)), pointer(y), torch.get_num_threads())
    return y


def _residual_norm(
    z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, x = z.contiguous(), x.contiguous()
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    y, s = empty(*z.shape), empty(*z.shape)
    mean, rstd = z.new_empty(z.shape[:-1]), z.new_empty(z.shape[:-1])
    given = (pointer(t) for t in (z, x, weight, bias))
    made = (pointer(t) for t in (y, s, mean, rstd))
    drop = byref(_drop(seed, p))
    _functions()[1](mean.numel(), z.shape[-1], *given, drop, eps, *made, torch.get_num_threads())
    return y, s, mean, rstd


def _residual_norm_backward(
    dy: Tensor, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dy, s, mean, rstd = (t.contiguous() for t in (dy, s, mean, rstd))
    weight = None if weight is None else weight.contiguous()
    dx, dz = empty(*dy.shape), dy.new_empty(0) if seed is None else empty(*dy.shape)
    dweight, dbias = dy.new_empty(dy.shape[-1]), dy.new_empty(dy.shape[-1])
    given = (pointer(t) for t in (dy, s, mean, rstd, weight))
    made = (pointer(t) for t in (dx, None if seed is None else dz, dweight, dbias))
    drop = byref(_drop(seed, p))
    _functions()[2](mean.numel(), dy.shape[-1], *given, drop, *made, torch.get_num_threads())
    return dx, dz, dweight, dbias


dropout = define("dropout(Tensor x, Tensor seed, float p) -> Tensor", _dropout)
"""f x, contiguous, with f = 0 with probability p, to 2⁻¹⁶, else the scale that keeps the mean; seed: one int64.

The same seed and p make the same f, whatever the shape: so it is its own derivative."""

residual_norm = define(
    "residual_norm(Tensor z, Tensor x, Tensor? weight, Tensor? bias, Tensor? seed, float p, float eps)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)",
    _residual_norm,
)
"""s = x + f z with the f of `dropout`, 1 without a seed; y, the layer norm of s over its last dimension; and the mean
and 1/√(variance + eps) of its rows."""

residual_norm_backward = define(
    "residual_norm_backward(Tensor dy, Tensor s, Tensor mean, Tensor rstd, Tensor? weight, Tensor? seed, float p)"
    " -> (Tensor dx, Tensor dz, Tensor dweight, Tensor dbias)",
    _residual_norm_backward,
)
"""dx is the gradient of s too. Without a seed it is that of z as well, and dz is empty."""
