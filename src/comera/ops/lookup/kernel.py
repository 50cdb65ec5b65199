"""Rows by a kernel: of one table or of all tables of a model in C++, in one call each way; of one table by Triton.

    row(id) = L[i] R[k]ᵀ,   id = i · M_R + k          backward   ∂L[i] += ∂row R[k],   ∂R[k] += ∂rowᵀ L[i]

A dense table has no R: its rows are those of L.

The rows of one table for a batch take some ten microseconds. What was around them in Python, autograd and the threads'
meeting took several times as long, table by table; so the kernel takes ids, cores and gates as they are.

Shapes: N ids, M rows of a part, X and Y columns of L and R, R the rank between them.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comera.kernels.cpp import lookup
from comera.ops.dtypes import without_autocast
from comera.ops.lookup.plan import masked


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
    numbers = [(limit, -1 if padding is None else padding, threshold) for *_, limit, padding, threshold in tables]
    return list(_PairRows.apply(numbers, *(tensor for table in tables for tensor in table[:4])))


class _PairRows(torch.autograd.Function):
    """ids, L, R and gates of each table. The formulas stand at the top of the file."""

    @staticmethod
    def forward(ctx: Any, numbers: Sequence[tuple[Any, ...]], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.numbers = numbers
        ctx.set_materialize_grads(False)
        rows_and_made = lookup.pair_rows(*(tensors[k::4] for k in range(4)), *zip(*numbers, strict=True))
        rows, wants = rows_and_made[: len(numbers)], ctx.needs_input_grad[1:]
        ctx.save_for_backward(*tensors, *rows_and_made[len(numbers) :])
        ctx.mark_non_differentiable(*(each for k, each in enumerate(rows) if not any(wants[4 * k : 4 * k + 4])))
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *drows: Tensor | None) -> tuple[Tensor | None, ...]:
        count = 4 * len(ctx.numbers)
        saved = ctx.saved_tensors
        tensors, left_over = saved[:count], iter(saved[count:])
        made = [next(left_over) if right is not None and right.ndim == 4 else None for right in tensors[2::4]]
        wanted = [want and drows[k // 4] is not None for k, want in enumerate(ctx.needs_input_grad[1:])]
        if torch.is_grad_enabled():  # the kernel has no derivative
            found = iter(_differentiable(ctx.numbers, tensors, drows, wanted))
        else:
            used = [k for k in range(len(drows)) if any(wanted[4 * k : 4 * k + 4])]
            of_used = [want for k in used for want in wanted[4 * k + 1 : 4 * k + 4]]
            drows_used, made_used = [drows[k] for k in used], [made[k] for k in used]
            ids, left, right, gates = ([tensors[4 * k + part] for k in used] for part in range(4))
            numbers = zip(*(ctx.numbers[k] for k in used), strict=True)
            given = drows_used, ids, left, right, made_used, gates, *numbers, of_used
            found = iter(lookup.pair_rows_backward(*given))
        return None, *(next(found) if want else None for want in wanted)


def _differentiable(
    numbers: Sequence[tuple[Any, ...]],
    tensors: Sequence[Tensor | None],
    drows: Sequence[Tensor | None],
    wanted: Sequence[bool],
) -> Sequence[Tensor]:
    """The gradients of the wanted tensors, which can be differentiated again."""
    inputs = [tensor for tensor, want in zip(tensors, wanted, strict=True) if tensor is not None and want]
    came = [k for k, drows_ND in enumerate(drows) if drows_ND is not None]
    with without_autocast(inputs[0]):
        rows = [_torch_rows(*tensors[4 * k : 4 * k + 4], *numbers[k]) for k in came]  # type: ignore[arg-type]
        grads = [drows[k] for k in came]
        return torch.autograd.grad(rows, inputs, grads, create_graph=True, materialize_grads=True)


def _torch_rows(
    ids_N: Tensor,
    left: Tensor,
    right_MYR: Tensor | None,
    gates_R: Tensor | None,
    limit: int,
    padding: int,
    threshold: float,
) -> Tensor:
    """The rows by operations of torch."""
    if right_MYR is None:
        rows_ND = left.index_select(0, ids_N)
    else:
        if right_MYR.ndim == 4:
            right_MYR = right_MYR if gates_R is None else right_MYR * masked(gates_R, threshold).view(-1, 1, 1, 1)
            right_MYR = right_MYR.flatten(2).permute(1, 2, 0)
        left_MXR, rows = left.reshape(left.shape[-3:]), right_MYR.shape[0]
        rows_ND = torch.bmm(left_MXR[ids_N // rows], right_MYR[ids_N % rows].mT).flatten(1)
    return rows_ND.masked_fill((ids_N == padding).unsqueeze(1), 0)


def triton_rows(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
    """Rows (U, N_L·N_R) of checked ids, summed in float32; gradients are added in any order. Differentiable once."""
    rows_UD: Tensor = _TritonRows.apply(ids_U, left_MNR, right_MRN)
    return rows_UD


class _TritonRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
        from comera.kernels import triton

        ctx.save_for_backward(ids_U, left_MNR, right_MRN)
        return triton.lookup_rows(ids_U, left_MNR, right_MRN)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        from comera.kernels import triton

        ids_U, left_MNR, right_MRN = ctx.saved_tensors
        return None, *triton.lookup_rows_backward(ids_U, left_MNR, right_MRN, drows_UD)
