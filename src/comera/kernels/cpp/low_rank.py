"""Operations of two_sided.cpp. Shapes: B batch, I/O in/out features, R rank, S rank with the bias's row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Array, Structure, c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import define, pointer
from comera.kernels.cpp.memory import empty
from comera.kernels.flops import flop_formula
from comera.kernels.select import supports

# Beside torch's products, forward and backward together, 768 features, two cores of an AMD EPYC 7003: at rank 30 1.4
# times faster with 128 rows, for one weight and for three, 1.5 with 8, 1.2 with 4,096; 1.0 to 1.2 at rank 128, as fast
# at 256.
LEAST_ROWS, MOST_RANK = 2, 128


class _Half(Structure):
    _fields_ = (
        ("rank", c_long),
        ("rows", c_long),
        ("features", c_long),
        ("a", c_void_p),
        ("b", c_void_p),
        ("p", c_void_p),
        ("y", c_void_p),
        ("da", c_void_p),
        ("db", c_void_p),
    )


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    forward, wide, backward = library().two_sided, library().two_sided_wide, library().two_sided_backward
    halves: list[Any] = [c_long, POINTER(_Half), c_long]
    forward.argtypes = [c_long, c_long, c_void_p, *halves, c_int]
    wide.argtypes = [c_long, *halves, c_int]
    backward.argtypes = [c_long, c_long, c_void_p, *halves, c_void_p, c_int]
    forward.restype = wide.restype = backward.restype = None
    return forward, wide, backward


def width(rank: int, rows: int) -> int:
    """Columns of memory that [1 P] has, for vectors as long as any processor's; rows: the rank, with that of a bias."""
    return max(rows - rank + -(-rank // 16) * 16, -(-rows // 16) * 16)


def _widths(ranks: Sequence[int], bs_SO: Sequence[Tensor]) -> list[int]:
    return [width(rank, b.shape[0]) for rank, b in zip(ranks, bs_SO, strict=True)]


def _forward(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    x_BI, as_RI, bs_SO = x_BI.contiguous(), [a.contiguous() for a in as_RI], [b.contiguous() for b in bs_SO]
    ranks = [a.shape[0] for a in as_RI]
    columns = _widths(ranks, bs_SO)
    p_BS = empty(x_BI.shape[0], sum(columns))
    halves, ys_BO = _halves(p_BS, columns, [a.data_ptr() for a in as_RI], ranks, bs_SO)
    _functions()[0](*x_BI.shape, x_BI.data_ptr(), len(halves), halves, p_BS.shape[1], torch.get_num_threads())
    return [p_BS, *ys_BO]


def _wide(p_BS: Tensor, ranks: Sequence[int], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    bs_SO = [b.contiguous() for b in bs_SO]
    halves, ys_BO = _halves(p_BS, _widths(ranks, bs_SO), [None] * len(ranks), ranks, bs_SO)
    _functions()[1](p_BS.shape[0], len(halves), halves, p_BS.shape[1], torch.get_num_threads())
    return ys_BO


def _halves(
    p_BS: Tensor, columns: Sequence[int], as_: Sequence[int | None], ranks: Sequence[int], bs_SO: Sequence[Tensor]
) -> tuple[Array[_Half], list[Tensor]]:
    """The halves as the kernels take them, and the y_k that they write to. columns: of P. as_: where the A stand."""
    batch, at, ys_BO, halves = p_BS.shape[0], p_BS.data_ptr(), [], []
    for a, b, rank, width in zip(as_, bs_SO, ranks, columns, strict=True):
        rows, features = b.shape
        y = empty(batch, features)
        ys_BO.append(y)
        halves.append(_Half(rank, rows, features, a, b.data_ptr(), at, y.data_ptr()))
        at += width * p_BS.element_size()
    return (_Half * len(halves))(*halves), ys_BO


def _backward(
    x_BI: Tensor,
    p_BS: Tensor,
    dys_BO: Sequence[Tensor | None],
    as_RI: Sequence[Tensor],
    bs_SO: Sequence[Tensor],
    wants_x: bool,
    wants_a: bool,
    wants_b: bool,
) -> list[Tensor]:
    columns = _widths([a.shape[0] for a in as_RI], bs_SO)
    x_BI, as_RI, bs_SO = x_BI.contiguous(), [a.contiguous() for a in as_RI], [b.contiguous() for b in bs_SO]
    dys_BO = [None if dy is None else dy.contiguous() for dy in dys_BO]
    dx_BI, at, halves = empty(*x_BI.shape) if wants_x else None, p_BS.data_ptr(), []
    das_RI: list[Tensor] = []
    dbs_SO: list[Tensor] = []
    for a, b, dy, width in zip(as_RI, bs_SO, dys_BO, columns, strict=True):
        if dy is not None:
            if wants_a:
                das_RI.append(torch.empty_like(a))
            if wants_b:
                dbs_SO.append(torch.empty_like(b))
            grads = das_RI[-1].data_ptr() if wants_a else None, dbs_SO[-1].data_ptr() if wants_b else None
            halves.append(_Half(a.shape[0], *b.shape, a.data_ptr(), b.data_ptr(), at, dy.data_ptr(), *grads))
        at += width * p_BS.element_size()
    given = x_BI.data_ptr(), len(halves), (_Half * len(halves))(*halves), p_BS.shape[1], pointer(dx_BI)
    _functions()[2](*x_BI.shape, *given, torch.get_num_threads())
    return [*([] if dx_BI is None else [dx_BI]), *das_RI, *dbs_SO]


def takes_two_sided(x_BI: Tensor, halves: Sequence[Tensor]) -> bool:
    """Whether the operations take the work, which no graph may go through, and are faster at it."""
    sizes = x_BI.shape[0] >= LEAST_ROWS and max(half.shape[0] for half in halves[::2]) <= MOST_RANK
    return sizes and supports("low_rank", x_BI, *halves)


low_rank = define("low_rank(Tensor x, Tensor[] a, Tensor[] b) -> Tensor[]", _forward)
"""All [1 P_k] side by side (`width` columns each), then y_k (B, O), from x (B, I), A_k (R, I), [bias_k; B_k] (S, O)."""

low_rank_output = define("low_rank_output(Tensor p, int[] ranks, Tensor[] b) -> Tensor[]", _wide)
"""The y_k from P, to the same bits."""

low_rank_backward = define(
    "low_rank_backward(Tensor x, Tensor p, Tensor?[] dy, Tensor[] a, Tensor[] b, bool dx, bool da, bool db)"
    " -> Tensor[]",
    _backward,
)
"""dx, then ∂A_k, then [∂bias_k; ∂B_k] of those k that have a dy_k, as far as they are wanted."""


@flop_formula(torch.ops.comera.low_rank)
def _flops(x: Any, a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * x[0] * (sum(r * i for r, i in a) + sum(s * o for s, o in b)))


@flop_formula(torch.ops.comera.low_rank_output)
def _flops_wide(p: Any, ranks: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * p[0] * sum(s * o for s, o in b))


@flop_formula(torch.ops.comera.low_rank_backward)
def _flops_backward(
    x: Any, p: Any, dy: Any, a: Any, b: Any, dx: bool, da: bool, db: bool, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """U_k, dx and ∂A_k, ∂B_k."""
    total = 0
    for (rank, features), (rows, out), each in zip(a, b, dy, strict=True):
        if each is not None:
            total += rank * (out * (dx or da) + features * (dx + da)) + rows * out * db
    return int(2 * x[0] * total)
