"""How a compressed weight meets a batch: y = x W + bias for a tensor train, x Eᵀ + bias for a tensor-train matrix.

Shapes: B flattened batch, I/O in/out features (the modes' product where padded), R/S left/right rank, N mode(s);
M/N row and column modes of the left (L) or right (R) half of a TTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.ops.dtypes import autocast_dtype, without_autocast
from comera.ops.low_rank import Half, merge_halves, two_sided, working_dtype
from comera.ops.planner.groups import Groups
from comera.ops.planner.plan import ContractionPlan, choose_groups
from comera.ops.sequential import contract_groups
from comera.tt.spec import TTMSpec, TTSpec, check_cores


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
        return choose_groups(self.spec, x_BI, self.cores, plan, merged=shared)

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
        if all(strategy == "low_rank" for strategy, _ in choices):
            ys_BO = two_sided(x_BI, *(weight.merged(x_BI) for weight in entered))
        else:
            ys_BO = tuple(_one(x_BI, weight, *choice) for weight, choice in zip(entered, choices, strict=True))
    return tuple(y.view(*x.shape[:-1], weight.spec.out_features) for y, weight in zip(ys_BO, weights, strict=True))


def _one(x_BI: Tensor, weight: Weight, strategy: str, groups: Groups) -> Tensor:
    if strategy == "low_rank":
        return two_sided(x_BI, weight.merged(x_BI))[0]
    return contract_groups(x_BI, weight.spec, weight.effective_cores(), groups, weight.bias)


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
