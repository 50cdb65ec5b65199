"""Tensor-train layers of tensorly-torch, the library a user would take for them otherwise.

Its one tensor-train form of a linear layer is "blocktt": a core for each pair of an input and an output mode,
(r_{k-1}, out_k, in_k, r_k), which is a tensor-train matrix. It gets the modes and the rank that ours have; ranks
do not adapt, and embeddings stay dense. Its products are one `torch.einsum` over all cores, whose order is a good one
only where opt_einsum is installed: without it a layer takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import nn

from comera.baselines.common import (
    Applied,
    adamw,
    check_installed,
    groups,
    linears,
    missing,
    numbers,
    require,
    row,
    swap_,
    whole,
)
from comera.convert import LINEAR, LayerRow
from comera.tt.shapes import balanced_modes
from comera.tt.spec import clip_ranks


@dataclass(frozen=True)
class Tensorly:
    """Tensor-train layers of tensorly-torch; core_lr is the rate of their cores."""

    order: int = 6
    """Modes of a layer, half of them on each side."""
    rank: int = 30
    """Rank of every bond, clipped where the modes allow less."""
    implementation: Literal["factorized", "reconstructed"] = "factorized"
    """How a layer meets its input: core by core, which is the library's default, or as a dense weight that is made
    anew for each use."""

    def __post_init__(self) -> None:
        even = whole(self.order, 2) and self.order % 2 == 0
        require(even, "tensorly.order", "an even number >= 2", self.order)
        require(whole(self.rank, 1), "tensorly.rank", "an integer >= 1", self.rank)
        ways = ("factorized", "reconstructed")
        require(
            self.implementation in ways, "tensorly.implementation", f"one of {', '.join(ways)}", self.implementation
        )

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        """Convert a dense model in place, without the layers that match `skip`. Errors: see `tensorly_`."""
        dense_total = numbers(model.parameters())
        rows = tensorly_(model, self.rank, order=self.order, implementation=self.implementation, skip=skip)
        kind = library().FactorizedLinear
        own = [p for layer in model.modules() if isinstance(layer, kind) for p in layer.weight.parameters()]
        return Applied(rows, dense_total, lambda config: adamw(groups(model, own, "cores", config), config))


def tensorly_(
    model: nn.Module,
    rank: int = 30,
    *,
    order: int = 6,
    implementation: Literal["factorized", "reconstructed"] = "factorized",
    skip: Sequence[str] = (),
) -> tuple[LayerRow, ...]:
    """Replace linear layers in place by `tltorch.FactorizedLinear`; returns what became of each.

    Biases are kept, the random cores give the weight the standard deviation that it had. Modes are balanced, with an
    exact product. skip: glob patterns of names to leave dense.
    Raises ConversionError when there is nothing to replace, ConfigError where the library is not installed.
    """
    library()
    layers = linears(model, skip)
    new = {name: _layer(layer, rank, order // 2, implementation) for name, layer in layers.items()}
    swap_(model, {layers[name]: layer for name, layer in new.items()})
    return tuple(
        row(name, layer, numbers(layer.weight.parameters()), layers[name].weight.numel(), _note(layer))
        for name, layer in new.items()
    )


def library() -> Any:
    """The package tltorch. Raises ConfigError where it cannot be imported."""
    check_installed("tensorly")
    try:
        import tltorch
    except ModuleNotFoundError as error:
        raise missing("tensorly", f"lacks {error.name}") from error
    except ImportError as error:
        raise missing("tensorly", f"cannot be imported ({error})") from error
    return tltorch


def _layer(layer: nn.Linear, rank: int, pairs: int, implementation: str) -> Any:
    in_modes = balanced_modes(layer.in_features, pairs, max_padding=0)  # big ones outside, as in `tt_spec`
    out_modes = balanced_modes(layer.out_features, pairs, max_padding=0)[::-1]
    sizes = tuple(i * o for i, o in zip(in_modes, out_modes, strict=True))
    ranks = clip_ranks(rank, sizes)
    new = library().FactorizedLinear(
        in_modes,
        out_modes,
        bias=False,
        factorization="blocktt",
        rank=list(ranks),
        implementation=implementation,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    # The library's own random numbers give a weight whose deviation is off by orders of magnitude: it takes the order
    # of the matrix, two, for the number of cores. Var W = Π r_k · std^(2 · cores) sets it right.
    with torch.no_grad():
        target = (0.0 if layer.weight.is_meta else float(layer.weight.std(correction=0))) or LINEAR.std(layer)
        std = (target**2 / prod(ranks)) ** (1 / (2 * len(sizes)))
        for core in new.weight.factors:
            core.normal_(0, std)
    new.register_parameter("bias", layer.bias)
    return new


def _note(layer: Any) -> str:
    modes = " / ".join(
        "·".join(map(str, side)) for side in (layer.in_tensorized_features, layer.out_tensorized_features)
    )
    return f"{modes} ranks {'-'.join(map(str, layer.weight.rank[1:-1]))}"
