"""Rows of pairs one by one, by torch: for some thousand ids, where blocks that share a right row stay small.

    row(i, k) = L[i] R[k]ᵀ   (X × r)(r × Y)        backward   ∂L[i] += ∂row R[k],   ∂R[k] += ∂rowᵀ L[i]

One call of `embedding_bag` in the backward, which sums weighted rows, takes a third of the time of `bmm`.

Shapes: U pairs, P of them in a chunk, M rows of a table, X and Y columns of L and R, R the rank between them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.ops.chunking import chunks
from comera.ops.dtypes import without_autocast

SMALL = 256  # X·Y up to which weighted sums of rows are faster than matrix products


def separate_rows(i_U: Tensor, k_U: Tensor, left_MXR: Tensor, right_MYR: Tensor) -> Tensor:
    """Rows (U, X·Y) of the pairs (i, k); differentiable twice."""
    rows: Tensor = _SeparateRows.apply(left_MXR.contiguous(), right_MYR.contiguous(), i_U, k_U)
    return rows


class _SeparateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left_MXR: Tensor, right_MYR: Tensor, i_U: Tensor, k_U: Tensor) -> Tensor:
        ctx.save_for_backward(left_MXR, right_MYR, i_U, k_U)
        (_, x, rank), y = left_MXR.shape, right_MYR.shape[1]
        rows = [left_MXR.new_empty(0, x * y)]
        for part in _chunks(i_U, x, y, rank):
            left_PXR, right_PYR = left_MXR.index_select(0, i_U[part]), right_MYR.index_select(0, k_U[part])
            rows.append(torch.bmm(left_PXR, right_PYR.mT).flatten(1))
        return rows[1] if len(rows) == 2 else torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        left_MXR, right_MYR, i_U, k_U = ctx.saved_tensors
        if not torch.is_grad_enabled():  # embedding_bag over a parameter would prepare for a gradient
            left_MXR, right_MYR = left_MXR.detach(), right_MYR.detach()
        (_, x, rank), y = left_MXR.shape, right_MYR.shape[1]
        dleft_MXR, dright_MYR = left_MXR.new_zeros(left_MXR.shape), right_MYR.new_zeros(right_MYR.shape)
        transposed_D = torch.arange(x * y).view(x, y).t().reshape(-1)
        with without_autocast(drows_UD):
            for part in _chunks(i_U, x, y, rank):
                i_P, k_P, drows_PD = i_U[part], k_U[part], drows_UD[part]
                dleft_MXR.index_add_(0, i_P, _products(drows_PD, x, right_MYR, k_P))
                drows_PD = drows_PD.index_select(1, transposed_D)  # faster than transposing many small matrices
                dright_MYR.index_add_(0, k_P, _products(drows_PD, y, left_MXR, i_P))
        return dleft_MXR, dright_MYR, None, None


def _chunks(i_U: Tensor, x: int, y: int, rank: int) -> list[slice]:
    """Chunks of the pairs that stay in the caches."""
    return chunks(i_U.numel(), 2 * rank * (x + y) + x * y, i_U.device)


def _products(a_UD: Tensor, x: int, table_MYR: Tensor, k_U: Tensor) -> Tensor:
    """a table[k] (U, X, R) for each of many small matrices a (X, Y), given as (U, X·Y)."""
    pairs, (m, y, rank) = a_UD.shape[0], table_MYR.shape
    if x * y > SMALL or not (pairs and x and y and rank):
        return torch.bmm(a_UD.reshape(pairs, x, y), table_MYR.index_select(0, k_U))
    ids_UD = torch.add(torch.arange(x * y) % y, k_U.unsqueeze(1), alpha=y)
    starts, weights_K, table_KR = torch.arange(0, pairs * x * y, y), a_UD.reshape(-1), table_MYR.view(m * y, rank)
    sums_KR = F.embedding_bag(ids_UD.view(-1), table_KR, starts, mode="sum", per_sample_weights=weights_K)
    return sums_KR.view(pairs, x, rank)
