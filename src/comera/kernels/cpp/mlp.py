"""Operations of feed_forward.cpp. Shapes: B batch, I/O in/out features, F wide ones, R rank, S with the bias's row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import define, pointer
from comera.kernels.cpp.low_rank import width
from comera.kernels.cpp.memory import empty
from comera.kernels.flops import flop_formula

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of the C++ code


class _Up(Structure):
    _fields_ = (
        *((name, c_long) for name in ("rank", "rows")),
        *((name, c_void_p) for name in ("a", "b", "p", "da", "db")),
    )


class _Down(Structure):
    _fields_ = (
        *((name, c_long) for name in ("rank", "rows", "features")),
        *((name, c_void_p) for name in ("a", "b", "q", "z", "da", "db")),
        ("q_row", c_long),
    )


class _Problem(Structure):
    _fields_ = (
        *((name, c_long) for name in ("samples", "features", "wide", "count", "p_row")),
        ("x", c_void_p),
        ("ups", POINTER(_Up)),
        ("down", _Down),
    )


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    forward, backward = library().feed_forward, library().feed_forward_backward
    given: list[Any] = [c_int, POINTER(_Problem)]
    forward.argtypes, backward.argtypes = [*given, c_int], [*given, c_void_p, c_int]
    forward.restype = backward.restype = None
    return forward, backward


def _problem(
    x_BI: Tensor,
    p_BS: Tensor,
    q_BS: Tensor,
    z_BO: Tensor,
    halves: Sequence[tuple[Tensor, Tensor]],
    grads: Sequence[tuple[Tensor, Tensor] | tuple[None, None]],
) -> _Problem:
    """The tensors as the kernels take them; all contiguous. halves: A and B of the weights of x, then of that of h."""
    ups, at = [], p_BS.data_ptr()
    for (a, b), (da, db) in zip(halves[:-1], grads[:-1], strict=True):
        ups.append(_Up(a.shape[0], b.shape[0], pointer(a), pointer(b), at, pointer(da), pointer(db)))
        at += width(a.shape[0], b.shape[0]) * p_BS.element_size()
    a, b = halves[-1]
    operands = [pointer(tensor) for tensor in (a, b, q_BS, z_BO, *grads[-1])]
    down = _Down(a.shape[0], *b.shape, *operands, q_BS.shape[1])
    return _Problem(*x_BI.shape, a.shape[1], len(ups), p_BS.shape[1], pointer(x_BI), (_Up * len(ups))(*ups), down)


def _pairs(as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(a.contiguous(), b.contiguous()) for a, b in zip(as_RI, bs_SF, strict=True)]


def _forward(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor], activation: str) -> list[Tensor]:
    x_BI, halves = x_BI.contiguous(), _pairs(as_RI, bs_SF)
    *ups, q_width = [width(a.shape[0], b.shape[0]) for a, b in halves]
    p_BS, q_BS, z_BO = (empty(x_BI.shape[0], size) for size in (sum(ups), q_width, bs_SF[-1].shape[1]))
    problem = _problem(x_BI, p_BS, q_BS, z_BO, halves, [(None, None)] * len(halves))
    _functions()[0](ACTIVATIONS.index(activation), byref(problem), torch.get_num_threads())
    return [p_BS, q_BS, z_BO]


def _backward(
    x_BI: Tensor,
    p_BS: Tensor,
    q_BS: Tensor,
    dz_BO: Tensor,
    as_RI: Sequence[Tensor],
    bs_SF: Sequence[Tensor],
    activation: str,
    wants_x: bool,
) -> list[Tensor]:
    x_BI, dz_BO, halves = x_BI.contiguous(), dz_BO.contiguous(), _pairs(as_RI, bs_SF)
    dx_BI = [empty(*x_BI.shape)] if wants_x else []
    grads = [(torch.empty_like(a), torch.empty_like(b)) for a, b in halves]
    problem = _problem(x_BI, p_BS, q_BS, dz_BO, halves, grads)
    dx = pointer(dx_BI[0] if wants_x else None)
    _functions()[1](ACTIVATIONS.index(activation), byref(problem), dx, torch.get_num_threads())
    return [*dx_BI, *(grad for pair in grads for grad in pair)]


mlp = define("mlp(Tensor x, Tensor[] a, Tensor[] b, str activation) -> Tensor[]", _forward)
"""All [1 P_k] side by side, [1 Q] (`two_sided.width` columns each) and z (B, O), from x (B, I), A (R, I) and B (S, F)
of one or two weights of x, then A (R, F) and B (S, O) of that of h; the first row of a B is its bias, if it has one."""

mlp_backward = define(
    "mlp_backward(Tensor x, Tensor p, Tensor q, Tensor dz, Tensor[] a, Tensor[] b, str activation, bool dx)"
    " -> Tensor[]",
    _backward,
)
"""dx where it is wanted, then ∂A and ∂B of each weight in turn."""


@flop_formula(torch.ops.comera.mlp)
def _flops(x: Any, a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """P_k, Y_k, Q and z."""
    return int(2 * x[0] * sum(r * i + s * o for (r, i), (s, o) in zip(a, b, strict=True)))


@flop_formula(torch.ops.comera.mlp_backward)
def _flops_backward(
    x: Any, p: Any, q: Any, dz: Any, a: Any, b: Any, act: str, dx: bool, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Of each weight of x: Y_k again and ∂B_k, V_k, ∂A_k and its share of dx; of that of h: dh and ∂A, U and ∂B."""
    each = [(rank, inputs, rows, outputs) for (rank, inputs), (rows, outputs) in zip(a, b, strict=True)]
    total = sum((2 * rows + rank) * wide + (1 + dx) * rank * inputs for rank, inputs, rows, wide in each[:-1])
    rank, wide, rows, outputs = each[-1]
    return int(2 * x[0] * (total + 2 * rank * wide + (rank + rows) * outputs))
