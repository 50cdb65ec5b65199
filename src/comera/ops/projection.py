"""logits = x Eᵀ + bias, E a tensor-train matrix: an output head, tied to an embedding or not.

Shapes: B flattened batch, I/O in/out features (the modes' product where padded), M/N row and column modes of the left
(L) or right (R) part of the cores, R the rank between them.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels.tracing import transformed, unrecorded_by_jit
from comera.ops.chunking import chunks, pad_last
from comera.ops.dtypes import merge_dtype, product_dtype, without_autocast
from comera.ops.linear import by_torch_alone, check_operands, flatten_input
from comera.ops.low_rank import LowRankFactors, low_rank
from comera.ops.planner.plan import ContractionPlan, choose
from comera.ops.planner.problem import ProjectionProblem
from comera.tt.dense import absorb, absorb_in_smaller, materialize, zero_row
from comera.tt.spec import TTMSpec


class WholeTable(NamedTuple):
    """E (O, I) itself, and the bias (O,)."""

    table: Tensor
    bias: Tensor | None = None


class LowRankTable(NamedTuple):
    """The table's factors, left (O, R) and right (R, I), and the bias (O,)."""

    left: Tensor
    right: Tensor
    bias: Tensor | None = None

    @property
    def factors(self) -> LowRankFactors:
        """The factors of a linear layer, which `low_rank` takes: the transposed table, with the bias."""
        if self.bias is None:
            return LowRankFactors(self.right, self.left.t().contiguous())
        return LowRankFactors(self.right, self.left.t()).with_bias(self.bias)  # a copy by itself


class TwoSides(NamedTuple):
    """The cores left and right of a rank, L (M, N, r) and R (r, M, N), and the bias (O,)."""

    left: Tensor
    right: Tensor
    bias: Tensor | None = None


MergedTable: TypeAlias = WholeTable | LowRankTable | TwoSides
"""What rows are multiplied by. Where L has one column mode and R one row mode, they are the factors of a low rank."""


def ttm_linear(
    x: Tensor,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gates: Sequence[Tensor] | None = None,
    padding_idx: int | None = None,
    plan: ContractionPlan | None = None,
    table: MergedTable | None = None,
) -> Tensor:
    """logits = x Eᵀ + bias, E the tensor-train matrix of `cores`: an output head, tied to an embedding or not.

    Args:
        x: (..., embedding_dim).
        cores: `order` tensors of `spec.core_shapes`.
        bias: (num_embeddings,).
        gates: `order - 1` vectors of `spec.inner_ranks`, pruned gates masked. Default: the cores have absorbed them.
        padding_idx: this row of E counts as zero and gets no gradient: its logit is the bias alone.
        plan: a forced choice; by default `plan_projection` for this batch.
        table: the cores and the bias merged by `merge_table`, where that serves several calls.

    Returns:
        (..., num_embeddings); dtypes, errors and derivatives as for `tt_linear`.
    """
    if by_torch_alone(x):
        dtype = unrecorded_by_jit(check_operands, x, spec, spec.shape[::-1], cores, bias)
        with without_autocast(x):
            cores = cores if gates is None else absorb(cores, gates)
            return F.linear(x.to(dtype), *_whole(spec, cores, bias, padding_idx, dtype))
    x_BI, bias = flatten_input(x, spec, spec.shape[::-1], cores, bias)
    if table is None:
        table = merge_table(x_BI, spec, cores, bias, gates=gates, padding_idx=padding_idx, plan=plan)
    with without_autocast(x):
        if isinstance(table, WholeTable):
            logits_BO = F.linear(x_BI, *table)
        elif isinstance(table, LowRankTable):
            (logits_BO,) = low_rank(x_BI, table.factors)
        else:
            x_BI = pad_last(x_BI, prod(spec.col_modes))
            logits_BO = _Projection.apply(x_BI, *table, spec.num_embeddings, padding_idx)
    return logits_BO.view(*x.shape[:-1], spec.num_embeddings)


def merge_table(
    x_BI: Tensor,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gates: Sequence[Tensor] | None = None,
    padding_idx: int | None = None,
    plan: ContractionPlan | None = None,
) -> MergedTable:
    """The operands of `ttm_linear` as the product with these rows reads them, in its dtype; arguments as there."""
    to_dtype = product_dtype(x_BI, cores[0])
    cores = cores if gates is None else absorb_in_smaller(cores, gates)
    bias = None if bias is None else bias.to(to_dtype)
    strategy, groups = choose(ProjectionProblem, spec, x_BI.shape[0], to_dtype.itemsize, x_BI.device.type, plan=plan)
    with without_autocast(x_BI):
        if strategy == "dense" or transformed():
            return _whole(spec, cores, bias, padding_idx, to_dtype)
        left_MNR, right_RMN = (side.to(to_dtype) for side in merge_sides(cores, groups[0].end))
        if left_MNR.shape[1] == right_RMN.shape[1] == 1:
            # views where nothing is padding: a slice copies its gradient into one of the whole table
            left_OR, right_RI = left_MNR.squeeze(1), right_RMN.squeeze(1)
            if spec.padded_shape != spec.shape:
                left_OR, right_RI = left_OR[: spec.num_embeddings], right_RI[:, : spec.embedding_dim]
            left_OR = left_OR if padding_idx is None else zero_row(left_OR, padding_idx)
            return LowRankTable(left_OR, right_RI, bias)
    used = -(-spec.num_embeddings // right_RMN.shape[1])  # rows of L that hold valid ids
    return TwoSides(left_MNR[:used], right_RMN, bias)


def _whole(
    spec: TTMSpec, cores: Sequence[Tensor], bias: Tensor | None, padding_idx: int | None, dtype: torch.dtype
) -> WholeTable:
    """The table of cores that have absorbed the gates, in `dtype`."""
    table_OI = materialize(spec, [core.to(merge_dtype(core.dtype)) for core in cores]).to(dtype)
    bias = None if bias is None else bias.to(dtype)
    return WholeTable(table_OI if padding_idx is None else zero_row(table_OI, padding_idx), bias)


class _Projection(torch.autograd.Function):
    """logits = x Eᵀ + bias from L and R; saved: x, L, R. E and ∂E are never formed, nothing large is permuted.

    T[b, (n_L, r), m_R] = Σ_{n_R} x[b, n_L, n_R] R[r, m_R, n_R]
    logits[b, (m_L, m_R)] = Σ_{n_L, r} L[m_L, n_L, r] T[b, (n_L, r), m_R]
    dT = Lᵀ dy,  ∂L = Σ_b dy Tᵀ,  ∂R = dTᵀ x,  dx = dT R.  T is large: made chunk by chunk, and again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor, bias: Tensor | None, rows: int, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(x_BI, left_MNR, right_RMN)
        ctx.padding = padding
        left_MK = left_MNR.flatten(1)
        y_BMM = x_BI.new_empty(x_BI.shape[0], left_MNR.shape[0], right_RMN.shape[1])
        for part in _chunks(x_BI, left_MNR, right_RMN):
            t_BKM = _contract_right(x_BI[part], left_MNR, right_RMN)
            torch.bmm(left_MK.expand(t_BKM.shape[0], *left_MK.shape), t_BKM, out=y_BMM[part])
        y_BO = y_BMM.flatten(1)[:, :rows]
        if padding is not None:  # here, since the logits are the widest tensor of a model
            y_BO[:, padding] = 0
        return y_BO.contiguous() if bias is None else y_BO + bias

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, left_MNR, right_RMN = ctx.saved_tensors
        (m, n, r), (_, rows_r, cols_r) = left_MNR.shape, right_RMN.shape
        left_KM, right_KN = left_MNR.flatten(1).t(), right_RMN.flatten(0, 1)
        dtype = merge_dtype(x_BI.dtype)  # of sums over the chunks
        dleft_MK, dright_KN = left_MNR.new_zeros(m, n * r, dtype=dtype), torch.zeros_like(right_KN, dtype=dtype)
        dx_BI = torch.empty_like(x_BI)
        with without_autocast(dy_BO):
            dbias_O = dy_BO.sum(0) if ctx.needs_input_grad[3] else None
            if ctx.padding is not None:
                dy_BO = dy_BO.index_fill(1, torch.tensor([ctx.padding], device=dy_BO.device), 0)
            dy_BMM = pad_last(dy_BO, m * rows_r).reshape(x_BI.shape[0], m, rows_r)
            for part in _chunks(x_BI, left_MNR, right_RMN):
                x_CI, dy_CMM = x_BI[part], dy_BMM[part]
                size = x_CI.shape[0]
                t_CKM = _contract_right(x_CI, left_MNR, right_RMN)
                dleft_MK += torch.tensordot(dy_CMM, t_CKM, dims=([0, 2], [0, 2]))
                dt_CKM = torch.bmm(left_KM.expand(size, *left_KM.shape), dy_CMM)
                dt_QK = dt_CKM.view(size * n, r * rows_r)  # Q: samples of the chunk and left columns
                dright_KN += dt_QK.t() @ x_CI.reshape(size * n, cols_r)
                dx_BI[part] = (dt_QK @ right_KN).view(size, n * cols_r)
        dleft_MNR, dright_RMN = dleft_MK.view(left_MNR.shape), dright_KN.view(right_RMN.shape)
        return dx_BI, dleft_MNR.to(x_BI.dtype), dright_RMN.to(x_BI.dtype), dbias_O, None, None


def _contract_right(x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor) -> Tensor:
    """T (B, N_L·r, M_R) of `_Projection`: x contracted with R."""
    (_, n, _), (r, rows_r, cols_r) = left_MNR.shape, right_RMN.shape
    t_QK = x_BI.reshape(x_BI.shape[0] * n, cols_r) @ right_RMN.flatten(0, 1).t()
    return t_QK.view(x_BI.shape[0], n * r, rows_r)


def _chunks(x_BI: Tensor, left_MNR: Tensor, right_RMN: Tensor) -> list[slice]:
    """Chunks of the batch for T, which has N_L·r·M_R elements a sample."""
    return chunks(x_BI.shape[0], left_MNR.shape[1] * right_RMN.shape[0] * right_RMN.shape[1], x_BI.device)


def merge_sides(cores: Sequence[Tensor], split: int) -> tuple[Tensor, Tensor]:
    """Merge the cores (R, M, N, S) of a TTM left and right of inner rank `split`, row modes before column modes.

    Returns L (M_left, N_left, r) and R (r, M_right, N_right) in the cores' `merge_dtype`; differentiable.
    """
    dtype = merge_dtype(cores[0].dtype)
    left_MNS, right_RMN = cores[0].to(dtype).flatten(0, 1), cores[-1].to(dtype).flatten(2)
    for core in cores[1:split]:
        (m, n, _), (_, rows, cols, s) = left_MNS.shape, core.shape
        product = left_MNS.flatten(0, 1) @ core.to(dtype).flatten(1)
        left_MNS = product.view(m, n, rows, cols, s).transpose(1, 2).reshape(m * rows, n * cols, s)
    for core in cores[-2 : split - 1 : -1]:
        (r, rows, cols, _), (_, m, n) = core.shape, right_RMN.shape
        product = core.to(dtype).flatten(0, 2) @ right_RMN.flatten(1)
        right_RMN = product.view(r, rows, cols, m, n).transpose(2, 3).reshape(r, rows * m, cols * n)
    return left_MNS, right_RMN
