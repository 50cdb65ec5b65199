"""The products of merged tensor trains with a large batch: y = (x A) B + bias.

Layout. A rank of 30 is an awkward row length: on CPU (MKL, float32) x_BI @ A_IR runs at 33 GFLOP/s a core for rank 30,
at 55 for rank 32, and accelerators want leading dimensions in multiples of 8. So the rank is never the inner dimension
of what meets the batch: A_RI, P_RB = A xᵀ and U_RB = B dyᵀ run at 55 for rank 30, without padding.

Bias. It is one more row of B, which meets one more row of P, of ones: no wide copy of the bias before the product, no
wide sum for its gradient.

Shapes: B flattened batch, I/O in/out features, R rank, S rank with the row of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from comera.contract import kernels
from comera.contract.chain import widens
from comera.contract.halves import (
    left_gradients,
    left_products,
    merge_dtype,
    pad_last,
    right_gradients,
    right_products,
    without_autocast,
)
from comera.tt.spec import TTSpec


def merge_halves(spec: TTSpec, cores: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A (rank, in_features) and B (rank, out_features) in `dtype`: the input cores and the output cores merged.

    Half-precision cores are merged in float32. Differentiable, twice too.
    """
    halves: tuple[Tensor, Tensor] = _Merge.apply(spec, dtype, *cores)
    return halves


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that A, B and bias must have to meet x: x's own, or float32 where half precision is slow."""
    return torch.float32 if widens(x) else x.dtype


def two_sided(x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = (x Aᵀ) B + bias in x's dtype, the others in its `working_dtype`, autocast off.

    Kept for the backward are x, A, B and the narrow P = A xᵀ.
    """
    if kernels.takes_two_sided(x_BI, a_RI):
        return kernels.two_sided(x_BI, a_RI, b_RO, bias)
    y_BO: Tensor = _TwoSided.apply(x_BI, a_RI, b_RO, bias)
    return y_BO


class _Merge(torch.autograd.Function):
    """A and B from the cores, ∂A and ∂B back into them (halves.py); kept: the cores and the partial merges."""

    @staticmethod
    def forward(ctx: Any, spec: TTSpec, dtype: torch.dtype, *cores: Tensor) -> tuple[Tensor, Tensor]:
        left, right = _partial_merges(spec, cores)
        ctx.spec = spec
        ctx.save_for_backward(*cores, *left[:-1], *right[:-1])
        a_RI = left[-1][: spec.in_features].t().to(dtype)
        b_RO = right[-1][:, : spec.out_features].to(dtype)
        # copies: rows side by side, and a core that is a half by itself must not come out as a view of the parameter
        return tuple(half.clone(memory_format=torch.contiguous_format) for half in (a_RI, b_RO))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, da_RI: Tensor, db_RO: Tensor) -> tuple[Tensor | None, ...]:
        spec: TTSpec = ctx.spec
        order, split = spec.order, spec.split
        saved = ctx.saved_tensors  # once: under checkpointing a second look would find them gone
        cores, partial = saved[:order], saved[order:]
        left, right = partial[: split - 1], partial[split - 1 :]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: what was kept is no constant
            left, right = (products[:-1] for products in _partial_merges(spec, cores))
        wants_core = ctx.needs_input_grad[2:]
        grads: list[Tensor | None] = [None] * order
        merging = [core.to(merge_dtype(core.dtype)) for core in cores]
        if any(wants_core[:split]):
            da_RI = pad_last(da_RI.to(merging[0].dtype), prod(spec.in_modes))
            grads[:split] = left_gradients(merging[:split], left, da_RI.t())
        if any(wants_core[split:]):
            db_RO = pad_last(db_RO.to(merging[0].dtype), prod(spec.out_modes))
            grads[split:] = right_gradients(merging[split:], right, db_RO)
        return None, None, *(None if g is None else g.to(core.dtype) for g, core in zip(grads, cores, strict=True))


def _partial_merges(spec: TTSpec, cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All partial merges on both sides, the halves themselves last."""
    merging = [core.to(merge_dtype(core.dtype)) for core in cores]
    return left_products(merging[: spec.split]), right_products(merging[spec.split :])


class _TwoSided(torch.autograd.Function):
    """P = A xᵀ,  y = [P; 1]ᵀ [B; bias];   U = B dyᵀ,  dx = Uᵀ A,  ∂A = U x,  [∂B; ∂bias] = [P; 1] dy.

    W and ∂W are never formed. Written by hand because it takes 20 % less time than two F.linear under autograd.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None) -> Tensor:
        b_SO = with_bias(b_RO, bias)
        p_SB = with_ones(a_RI @ x_BI.to(a_RI.dtype).t(), b_SO.shape[0])
        ctx.save_for_backward(x_BI, a_RI, b_RO, p_SB)
        return (p_SB.t() @ b_SO).to(x_BI.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, a_RI, b_RO, p_SB = ctx.saved_tensors
        wants_x, wants_a, wants_b, wants_bias = ctx.needs_input_grad
        with without_autocast(dy_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: P is no constant
                p_SB = with_ones(a_RI @ x_BI.to(a_RI.dtype).t(), p_SB.shape[0])
            dy_BO = dy_BO.to(a_RI.dtype)
            dx_BI = da_RI = db_SO = None
            if wants_x or wants_a:
                u_RB = b_RO @ dy_BO.t()
                dx_BI = (u_RB.t() @ a_RI).to(x_BI.dtype) if wants_x else None
                da_RI = u_RB @ x_BI.to(a_RI.dtype) if wants_a else None
            if wants_b or wants_bias:
                db_SO = p_SB @ dy_BO
        return dx_BI, da_RI, *without_bias(db_SO, a_RI.shape[0], wants_bias)


def with_bias(b_RO: Tensor, bias: Tensor | None) -> Tensor:
    """[B; bias], which is B without one."""
    return b_RO if bias is None else torch.cat([b_RO, bias.unsqueeze(0)])


def with_ones(p_RB: Tensor, rows: int) -> Tensor:
    """[P; 1] of `rows` rows: P itself, or one row more."""
    return p_RB if rows == p_RB.shape[0] else torch.cat([p_RB, p_RB.new_ones(1, p_RB.shape[1])])


def without_bias(db_SO: Tensor | None, rank: int, biased: bool) -> tuple[Tensor | None, Tensor | None]:
    """∂B and ∂bias from [∂B; ∂bias]."""
    return (None, None) if db_SO is None else (db_SO[:rank], db_SO[rank] if biased else None)
