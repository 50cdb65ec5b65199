"""The operations of low_rank.cpp: y_k = x A_k B_k + bias_k of weights that share x.

Shapes: B batch, I/O in/out features, R rank, S rows of b: the rank, and one more with a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, checked, floats, operation, words
from comera.kernels.cpp.memory import empty


@cache
def width(rank: int, rows: int) -> int:
    """Columns of memory that [1 P] takes, for vectors as long as any processor's; rows: those of b."""
    return max(rows - rank + -(-rank // 16) * 16, -(-rows // 16) * 16)


class Factors(NamedTuple):
    """A and b of one weight as the kernels read them, their sizes, and the `width` of its P."""

    a: Tensor
    b: Tensor
    rank: int
    rows: int
    out_features: int
    width: int


def checked_factors(a_RI: Tensor, b_SO: Tensor, features: int) -> Factors:
    """Raises RuntimeError unless A has `features` columns, b as many rows as A or one more, both float32 on the CPU."""
    (rank, inputs), (rows, outputs) = a_RI.shape, b_SO.shape
    if inputs != features or not 0 <= rows - rank <= 1:
        raise RuntimeError(
            f"expected A (rank, {features}) and B (rank, out) or [bias; B] (1 + rank, out), "
            f"got {list(a_RI.shape)} and {list(b_SO.shape)}"
        )
    return Factors(floats("A", a_RI), floats("b", b_SO), rank, rows, outputs, width(rank, rows))


def _low_rank_flops(x: Any, a: Any, b: Any) -> int:
    return int(2 * x[0] * (sum(r * i for r, i in a) + sum(s * o for s, o in b)))


@operation("low_rank(Tensor x, Tensor[] a, Tensor[] b) -> Tensor[]", _low_rank_flops)
def low_rank(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    """All [1 P_k] in one tensor (B, Σ `width`), then y_k (B, O), from x (B, I), A_k (R, I) and [bias_k; B_k] (S, O).

    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    batch, features = x_BI.shape
    x_BI = floats("x", x_BI)
    weights = [checked_factors(a, b, features) for a, b in zip(as_RI, bs_SO, strict=True)]
    columns = sum(w.width for w in weights)
    p_BS, ys_BO = empty(batch, columns), [empty(batch, w.out_features) for w in weights]
    flat: list[int] = []
    at = p_BS.data_ptr()
    for (a, b, rank, rows, outputs, size), y in zip(weights, ys_BO, strict=True):
        flat += (rank, rows, outputs, a.data_ptr(), b.data_ptr(), at, y.data_ptr(), 0, 0)
        at += 4 * size
    call("low_rank", batch, features, x_BI.data_ptr(), len(weights), words(flat), columns, torch.get_num_threads())
    return [p_BS, *ys_BO]


def _low_rank_output_flops(p: Any, ranks: Any, b: Any) -> int:
    return int(2 * p[0] * sum(s * o for s, o in b))


@operation("low_rank_output(Tensor p, int[] ranks, Tensor[] b) -> Tensor[]", _low_rank_output_flops)
def low_rank_output(p_BS: Tensor, ranks: Sequence[int], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    """The y_k of `low_rank` from its P, to the same bits. Raises RuntimeError as `low_rank` does."""
    batch = p_BS.shape[0]
    columns = sum(width(rank, b.shape[0]) for rank, b in zip(ranks, bs_SO, strict=True))
    p_BS, bs_SO = checked("P", p_BS, batch, columns), [floats("b", b) for b in bs_SO]
    ys_BO: list[Tensor] = []
    flat: list[int] = []
    at = p_BS.data_ptr()
    for rank, b in zip(ranks, bs_SO, strict=True):
        rows, outputs = b.shape
        if not 0 <= rows - rank <= 1:
            raise RuntimeError(f"expected b of rank {rank} with as many rows or one more, got {list(b.shape)}")
        y = empty(batch, outputs)
        ys_BO.append(y)
        flat += (rank, rows, outputs, 0, b.data_ptr(), at, y.data_ptr(), 0, 0)
        at += 4 * width(rank, rows)
    call("low_rank_output", batch, len(ys_BO), words(flat), columns, torch.get_num_threads())
    return ys_BO


def _low_rank_backward_flops(x: Any, p: Any, dy: Any, a: Any, b: Any, dx: bool, da: bool, db: bool) -> int:
    """U_k, dx and ∂A_k, ∂B_k."""
    total = 0
    for (rank, features), (rows, out), each in zip(a, b, dy, strict=True):
        if each is not None:
            total += rank * (out * (dx or da) + features * (dx + da)) + rows * out * db
    return int(2 * x[0] * total)


@operation(
    "low_rank_backward(Tensor x, Tensor p, Tensor?[] dy, Tensor[] a, Tensor[] b, bool dx, bool da, bool db)"
    " -> Tensor[]",
    _low_rank_backward_flops,
)
def low_rank_backward(
    x_BI: Tensor,
    p_BS: Tensor,
    dys_BO: Sequence[Tensor | None],
    as_RI: Sequence[Tensor],
    bs_SO: Sequence[Tensor],
    wants_x: bool,
    wants_a: bool,
    wants_b: bool,
) -> list[Tensor]:
    """dx, then ∂A_k, then [∂bias_k; ∂B_k] of those k that have a dy_k, each where wanted.

    Raises RuntimeError as `low_rank` does.
    """
    batch, features = x_BI.shape
    x_BI = floats("x", x_BI)
    weights = [checked_factors(a, b, features) for a, b in zip(as_RI, bs_SO, strict=True)]
    columns = sum(w.width for w in weights)
    p_BS = checked("P", p_BS, batch, columns)
    dx_BI = empty(batch, features) if wants_x else None
    das_RI: list[Tensor] = []
    dbs_SO: list[Tensor] = []
    flat: list[int] = []
    kept, at = [], p_BS.data_ptr()
    for (a, b, rank, rows, outputs, size), dy in zip(weights, dys_BO, strict=True):
        if dy is not None:
            dy = checked("dy", dy, batch, outputs)
            kept.append(dy)  # until the call: it may be a copy
            da, db = torch.empty_like(a) if wants_a else None, torch.empty_like(b) if wants_b else None
            if da is not None:
                das_RI.append(da)
            if db is not None:
                dbs_SO.append(db)
            flat += (rank, rows, outputs, a.data_ptr(), b.data_ptr(), at, dy.data_ptr(), address(da), address(db))
        at += 4 * size
    given = batch, features, x_BI.data_ptr(), len(kept), words(flat), columns, address(dx_BI)
    call("low_rank_backward", *given, torch.get_num_threads())
    return [*([] if dx_BI is None else [dx_BI]), *das_RI, *dbs_SO]
