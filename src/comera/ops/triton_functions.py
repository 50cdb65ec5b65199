"""The Triton kernels with their derivatives: the low-rank product with its epilogue, and the lookup of rows.

    y = act((x Aᵀ) B + bias),  P = x Aᵀ kept;   U = dy Bᵀ,  dx = U A,  ∂A = Uᵀ x,  ∂B = Pᵀ dy
    row[u] = L[i_u] R[:, k_u];   ∂L[i_u] += drow[u] R[:, k_u]ᵀ,  ∂R[:, k_u] += L[i_u]ᵀ drow[u]

triton is optional: kernels/triton.py is imported where a kernel runs.

Shapes: B batch, I/O in/out features, R rank; U ids, M/N rows and columns of the left (L) and right (R) factor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comera.ops.activations import ACTIVATIONS
from comera.ops.dtypes import without_autocast


def low_rank(
    x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """act((x Aᵀ) B + bias), all operands in one dtype (float32, bfloat16 or float16), rank at most TRITON_MOST_RANK.

    activation: a name in `ACTIVATIONS` or None. Sums are taken in float32 (TF32 where torch allows it), P is rounded to
    x's dtype. Kept for the backward: x, A, B, bias and P, from which the argument of an activation is computed again.
    Differentiable once.
    """
    y_BO: Tensor = _LowRank.apply(x_BI, a_RI, b_RO, bias, activation)
    return y_BO


def lookup_rows(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
    """Rows (U, N_L·N_R) of a TT-matrix from its factors, as `rows.pair_sums` of each id; ids are checked by the caller.

    Sums are taken in float32. The gradients of L and R are added in any order. Differentiable once.
    """
    rows_UD: Tensor = _LookupRows.apply(ids_U, left_MNR, right_MRN)
    return rows_UD


class _LowRank(torch.autograd.Function):
    """The formulas are at the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        from comera.kernels import triton as kernels

        y_BO, p_BR = kernels.low_rank(x_BI, a_RI, b_RO, bias, activation)
        ctx.activation = activation
        ctx.save_for_backward(x_BI, a_RI, b_RO, bias, p_BR)
        return y_BO

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        from comera.kernels import triton as kernels

        x_BI, a_RI, b_RO, bias, p_BR = ctx.saved_tensors
        wants_x, wants_a, wants_b, wants_bias, _ = ctx.needs_input_grad
        dx_BI = da_RI = db_RO = dbias_O = None
        with without_autocast(dy_BO):
            if ctx.activation is not None:
                z_BO = p_BR @ b_RO if bias is None else torch.addmm(bias, p_BR, b_RO)
                dy_BO = ACTIVATIONS[ctx.activation][1](dy_BO, z_BO)
            if wants_x:
                dx_BI, u_BR = kernels.low_rank(dy_BO, b_RO, a_RI, None, None)
            elif wants_a:
                u_BR = dy_BO @ b_RO.t()
            if wants_a:
                da_RI = u_BR.t() @ x_BI
            if wants_b:
                db_RO = p_BR.t() @ dy_BO
            if wants_bias:
                dbias_O = dy_BO.sum(0)
        return dx_BI, da_RI, db_RO, dbias_O, None


class _LookupRows(torch.autograd.Function):
    """The formulas are at the top of the file."""

    @staticmethod
    def forward(ctx: Any, ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
        from comera.kernels import triton as kernels

        ctx.save_for_backward(ids_U, left_MNR, right_MRN)
        return kernels.lookup_rows(ids_U, left_MNR, right_MRN)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        from comera.kernels import triton as kernels

        ids_U, left_MNR, right_MRN = ctx.saved_tensors
        return None, *kernels.lookup_rows_backward(ids_U, left_MNR, right_MRN, drows_UD)
