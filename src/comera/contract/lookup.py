"""Rows of a tensor-train matrix: the look-up of an embedding whose table is never formed.

    E[id] = L[id // M_R] · R[:, id % M_R]          (N_L × r) @ (r × N_R), METHOD §3

L and R are the cores merged left and right of one bond. Repeated ids are looked up once; the blocks of the different
ones are gathered and multiplied in pieces that stay in the caches, and gathered again in the backward, so that only
L, R and the ids are kept.

Shapes: U different ids, M/N row and column modes of the left (L) or right (R) half, r the rank between them, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.contract import kernels
from comera.contract.halves import check_cores, merge_dtype, pieces, ttm_halves, without_autocast
from comera.contract.plan import ContractionPlan, choose
from comera.errors import IdError, SpecError
from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec


def ttm_lookup(
    ids: Tensor,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    *,
    padding_idx: int | None = None,
    plan: ContractionPlan | None = None,
) -> Tensor:
    """Rows `ids` of the tensor-train matrix of `cores`, as `nn.Embedding` gives them.

    ids: integers of any shape. cores: `order` tensors of `spec.core_shapes`, rank parameters absorbed.
    padding_idx: its row is exactly zero and passes no gradient; negative counts from the end.
    plan: a forced choice; by default `plan_lookup` for this many ids.
    Returns (*ids.shape, embedding_dim) in the cores' dtype (half-precision cores are multiplied in float32).
    Raises IdError for an id outside the table (on an accelerator and under torch.compile a device-side assertion, which
    does not synchronise), TypeError for ids that are no integers, SpecError for cores or a padding_idx that do not fit
    `spec`. Source: [CoMERA] §4, METHOD §3.
    """
    check_cores(spec, cores)
    _check_ids(ids, spec)
    flat_B = ids.reshape(ids.numel())
    strategy, split = choose("lookup", spec, ids.numel(), cores[0].element_size(), plan)
    ids_U, where_B = flat_B, None
    # the number of different ids must be known on the host: no look at it where that synchronises or breaks the graph
    if strategy != "dense" and ids.device.type == "cpu" and not torch.compiler.is_compiling():
        ids_U, where_B = torch.unique(flat_B, return_inverse=True)
    with without_autocast(cores[0]):
        if strategy == "dense":
            table_VD = materialize(spec, [core.to(merge_dtype(core.dtype)) for core in cores])
            rows_UD = F.embedding(ids_U, table_VD)
        else:
            left_MNR, right_RMN = ttm_halves(cores, split)
            right_MRN = right_RMN.transpose(0, 1).contiguous()
            rows = kernels.rows if kernels.takes_rows(left_MNR, right_MRN) else _Rows.apply
            rows_UD = rows(ids_U, left_MNR, right_MRN)[:, : spec.embedding_dim]
        if padding_idx is not None:
            rows_UD = rows_UD.masked_fill((ids_U == _row(padding_idx, spec)).unsqueeze(1), 0)
        rows_BD = rows_UD if where_B is None else F.embedding(where_B, rows_UD)
    return rows_BD.to(cores[0].dtype).reshape(*ids.shape, spec.embedding_dim)


def _check_ids(ids: Tensor, spec: TTMSpec) -> None:
    """Raise unless all ids are integers in the table; on an accelerator assert it there, without synchronising."""
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected ids of dtype int32 or int64, got {ids.dtype}: convert them with ids.long()")
    rows = spec.num_embeddings
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"expected every id in 0 ... {rows - 1}")
        return
    wrong = (ids < 0) | (ids >= rows)
    if wrong.any():
        position = wrong.nonzero()[0].tolist()
        raise IdError(
            f"expected every id in 0 ... {rows - 1} for a table of {rows} rows, got {int(ids[tuple(position)])} "
            f"at position {position} of ids of shape {list(ids.shape)}: check the tokenizer or raise num_embeddings"
        )


def _row(padding_idx: int, spec: TTMSpec) -> int:
    """`padding_idx` counted from the start. Raises SpecError when it is outside the table."""
    rows = spec.num_embeddings
    if not -rows <= padding_idx < rows:
        raise SpecError(f"expected a padding_idx in {-rows} ... {rows - 1} for {rows} rows, got {padding_idx}")
    return padding_idx % rows


class _Rows(torch.autograd.Function):
    """rows[u] = L[i_u] R[:, k_u] with u = i_u · M_R + k_u; kept: L, R and the ids.

    ∂L[i_u] += drow[u] R[:, k_u]ᵀ,   ∂R[:, k_u] += L[i_u]ᵀ drow[u],   piece by piece.
    """

    @staticmethod
    def forward(ctx: Any, ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
        ctx.save_for_backward(ids_U, left_MNR, right_MRN)
        rows_UNN = left_MNR.new_empty(ids_U.numel(), left_MNR.shape[1], right_MRN.shape[2])
        for part in _parts(ids_U, left_MNR, right_MRN):
            _, _, left_UNR, right_URN = _gather(ids_U[part], left_MNR, right_MRN)
            torch.bmm(left_UNR, right_URN, out=rows_UNN[part])
        return rows_UNN.flatten(1)

    @staticmethod
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        ids_U, left_MNR, right_MRN = ctx.saved_tensors
        # contiguous, whatever the strides of L and R are: flatten must give views, or the sums go into a copy
        dleft_MNR, dright_MRN = left_MNR.new_zeros(left_MNR.shape), right_MRN.new_zeros(right_MRN.shape)
        drows_UNN = drows_UD.reshape(ids_U.numel(), left_MNR.shape[1], right_MRN.shape[2])
        with without_autocast(drows_UD):
            for part in _parts(ids_U, left_MNR, right_MRN):
                i_U, k_U, left_UNR, right_URN = _gather(ids_U[part], left_MNR, right_MRN)
                dleft_UNR = torch.bmm(drows_UNN[part], right_URN.transpose(1, 2))
                dright_URN = torch.bmm(left_UNR.transpose(1, 2), drows_UNN[part])
                dleft_MNR.flatten(1).index_add_(0, i_U, dleft_UNR.flatten(1))
                dright_MRN.flatten(1).index_add_(0, k_U, dright_URN.flatten(1))
        return None, dleft_MNR, dright_MRN


def _gather(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Left and right digit of each id, and the two blocks (U, N_L, r), (U, r, N_R)."""
    i_U, k_U = ids_U // right_MRN.shape[0], ids_U % right_MRN.shape[0]
    left_UK, right_UK = F.embedding(i_U, left_MNR.flatten(1)), F.embedding(k_U, right_MRN.flatten(1))
    size = ids_U.numel()
    return i_U, k_U, left_UK.view(size, *left_MNR.shape[1:]), right_UK.view(size, *right_MRN.shape[1:])


def _parts(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> list[slice]:
    """The pieces of the ids for their two blocks, r·(N_L + N_R) numbers an id."""
    return pieces(ids_U.numel(), prod(left_MNR.shape[1:]) + prod(right_MRN.shape[1:]), ids_U.device)
