"""How a compressed weight meets a batch: y = x W + bias for a tensor train, x Eᵀ + bias for a tensor-train matrix.

Shapes: B flattened batch, I/O in/out features (the modes' product where padded), R/S left/right rank, N mode(s);
M/N row and column modes of the left (L) or right (R) half of a TTM.

Layout. A rank of 30 is an awkward row length: on CPU (MKL, float32) x_BI @ A_IR runs at 33 GFLOP/s a core for rank 30,
at 55 for rank 32, and accelerators want leading dimensions in multiples of 8. So the rank is never the inner dimension
of what meets the batch: A_RI, P_RB = A xᵀ and U_RB = B dyᵀ run at 55 for rank 30, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.contract.halves import (
    autocast_dtype,
    check_cores,
    left_gradients,
    left_products,
    merge_dtype,
    pad_last,
    pieces,
    right_gradients,
    right_products,
    ttm_halves,
    without_autocast,
)
from comera.contract.plan import ContractionPlan, choose
from comera.errors import SpecError
from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec, TTSpec


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
    x_BI, bias = _enter(x, spec, spec.shape, cores, bias)
    strategy, _ = choose("linear", spec, x_BI.shape[0], x_BI.element_size(), plan)
    with without_autocast(x):
        if strategy == "halves":
            y_BO: Tensor = _Halves.apply(x_BI, bias, spec, *cores)
        elif strategy == "chain":
            y_BO = _chain(x_BI, spec, cores, bias)
        else:
            y_BO = _dense(x_BI, spec, cores, bias)
    return y_BO.view(*x.shape[:-1], spec.out_features)


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
    x_BI, bias = _enter(x, spec, spec.shape[::-1], cores, bias)
    strategy, split = choose("projection", spec, x_BI.shape[0], x_BI.element_size(), plan)
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


def _enter(
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


class _Halves(torch.autograd.Function):
    """y = (x A) B + bias with A, B the merged input and output cores; kept: x, P, A, B and the partial merges.

    P = A xᵀ,  y = Pᵀ B + bias;   U = B dyᵀ,  dx = Uᵀ A,  ∂A = U x,  ∂B = P dy,  ∂bias = Σ_B dy,
    then ∂A and ∂B go back into the cores (halves.py). W and ∂W are never formed. Written by hand because forward and
    backward, merges included, take 20 % less time than two F.linear under autograd (one core, rank 30, 1024 rows:
    768→768 7.1 ms instead of 8.9, 768→3072 17.5 instead of 21.7; the dense layer takes 46 and 189).
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, bias: Tensor | None, spec: TTSpec, *cores: Tensor) -> Tensor:
        a_RI, b_RO, p_RB, left, right = _merge_and_project(x_BI, spec, cores)
        ctx.spec = spec
        ctx.save_for_backward(x_BI, a_RI, b_RO, p_RB, *cores, *left, *right)
        return p_RB.t() @ b_RO if bias is None else torch.addmm(bias, p_RB.t(), b_RO)

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        spec: TTSpec = ctx.spec
        order, split = spec.order, spec.split
        x_BI, a_RI, b_RO, p_RB, *kept = ctx.saved_tensors
        cores, left, right = kept[:order], kept[order : order + split - 1], kept[order + split - 1 :]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: what was kept is no constant
            a_RI, b_RO, p_RB, left, right = _merge_and_project(x_BI, spec, cores)
        wants_x, wants_bias, _, *wants_core = ctx.needs_input_grad
        dx_BI = dbias_O = None
        grads: list[Tensor | None] = [None] * order
        with without_autocast(dy_BO):
            merging = [core.to(merge_dtype(core.dtype)) for core in cores]
            if wants_x or any(wants_core[:split]):
                u_RB = b_RO @ dy_BO.t()
                if wants_x:
                    dx_BI = u_RB.t() @ a_RI
                if any(wants_core[:split]):
                    da_RI = pad_last((u_RB @ x_BI).to(merging[0].dtype), prod(spec.in_modes))
                    grads[:split] = left_gradients(merging[:split], left, da_RI.t())
            if any(wants_core[split:]):
                db_RO = pad_last((p_RB @ dy_BO).to(merging[0].dtype), prod(spec.out_modes))
                grads[split:] = right_gradients(merging[split:], right, db_RO)
            if wants_bias:
                dbias_O = dy_BO.sum(0)
        cast = (None if g is None else g.to(core.dtype) for g, core in zip(grads, cores, strict=True))
        return dx_BI, dbias_O, None, *cast


def _merge_and_project(
    x_BI: Tensor, spec: TTSpec, cores: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """A, B and P of `_Halves` in x's dtype, and the partial merges on both sides."""
    merging = [core.to(merge_dtype(core.dtype)) for core in cores]
    left, right = left_products(merging[: spec.split]), right_products(merging[spec.split :])
    a_RI = left[-1][: spec.in_features].t().to(x_BI.dtype).contiguous()
    b_RO = right[-1][:, : spec.out_features].to(x_BI.dtype)
    return a_RI, b_RO, a_RI @ x_BI.t(), left[:-1], right[:-1]


def _chain(x_BI: Tensor, spec: TTSpec, cores: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Core by core: input cores from the left of each sample, output cores onto the flattened batch. No permutes."""
    batch, left, done = x_BI.shape[0], prod(spec.in_modes), 1
    t = pad_last(x_BI, left)
    for k, core in enumerate(cores):
        (r, mode, s), core = core.shape, core.to(x_BI.dtype)
        if k < spec.split:  # (s × r·mode) @ (r·mode × modes still to come), for each sample
            left //= mode
            t = torch.bmm(core.flatten(0, 1).t().expand(batch, s, r * mode), t.reshape(batch, r * mode, left))
        else:  # (batch · modes already there × r) @ (r × mode·s)
            t = t.view(batch * done, r) @ core.flatten(1)
            done *= mode
    y_BO = t.view(batch, done)[:, : spec.out_features]
    return y_BO.contiguous() if bias is None else y_BO + bias


def _dense(x_BI: Tensor, spec: TTSpec, cores: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """The materialised weight, then one product."""
    merging = [core.to(merge_dtype(core.dtype)) for core in cores]
    a_IR = left_products(merging[: spec.split])[-1][: spec.in_features]
    b_RO = right_products(merging[spec.split :])[-1][:, : spec.out_features]
    w_IO = (a_IR @ b_RO).to(x_BI.dtype)
    return x_BI @ w_IO if bias is None else torch.addmm(bias, x_BI, w_IO)


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
