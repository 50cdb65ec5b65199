"""Rows of a TT-matrix by a Triton kernel (kernels/triton.py), which select.py chooses on some GPUs.

    row[u] = L[i_u] R[:, k_u];   ∂L[i_u] += drow[u] R[:, k_u]ᵀ,  ∂R[:, k_u] += L[i_u]ᵀ drow[u]

Shapes: U ids, M/N rows and columns of the left (L) and right (R) part, R the rank between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
