"""Operations of feed_forward.cpp. Shapes: B batch, F wide features, R rank, S rank with the bias's row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from comera.native.build import library
from comera.native.ops import define, pointer

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of the C++ code


class _Up(Structure):
    _fields_ = (
        ("rows", c_long),
        ("rank", c_long),
        ("p", c_void_p),
        ("b", c_void_p),
        ("v", c_void_p),
        ("db", c_void_p),
    )


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    forward, backward = library().feed_forward, library().feed_forward_backward
    sizes: list[Any] = [c_int, c_long, c_long, c_long, POINTER(_Up), c_long]
    forward.argtypes, backward.argtypes = [*sizes, c_void_p, c_void_p, c_int], [*sizes, *[c_void_p] * 3, c_int]
    forward.restype = backward.restype = None
    return forward, backward


def _forward(ps_SB: Sequence[Tensor], bs_SF: Sequence[Tensor], a_RF: Tensor, activation: str) -> Tensor:
    ps_SB, bs_SF, a_RF = [p.contiguous() for p in ps_SB], [b.contiguous() for b in bs_SF], a_RF.contiguous()
    q_RB = a_RF.new_empty(a_RF.shape[0], ps_SB[0].shape[1])
    ups = [_Up(p.shape[0], p.shape[0], pointer(p), pointer(b)) for p, b in zip(ps_SB, bs_SF, strict=True)]
    _functions()[0](*_sizes(activation, ps_SB, ups, a_RF), pointer(a_RF), pointer(q_RB), torch.get_num_threads())
    return q_RB


def _backward(
    ps_SB: Sequence[Tensor], bs_SF: Sequence[Tensor], a_RF: Tensor, u_RB: Tensor, ranks: Sequence[int], activation: str
) -> list[Tensor]:
    ps_SB, bs_SF = [p.contiguous() for p in ps_SB], [b.contiguous() for b in bs_SF]
    a_RF, u_RB = a_RF.contiguous(), u_RB.contiguous()
    da_RF, dbs_SF = torch.empty_like(a_RF), [torch.empty_like(b) for b in bs_SF]
    vs_RB = [p.new_empty(rank, p.shape[1]) for p, rank in zip(ps_SB, ranks, strict=True)]
    ups = [
        _Up(p.shape[0], rank, pointer(p), pointer(b), pointer(v), pointer(db))
        for p, b, v, db, rank in zip(ps_SB, bs_SF, vs_RB, dbs_SF, ranks, strict=True)
    ]
    operands = pointer(a_RF), pointer(u_RB), pointer(da_RF)
    _functions()[1](*_sizes(activation, ps_SB, ups, a_RF), *operands, torch.get_num_threads())
    return [da_RF, *vs_RB, *dbs_SF]


def _sizes(activation: str, ps_SB: Sequence[Tensor], ups: Sequence[_Up], a_RF: Tensor) -> tuple[Any, ...]:
    rank, wide = a_RF.shape
    return ACTIVATIONS.index(activation), ps_SB[0].shape[1], wide, len(ups), (_Up * len(ups))(*ups), rank


feed_forward = define("feed_forward(Tensor[] p, Tensor[] b, Tensor a, str activation) -> Tensor", _forward)
"""Q (R, B) = A hᵀ from P_k (S, B), B_k (S, F), their first rows ones and the bias where there is one, and A (R, F)."""

feed_forward_backward = define(
    "feed_forward_backward(Tensor[] p, Tensor[] b, Tensor a, Tensor u, int[] ranks, str activation) -> Tensor[]",
    _backward,
)
"""∂A, then V_k of all, then ∂B_k of all, from U (R, B); ranks: of the B_k without their biases."""


@register_flop_formula(torch.ops.comera.feed_forward)  # type: ignore[untyped-decorator]
def _flops(p: Any, b: Any, a: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Y_k and Q."""
    return int(2 * p[0][1] * a[1] * (sum(rows for rows, _ in b) + a[0]))


@register_flop_formula(torch.ops.comera.feed_forward_backward)  # type: ignore[untyped-decorator]
def _flops_backward(p: Any, b: Any, a: Any, u: Any, ranks: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Y_k again and ∂B_k, dh and ∂A, V_k."""
    return int(2 * p[0][1] * a[1] * (2 * sum(rows for rows, _ in b) + 2 * a[0] + sum(ranks)))
