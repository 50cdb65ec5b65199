"""CoLA: linear layers with an activation in a narrow middle (arXiv:2502.10940).

    W x  →  B · silu(A x),   A (r, in), B (out, r)

It is an architecture of its own: nothing of a dense weight is kept, and none can be made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines.common import Applied, adamw, groups, linears, numbers, require, row, swap_, whole
from comera.convert import LayerRow


@dataclass(frozen=True)
class CoLA:
    """CoLA: each linear layer becomes B · silu(A x); core_lr is the rate of A and B."""

    rank: int | None = None
    """Width of the bottleneck; left out: a quarter of the layer's narrower side, as published."""

    def __post_init__(self) -> None:
        require(self.rank is None or whole(self.rank, 1), "cola.rank", "an integer >= 1 or nothing", self.rank)

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        """Convert a dense model in place, without the layers that match `skip`. Errors: see `linears`."""
        dense_total = numbers(model.parameters())
        rows = cola_(model, rank=self.rank, skip=skip)
        own = [p for layer in model.modules() if isinstance(layer, CoLALinear) for p in (layer.down, layer.up)]
        return Applied(rows, dense_total, lambda config: adamw(groups(model, own, "factors", config), config))


def cola_(model: nn.Module, rank: int | None = None, skip: Sequence[str] = ()) -> tuple[LayerRow, ...]:
    """Replace linear layers in place; returns what became of each.

    rank: width of the bottleneck, clipped to the layer's narrower side; None takes a quarter of that.
    skip: glob patterns of names to leave dense. Raises ConversionError when there is nothing to replace.
    """
    layers = linears(model, skip)
    new = {name: CoLALinear.like(layer, rank) for name, layer in layers.items()}
    swap_(model, {layers[name]: layer for name, layer in new.items()})
    return tuple(
        row(name, layer, layer.down.numel() + layer.up.numel(), layers[name].weight.numel(), f"bottleneck {layer.rank}")
        for name, layer in new.items()
    )


class CoLALinear(nn.Module):
    """y = B · silu(A x) + bias.

    Input (..., in_features) -> output (..., out_features). down: A (r, in_features), up: B (out_features, r); random,
    so that the entries of B A have variance 1 / (in + out), as in the published code. bias: one to keep, or None.
    """

    bias: nn.Parameter | None

    def __init__(self, down: Tensor, up: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.register_parameter("bias", bias)

    @classmethod
    def like(cls, layer: nn.Linear, rank: int | None) -> CoLALinear:
        """A new one in the place of a dense layer: its sizes, dtype, device and bias."""
        rows, cols = layer.weight.shape
        narrow = min(rows, cols)
        rank = max(1, narrow // 4) if rank is None else min(rank, narrow)
        std = (rank * (rows + cols)) ** -0.25  # Var (B A) = r std⁴
        down, up = layer.weight.new_empty(rank, cols), layer.weight.new_empty(rows, rank)
        with torch.no_grad():
            return cls(down.normal_(0, std), up.normal_(0, std), layer.bias)

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.down.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.down)), self.up, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.down.shape[1]}, out_features={self.up.shape[0]}, rank={self.rank}"
