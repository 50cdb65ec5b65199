"""Rows of one table or of all tables of a model by the C++ kernel, in one call each way.

    row(id) = L[i] R[k]ᵀ,   id = i · M_R + k          backward   ∂L[i] += ∂row R[k],   ∂R[k] += ∂rowᵀ L[i]

A dense table has no R: its rows are those of L.

The rows of one table for a batch take some ten microseconds. What was around them in Python, autograd and the threads'
meeting took several times as long, table by table; so the kernel takes ids, cores and gates as they are.

Shapes: N ids, M rows of a part, X and Y columns of L and R, R the rank between them (`lookup_rows.py`).
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.kernels.cpp import lookup
from comera.ops.dtypes import without_autocast


class PairTable(NamedTuple):
    """The rows to look up in one table, all operands float32 on the CPU.

    ids: (N,) int64. left: L (M, X, R), or a first core (1, M, X, R), or a dense table (M, X). right: R (M, Y, R), or a
    core (R, M, N, S) with Y = N·S, or None of a dense table. gates: those between L and a core (R,); one at or below
    `threshold` counts as 0. limit: the number of rows, M_L · M_R at most. padding: the id whose row is zero and passes
    no gradient.
    """

    ids: Tensor
    left: Tensor
    right: Tensor | None
    gates: Tensor | None
    limit: int
    padding: int | None = None
    threshold: float = -inf


def pair_rows(tables: Sequence[PairTable]) -> list[Tensor]:
    """Rows (N, X·Y) of each table; differentiable twice. Raises ValueError for an id outside of its table."""
    numbers = tuple((table.limit, table.padding, table.threshold) for table in tables)
    return list(_PairRows.apply(numbers, *(tensor for table in tables for tensor in table[:4])))


def masked(gates_R: Tensor, threshold: float) -> Tensor:
    """Gates, zero where they are at or below the threshold."""
    return gates_R if threshold == -inf else gates_R.masked_fill(gates_R <= threshold, 0.0)


class _PairRows(torch.autograd.Function):
    """ids, L, R and gates of each table. The formulas stand at the top of the file."""

    @staticmethod
    def forward(ctx: Any, numbers: Sequence[tuple[Any, ...]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        every = _tables(numbers, tensors)
        rows_and_made = lookup.pair_rows(*_columns(every))
        ctx.save_for_backward(*tensors, *rows_and_made[len(every) :])
        wants = ctx.needs_input_grad[1:]
        rows = rows_and_made[: len(every)]
        ctx.mark_non_differentiable(*(each for k, each in enumerate(rows) if not any(wants[4 * k : 4 * k + 4])))
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *drows: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, count = ctx.saved_tensors, 4 * len(ctx.numbers)
        tables, left_over = _tables(ctx.numbers, saved[:count]), iter(saved[count:])
        of_core = [table.right is not None and table.right.ndim == 4 for table in tables]
        made = [next(left_over) if each else None for each in of_core]
        wanted = list(ctx.needs_input_grad[1:])
        for k, drows_ND in enumerate(drows):
            wanted[4 * k : 4 * k + 4] = [want and drows_ND is not None for want in wanted[4 * k : 4 * k + 4]]
        if torch.is_grad_enabled():  # the kernel has no derivative
            with without_autocast(tables[0].left):
                found = iter(_differentiable(tables, drows, wanted))
        else:
            used = [k for k in range(len(tables)) if any(wanted[4 * k : 4 * k + 4])]
            of_used = [want for k in used for want in wanted[4 * k + 1 : 4 * k + 4]]
            given = [drows[k] for k in used], *_columns([tables[k] for k in used])
            found = iter(lookup.pair_rows_backward(*given[:4], [made[k] for k in used], *given[4:], of_used))
        return None, *(next(found) if want else None for want in wanted)


def _tables(numbers: Sequence[tuple[Any, ...]], tensors: Sequence[Tensor | None]) -> list[PairTable]:
    return [PairTable(*tensors[4 * k : 4 * k + 4], *each) for k, each in enumerate(numbers)]  # type: ignore[arg-type]


def _columns(tables: Sequence[PairTable]) -> list[Any]:
    """The operands of all tables as the kernel takes them: all ids, all L ..."""
    ids, lefts, rights, gates, limits, paddings, thresholds = map(list, zip(*tables, strict=True))
    return [ids, lefts, rights, gates, limits, [-1 if padding is None else padding for padding in paddings], thresholds]


def _differentiable(
    tables: Sequence[PairTable], drows: Sequence[Tensor | None], wanted: Sequence[bool]
) -> Sequence[Tensor]:
    """The gradients of the wanted operands, which can be differentiated again."""
    operands = [tensor for table in tables for tensor in table[:4]]
    inputs = [tensor for tensor, want in zip(operands, wanted, strict=True) if tensor is not None and want]
    came = [(_torch_rows(table), grad) for table, grad in zip(tables, drows, strict=True) if grad is not None]
    outputs, grads = [rows for rows, _ in came], [grad for _, grad in came]
    return torch.autograd.grad(outputs, inputs, grads, create_graph=True, materialize_grads=True)


def _torch_rows(table: PairTable) -> Tensor:
    """The rows by operations of torch."""
    ids_N, left, right_MYR, gates_R = table[:4]
    if right_MYR is None:
        rows_ND = left.index_select(0, ids_N)
    else:
        if right_MYR.ndim == 4:
            if gates_R is not None:
                right_MYR = right_MYR * masked(gates_R, table.threshold).view(-1, 1, 1, 1)
            right_MYR = right_MYR.flatten(2).permute(1, 2, 0)
        left_MXR, rows = left.reshape(left.shape[-3:]), right_MYR.shape[0]
        rows_ND = torch.bmm(left_MXR[ids_N // rows], right_MYR[ids_N % rows].mT).flatten(1)
    return rows_ND if table.padding is None else rows_ND.masked_fill((ids_N == table.padding).unsqueeze(1), 0)
