"""What the tests of operations share: operands of order one, the dense oracle, values with all gradients, noise."""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from comera.tt.blocks import fold_blocks
from comera.tt.dense import fold, materialize
from comera.tt.spec import BTTSpec, Spec, TTMSpec


def operands(
    spec: Spec, lead: Sequence[int], *, bias: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor | None]:
    """[x, bias or None, cores...] of a product with the weight (of a TTM with its transpose), all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    features, outputs = spec.shape[::-1] if isinstance(spec, TTMSpec) else spec.shape
    shapes = [(*lead, features), (outputs,), *spec.core_shapes]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    if not isinstance(spec, BTTSpec):  # whose cores have all blocks
        tensors[2:] = [core / math.sqrt(max(1, core.shape[0])) for core in tensors[2:]]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    return [leaves[0], leaves[1] if bias else None, *leaves[2:]]


def oracle(spec: Spec, x: Tensor, bias: Tensor | None, *cores: Tensor) -> Tensor:
    """The product with the dense weight."""
    weight = materialize(spec, cores)
    y = x @ (weight.t() if isinstance(spec, TTMSpec) else weight)
    return y if bias is None else y + bias


def padded_weight(spec: Spec, cores: Sequence[Tensor]) -> Tensor:
    """The dense weight with its padding, from cores that have absorbed the gates."""
    return materialize(replace(spec, **_padded_features(spec)), cores)


def unfoldings(spec: Spec, weight: Tensor) -> list[Tensor]:
    """The matrix at each inner rank of a weight, whose best low-rank errors bound that of any cores. A BTT has one:
    its blocks along a diagonal."""
    full = replace(spec, **_padded_features(spec)) if tuple(weight.shape) == spec.padded_shape else spec
    if isinstance(full, BTTSpec):
        return [torch.block_diag(*fold_blocks(full, weight))]
    tensor = fold(full, weight)
    return [tensor.flatten(0, k).flatten(1) for k in range(spec.order - 1)]


def _padded_features(spec: Spec) -> dict[str, Any]:
    return dict(zip([field.name for field in fields(spec)][:2], spec.padded_shape, strict=True))


def values_and_gradients(
    function: Callable[..., Tensor],
    tensors: Sequence[Tensor | None],
    dy: Tensor | None = None,
    rounded: torch.dtype = torch.float64,
) -> list[Tensor]:
    """The value of a function, and the gradients of all its tensors from a fixed gradient, rounded to a dtype first."""
    y = function(*tensors)
    if dy is None:
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(rounded)
    return [y, *torch.autograd.grad(y, [t for t in tensors if t is not None], dy.to(y.dtype))]


def second_derivatives(function: Callable[..., Tensor], tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """The derivatives of all gradients together, in a fixed direction: exact to compare with the oracle's, where
    gradgradcheck has differences, and in a twentieth of its time."""
    leaves = [t for t in tensors if t is not None]
    generator = torch.Generator().manual_seed(9)
    y = function(*tensors)
    dy = torch.randn(y.shape, generator=generator, dtype=y.dtype).requires_grad_()
    gradients = torch.autograd.grad(y, leaves, dy, create_graph=True)
    along = sum((g * torch.randn(g.shape, generator=generator, dtype=g.dtype)).sum() for g in gradients)
    return list(torch.autograd.grad(along, [dy, *leaves], materialize_grads=True))


def signal_to_noise(found: Tensor, exact: Tensor) -> float:
    """In decibels."""
    exact, found = exact.detach().double(), found.detach().double()
    noise = (found - exact).square().sum().clamp(min=1e-300)
    return 10 * math.log10(exact.square().sum() / noise)
