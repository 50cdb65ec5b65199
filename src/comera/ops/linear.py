"""y = x W + bias, W a tensor train.

Three ways, planned by the size of the batch (docs/method.md §4):

    low rank     merge the cores to factors A, B once, then (x A) B: best for large batches
    sequential   x absorbs groups of merged cores one after the other: best for a few rows
    dense        merge all cores to W: best for small layers or high ranks

With an activation between the factors there is one way, low rank: act(x A) B.

Shapes: B flattened batch, I/O in/out features.
"""

from collections.abc import Sequence
from math import prod
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import SpecError
from comera.kernels import select
from comera.kernels.tracing import jit_traced, unrecorded_by_jit
from comera.ops.activated import activated_low_rank
from comera.ops.activations import ACTIVATIONS
from comera.ops.dtypes import kernel_dtype, product_dtype, without_autocast
from comera.ops.fp8 import Recipe, fp8_low_rank
from comera.ops.low_rank import LowRankFactors, low_rank
from comera.ops.merge import merge
from comera.ops.planner.plan import ContractionPlan, choose
from comera.ops.planner.problem import LinearProblem
from comera.ops.sequential import contract_groups
from comera.tt.dense import absorb
from comera.tt.spec import Spec, TTSpec, check_cores

Contraction: TypeAlias = Literal["planned", "low_rank"]
"""How a layer's cores meet its input: as planned for the number of rows, or from both ends to A and B, then (x A) B."""


def tt_linear(
    input: Tensor,
    spec: TTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gates: Sequence[Tensor] | None = None,
    threshold: float = 0.0,
    factors: LowRankFactors | None = None,
    plan: ContractionPlan | None = None,
    fp8: Recipe | None = None,
    contraction: Contraction = "planned",
) -> Tensor:
    """y = x W + bias, W the tensor train of `cores`; with an activation in `spec`, y = act(x A) B + bias.

    Args:
        input: x (..., in_features), any leading shape.
        cores: `order` tensors of `spec.core_shapes`.
        bias: (out_features,).
        gates: `order - 1` vectors of `spec.inner_ranks`; ones by default. A gate at or below `threshold` counts as 0.
        factors: A and B of this W, with or without the bias, where they have been merged already; then the product is
            low rank, whatever the plan would be.
        plan: a forced choice; by default `plan_linear` for this batch. With an activation the product is low rank.
        fp8: how the operands of the products with the batch are scaled to float8 (ops/fp8.py); then the product is low
            rank, too. Not with an activation.
        contraction: "low_rank" for (x A) B whatever the plan would be; its only intermediate result has r elements a
            row, and W is never made.

    Returns:
        (..., out_features) in x's dtype, which must be the cores', or in autocast's dtype: then only the products with
        the batch run in it. Half-precision cores are merged in float32.

    Raises:
        SpecError: when x, cores or bias do not fit `spec`.
        TypeError: when the dtypes of x and cores differ outside of autocast.

    Source: [CoMERA] §4, docs/method.md §4.
    """
    if by_torch_alone(input):
        return _by_torch(input, spec, cores, bias, gates, threshold, factors, fp8)
    x_BI, bias = flatten_input(input, spec, spec.shape, cores, bias)
    with without_autocast(input):
        if factors is None:
            gradients = x_BI.requires_grad, any(core.requires_grad for core in cores)
            size = x_BI.shape[0], x_BI.element_size(), x_BI.device.type
            strategy, groups = choose(LinearProblem, spec, *size, *gradients, plan=plan)
            if "low_rank" in (strategy, contraction) or spec.activation or fp8:
                gates = [cores[0].new_ones(rank) for rank in spec.inner_ranks] if gates is None else gates
                dtype = kernel_dtype(x_BI, "low_rank", spec.ranks[spec.split])
                (factors,) = merge([spec], [[*cores, *gates]], threshold, dtype, [bias])
        if factors is not None:
            missing = None if bias is None or factors.has_bias else bias.to(factors.b.dtype)
            factors = factors.with_bias(missing)
            if spec.activation:
                y_BO = activated_low_rank(x_BI, factors, spec.activation)
            elif fp8:
                y_BO = fp8_low_rank(x_BI, factors, fp8)
            else:
                (y_BO,) = low_rank(x_BI, factors)
        else:
            if gates is not None:
                cores = absorb(cores, [d.masked_fill(d <= threshold, 0.0) for d in gates])
            y_BO = contract_groups(x_BI, spec, cores, groups, bias)
    return y_BO.view(*input.shape[:-1], spec.out_features)


def by_torch_alone(input: Tensor) -> bool:
    """Whether a product must be that of the input as it is with dense factors, by torch's own functions: under
    torch.jit.trace, whose program is for inputs of any size, and for sparse and nested inputs."""
    return jit_traced() or select.is_irregular(input)


def _by_torch(
    input: Tensor,
    spec: TTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None,
    gates: Sequence[Tensor] | None,
    threshold: float,
    factors: LowRankFactors | None,
    fp8: Recipe | None,
) -> Tensor:
    if fp8:
        raise RuntimeError(
            "expected an FP8 layer to get a strided input outside of torch.jit.trace: take FP8 back with "
            "comera.fp8_(model, None)"
        )
    dtype = unrecorded_by_jit(check_operands, input, spec, spec.shape, cores, bias)
    if factors is None:
        gates = [cores[0].new_ones(rank) for rank in spec.inner_ranks] if gates is None else gates
        (factors,) = merge([spec], [[*cores, *gates]], threshold, dtype)
    b_RO = factors.b[unrecorded_by_jit(lambda: factors.has_bias) :]
    p = F.linear(input, factors.a)
    p = ACTIVATIONS[spec.activation][0](p) if spec.activation else p
    return F.linear(p, b_RO.t(), bias)


def flatten_input(
    input: Tensor, spec: Spec, shape: tuple[int, int], cores: Sequence[Tensor], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Check the operands of a product with a weight of `shape` (in, out).

    Returns x flattened to (B, I) and the bias, both in the dtype of the products with the batch.
    """
    dtype = unrecorded_by_jit(check_operands, input, spec, shape, cores, bias)
    x_BI = input if input.ndim == 2 else input.reshape(prod(input.shape[:-1]), shape[0])
    return x_BI.to(dtype), None if bias is None else bias.to(dtype)


def check_operands(
    input: Tensor, spec: Spec, shape: tuple[int, int], cores: Sequence[Tensor], bias: Tensor | None
) -> torch.dtype:
    """The dtype of the products with the batch. Raises as `flatten_input`."""
    features, out_features = shape
    if input.ndim == 0 or input.size(-1) != features:
        came = f"last dimension {input.size(-1)}" if input.is_nested else f"shape {tuple(input.shape)}"
        raise SpecError(f"expected an input whose last dimension is {features} for {spec}, got {came}")
    if bias is not None and bias.shape != (out_features,):
        raise SpecError(f"expected a bias of shape ({out_features},) for {spec}, got {tuple(bias.shape)}")
    check_cores(spec, cores)
    return product_dtype(input, cores[0])
