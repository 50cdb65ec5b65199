"""CoLA: linear layers with an activation in a bottleneck (arXiv:2502.10940).

    W x  →  B · silu(A x),   A (r, in), B (out, r)

This is an architecture of its own: it keeps nothing of a dense weight, and cannot be turned into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines.common import Applied, Baseline, adamw, convert_linear_, elements
from comera.convert import LayerRow
from comera.errors import check_fields, is_integer


@dataclass(frozen=True)
class CoLA(Baseline):
    """CoLA: each linear layer becomes B · silu(A x); core_lr is the learning rate of A and B.

    Example:
        >>> import torch
        >>> from comera.baselines import CoLA
        >>> from comera.trainer import TrainConfig
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> applied = CoLA().apply_(model, skip=["1"])
        >>> [(row.name, row.dense, row.stored, row.note) for row in applied.rows]
        [('0', 4096, 2048, 'bottleneck 16')]
        >>> optimizer = applied.optimizer(TrainConfig(steps=10, lr=1e-3, core_lr=5e-3))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('factors', 0.005), ('dense', 0.001), ('dense_no_decay', 0.001)]
    """

    rate = 5.0

    rank: int | None = None
    """Width of the bottleneck; default: a quarter of the layer's smaller dimension, as published."""

    def __post_init__(self) -> None:
        valid = self.rank is None or is_integer(self.rank)
        check_fields(self, "cola.", {"rank": (valid, "an integer >= 1 or nothing")})

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        dense_total = elements(model.parameters())
        rows = cola_(model, rank=self.rank, skip=skip)
        factors = [p for layer in model.modules() if isinstance(layer, CoLALinear) for p in (layer.down, layer.up)]
        return Applied(rows, dense_total, adamw(model, factors, "factors"))


def cola_(model: nn.Module, rank: int | None = None, skip: Sequence[str] = ()) -> tuple[LayerRow, ...]:
    """Replace linear layers in place; returns what became of each. rank: width of the bottleneck, clipped to the
    layer's smaller dimension; None takes a quarter of that. skip: glob patterns of names to leave dense. Raises
    ConversionError if there is nothing to replace.

    Example:
        >>> import torch
        >>> from comera.baselines import cola_
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> [row.note for row in cola_(model)]
        ['bottleneck 16', 'bottleneck 16']
        >>> model(torch.randn(3, 64)).shape
        torch.Size([3, 64])
    """
    return convert_linear_(
        model, skip, lambda layer: CoLALinear.like(layer, rank), lambda layer: f"bottleneck {layer.rank}"
    )


class CoLALinear(nn.Module):
    """y = B · silu(A x) + bias. Input (..., in_features) -> output (..., out_features). down: A (r, in_features), up: B
    (out_features, r); drawn so that the entries of B A have variance 1 / (in + out), as in the published code. bias: an
    existing one, or None."""

    bias: nn.Parameter | None

    def __init__(self, down: Tensor, up: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)
        self.register_parameter("bias", bias)

    @classmethod
    def like(cls, layer: nn.Linear, rank: int | None) -> CoLALinear:
        """A new layer with the sizes, dtype, device and bias of a dense one."""
        rows, cols = layer.weight.shape
        smaller = min(rows, cols)
        rank = max(1, smaller // 4) if rank is None else min(rank, smaller)
        std = (rank * (rows + cols)) ** -0.25  # Var (B A) = r std⁴
        down, up = layer.weight.new_empty(rank, cols), layer.weight.new_empty(rows, rank)
        with torch.no_grad():
            return cls(down.normal_(0, std), up.normal_(0, std), layer.bias)

    @property
    def rank(self) -> int:
        """Width of the bottleneck."""
        return self.down.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(input, self.down)), self.up, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.down.shape[1]}, out_features={self.up.shape[0]}, rank={self.rank}"
