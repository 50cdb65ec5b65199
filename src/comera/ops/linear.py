"""How a compressed weight meets a batch: y = x W + bias for a tensor train, x Eᵀ + bias for a tensor-train matrix.

Shapes: B flattened batch, I/O in/out features (the modes' product where padded), R/S left/right rank, N mode(s);
M/N row and column modes of the left (L) or right (R) half of a TTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import SpecError
from comera.ops.halves import (
    autocast_dtype,
    check_cores,
    merge_dtype,
    pad_last,
    pieces,
    ttm_halves,
    without_autocast,
)
from comera.ops.low_rank import Half, merge_halves, two_sided, working_dtype
from comera.ops.planner.plan import ContractionPlan, choose_groups, choose_projection
from comera.ops.sequential import Groups, contract_groups
from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec, TTSpec


class Weight(NamedTuple):
    """A tensor train with its bias, as a layer holds it.

    spec. cores: of `spec.core_shapes`. bias: (out_features,) or None.
    absorbed: gives the cores with the rank parameters absorbed; None where `cores` have them absorbed already.
    halves: gives A and B in a dtype, B with the bias as its first row or without, or None where nobody else has made
    them (contract/together.py).
    """

    spec: TTSpec
    cores: Sequence[Tensor]
    bias: Tensor | None
    absorbed: Callable[[], Sequence[Tensor]] | None = None
    halves: Callable[[torch.dtype], tuple[Tensor, Tensor] | None] | None = None

    def choose(self, x_BI: Tensor, plan: ContractionPlan | None = None) -> tuple[str, Groups]:
        """Strategy and groups to meet x with."""
        shared = self.halves is not None and not torch.compiler.is_compiling()
        return choose_groups(self.spec, x_BI, self.cores, plan, shared=shared)

    def effective_cores(self) -> Sequence[Tensor]:
        """The cores whose product W is."""
        return self.cores if self.absorbed is None else self.absorbed()

    def merged(self, x: Tensor) -> Half:
        """The halves of W with its bias, as they meet x."""
        dtype = working_dtype(x)
        given = self.halves(dtype) if self.halves else None
        half = Half(*(given or merge_halves(self.spec, self.effective_cores(), dtype)))
        return half if self.bias is None or half.biased else half.with_bias(self.bias.to(dtype))


def tt_linear(
    x: Tensor,
    spec: TTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    plan: ContractionPlan | None = None,
) -> Tensor:
    """y = x W + bias, W the tensor train of `cores`.

    x: (..., in_features), any leading shape. cores: `order` tensors of `spec.core_shapes`, rank parameters absorbed.
    bias: (out_features,). plan: a forced choice; by default `plan_linear` for this batch.
    Returns (..., out_features) in x's dtype, which must be the cores', or in autocast's dtype: then only the products
    with the batch run in it. Half-precision cores are merged in float32.
    Raises SpecError when x or the cores do not fit `spec`, TypeError when dtypes differ.
    Source: [CoMERA] §4, METHOD §3.
    """
    (y,) = tt_linears(x, [Weight(spec, cores, bias)], plan=plan)
    return y


def tt_linears(x: Tensor, weights: Sequence[Weight], *, plan: ContractionPlan | None = None) -> tuple[Tensor, ...]:
    """y_k = x W_k + bias_k for tensor trains that share their input, such as the projections to queries, keys, values.

    In one product with x where all their plans are halves. In all else as `tt_linear` for each.
    """
    x_BI = x
    entered = []
    for weight in weights:
        x_BI, bias = enter(x_BI, weight.spec, weight.spec.shape, weight.cores, weight.bias)
        entered.append(weight._replace(bias=bias))
    choices = [weight.choose(x_BI, plan) for weight in weights]
    with without_autocast(x):
        if all(strategy == "halves" for strategy, _ in choices):
            ys_BO = two_sided(x_BI, *(weight.merged(x_BI) for weight in entered))
        else:
            ys_BO = tuple(_one(x_BI, weight, *choice) for weight, choice in zip(entered, choices, strict=True))
    return tuple(y.view(*x.shape[:-1], weight.spec.out_features) for y, weight in zip(ys_BO, weights, strict=True))


def _one(x_BI: Tensor, weight: Weight, strategy: str, groups: Groups) -> Tensor:
    if strategy == "halves":
        return two_sided(x_BI, weight.merged(x_BI))[0]
    return contract_groups(x_BI, weight.spec, weight.effective_cores(), groups, weight.bias)


def ttm_linear(
    x: Tensor,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    plan: ContractionPlan | None = None,
) -> Tensor:
    """logits = x Eᵀ + bias, E the tensor-train matrix of `cores`: an output head, tied to an embedding or not.

    x: (..., embedding_dim). cores: `order` tensors of `spec.core_shapes`. bias: (num_embeddings,).
    plan: a forced choice; by default `plan_projection` for this batch.
    Returns (..., num_embeddings); dtypes, errors and derivatives as in `tt_linear`.
    """
    x_BI, bias = enter(x, spec, spec.shape[::-1], cores, bias)
    strategy, split = choose_projection(spec, x_BI.shape[0], x_BI.element_size(), plan, device=x_BI.device.type)
    with without_autocast(x):
        if strategy == "dense":
            dtype = merge_dtype(cores[0].dtype)
            table_OI = materialize(spec, [core.to(dtype) for core in cores]).to(x_BI.dtype)
            logits_BO = F.linear(x_BI, table_OI, bias)
        else:
            left_MNR, right_RMN = ttm_halves(cores, split)
            used = -(-spec.num_embeddings // right_RMN.shape[1])  # rows of L that hold valid ids
            left_MNR, right_RMN = left_MNR[:used].to(x_BI.dtype), right_RMN.to(x_BI.dtype)
            x_BI = pad_last(x_BI, prod(spec.col_modes))
            logits_BO = _Projection.apply(x_BI, left_MNR, right_RMN, bias, spec.num_embeddings)
    return logits_BO.view(*x.shape[:-1], spec.num_embeddings)


def enter(
    x: Tensor, spec: TTSpec | TTMSpec, shape: tuple[int, int], cores: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Check the operands of a product with a weight of `shape` (in, out).

    Returns x flattened to (B, I) and the bias, both in the dtype of the products with the batch.
    """
    features, out_features = shape
    if x.ndim == 0 or x.shape[-1] != features:
        raise SpecError(f"expected an input whose last dimension is {features} for {spec}, got shape {tuple(x.shape)}")
    if bias is not None and bias.shape != (out_features,):
        raise SpecError(f"expected a bias of shape ({out_features},) for {spec}, got {tuple(bias.shape)}")
    check_cores(spec, cores)
    dtype = autocast_dtype(x)
    if dtype is None and x.dtype != cores[0].dtype:
        raise TypeError(
            f"expected an input in the dtype of the cores, {cores[0].dtype}, got {x.dtype}: "
            "cast one of them, or run under torch.autocast"
        )
    dtype = dtype or x.dtype
    x_BI = x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), features)
    return x_BI.to(dtype), None if bias is None else bias.to(dtype)


class _Projection(torch.autograd.Function):
    """logits = x Eᵀ + bias from the halves of E; kept: x, L, R. E and ∂E are never formed, nothing wide is permuted.

    T[b, (n_L, r), m_R] = Σ_{n_R} x[b, n_L, n_R] R[r, m_R, n_R]
    logits[b, (m_L, m_R)] = Σ_{n_L, r} L[m_L, n_L, r] T[b, (n_L, r), m_R]
    dT = Lᵀ dy,  ∂L = Σ_b dy Tᵀ,  ∂R = dTᵀ x,  dx = dT R.  T is wide: made piece by piece, and again in the backward.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        ctx.save_for_backward(x_BI, left_MNR, right_RMN)
        left_MK = left_MNR.flatten(1)
        y_BMM = x_BI.new_empty(x_BI.shape[0], left_MNR.shape[0], right_RMN.shape[1])
        for part in _parts(x_BI, left_MNR, right_RMN):
            t_BKM = _contract_right(x_BI[part], left_MNR, right_RMN)
            torch.bmm(left_MK.expand(t_BKM.shape[0], *left_MK.shape), t_BKM, out=y_BMM[part])
        y_BO = y_BMM.flatten(1)[:, :rows]
        return y_BO.contiguous() if bias is None else y_BO + bias

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, left_MNR, right_RMN = ctx.saved_tensors
        (m, n, r), (_, rows_r, cols_r) = left_MNR.shape, right_RMN.shape
        left_KM, right_KN = left_MNR.flatten(1).t(), right_RMN.flatten(0, 1)
        dtype = merge_dtype(x_BI.dtype)  # of sums over the pieces
        dleft_MK, dright_KN = left_MNR.new_zeros(m, n * r, dtype=dtype), torch.zeros_like(right_KN, dtype=dtype)
        dx_BI = torch.empty_like(x_BI)
        with without_autocast(dy_BO):
            dy_BMM = pad_last(dy_BO, m * rows_r).reshape(x_BI.shape[0], m, rows_r)
            for part in _parts(x_BI, left_MNR, right_RMN):
                x_PI, dy_PMM = x_BI[part], dy_BMM[part]
                size = x_PI.shape[0]
                t_PKM = _contract_right(x_PI, left_MNR, right_RMN)
                dleft_MK += torch.tensordot(dy_PMM, t_PKM, dims=([0, 2], [0, 2]))
                dt_PKM = torch.bmm(left_KM.expand(size, *left_KM.shape), dy_PMM)
                dt_QK = dt_PKM.view(size * n, r * rows_r)  # Q: samples of the piece and left columns
                dright_KN += dt_QK.t() @ x_PI.reshape(size * n, cols_r)
                dx_BI[part] = (dt_QK @ right_KN).view(size, n * cols_r)
            dbias_O = dy_BO.sum(0) if ctx.needs_input_grad[3] else None
        dleft_MNR, dright_RMN = dleft_MK.view(left_MNR.shape), dright_KN.view(right_RMN.shape)
        return dx_BI, dleft_MNR.to(x_BI.dtype), dright_RMN.to(x_BI.dtype), dbias_O, None


def _contract_right(x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor) -> Tensor:
    """T (B, N_L·r, M_R) of `_Projection`: x contracted with the right half."""
    (_, n, _), (r, rows_r, cols_r) = left_MNR.shape, right_RMN.shape
    t_QK = x_BI.reshape(x_BI.shape[0] * n, cols_r) @ right_RMN.flatten(0, 1).t()
    return t_QK.view(x_BI.shape[0], n * r, rows_r)


def _parts(x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor) -> list[slice]:
    """The pieces of the batch for T, which has N_L·r·M_R numbers a sample."""
    return pieces(x_BI.shape[0], left_MNR.shape[1] * right_RMN.shape[0] * right_RMN.shape[1], x_BI.device)
