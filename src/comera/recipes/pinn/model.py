"""The network of a physics-informed solution: f(x, t), an MLP whose linear layers can be tensor trains.

    h_0 = (x, t),   h_l = φ(W_l h_{l−1} + b_l),   f = w · h + b,   u = (1 − t) f + ‖x‖₁ (see `equation`)

**Exact derivatives** go forward with the value, through the same layers, as rows of the batch: with z = W h + b::

    ∂_i h_l = φ'(z) W ∂_i h_{l−1}            Δh_l = φ'(z) W Δh_{l−1} + φ''(z) Σ_i (W ∂_i h_{l−1})²

A row more for each input and one for the Laplacian, and a single backward gives the gradients of the residual.
Rejected: back-propagating twice for each of n second derivatives, and a third time for the parameters; kernels of
compressed layers have one backward. Li et al. 2023 (arXiv:2307.08214) call it the forward Laplacian.

B points, I inputs, H hidden width, R = I + 2 rows: value, a tangent for each input, Laplacian."""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from comera.convert import TT, TensorizeConfig
from comera.errors import check_fields
from comera.recipes.pinn.equation import HJB, Derivatives

Activation = Literal["sin", "tanh"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the network."""

    hidden: int = 256
    """Width of the hidden layers."""
    layers: int = 3
    """Hidden layers, the one that reads the point among them."""
    activation: Activation = "sin"
    """Between them: sin or tanh."""

    def __post_init__(self) -> None:
        checks = {
            "hidden": (self.hidden >= 1, "at least 1"),
            "layers": (self.layers >= 1, "at least 1"),
            "activation": (self.activation in ("sin", "tanh"), "one of sin, tanh"),
        }
        check_fields(self, "model.", checks)

    def narrowed(self, hidden: int) -> "ModelConfig":
        """The same depth, `hidden` wide."""
        return replace(self, hidden=hidden)


@dataclass(frozen=True)
class CompressConfig:
    """Formats of the compressed layers; only the method comera uses them."""

    order: int = 4
    """Cores of each hidden layer."""
    rank: int = 4
    """Initial TT-rank."""

    def __post_init__(self) -> None:
        checks = {"order": (2 <= self.order <= 8, "from 2 to 8"), "rank": (self.rank >= 1, "at least 1")}
        check_fields(self, "compress.", checks)

    def tensorize(self) -> TensorizeConfig:
        """The conversion: all layers but the last, which is a vector."""
        return TensorizeConfig(linear=TT(order=self.order, rank=self.rank), overrides={"head": None}, min_ratio=1.0)


class PINN(nn.Module):
    """points (B, I) -> u (B,)."""

    def __init__(self, config: ModelConfig, equation: HJB) -> None:
        super().__init__()
        self.equation, self.activation = equation, config.activation
        widths = [equation.inputs] + config.layers * [config.hidden]
        # biases are apart, because tangents go through the layers without them
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(widths))
        self.biases = nn.ParameterList(
            nn.init.uniform_(torch.empty(o), -1 / sqrt(i), 1 / sqrt(i)) for i, o in pairwise(widths)
        )
        self.head = nn.Linear(config.hidden, 1)

    def forward(self, points: Tensor) -> Tensor:
        """The solution u at points (B, I)."""
        return self.equation.solution(points, self.network(points))

    def network(self, points_BI: Tensor) -> Tensor:
        """f, (B,)."""
        h_BH = points_BI
        for layer, bias_H in zip(self.layers, self.biases, strict=True):
            z_BH = layer(h_BH) + bias_H
            h_BH = z_BH.sin() if self.activation == "sin" else z_BH.tanh()
        f_B: Tensor = self.head(h_BH).squeeze(1)
        return f_B

    def derivatives(self, points_BI: Tensor) -> Derivatives:
        """f with its exact derivatives."""
        rows, inputs = points_BI.shape
        tangents_IBI = torch.eye(inputs, dtype=points_BI.dtype, device=points_BI.device)[:, None].expand(-1, rows, -1)
        h_RBH = torch.cat([points_BI[None], tangents_IBI, torch.zeros_like(points_BI)[None]])
        for layer, bias_H in zip(self.layers, self.biases, strict=True):
            z_RBH = layer(h_RBH)
            h_BH, slope_BH, bend_BH = self._activated(z_RBH[0] + bias_H)
            squares_BH = z_RBH[1:inputs].square().sum(0)  # of the tangents in space
            laplacian_BH = slope_BH * z_RBH[-1] + bend_BH * squares_BH
            h_RBH = torch.cat([h_BH[None], slope_BH * z_RBH[1:-1], laplacian_BH[None]])
        f_RB = (h_RBH @ self.head.weight.mT).squeeze(2)
        return Derivatives(f_RB[0] + self.head.bias, f_RB[1:-1].mT, f_RB[-1])

    def _activated(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """φ, φ' and φ'' of the activation."""
        if self.activation == "sin":
            sine = z.sin()
            return sine, z.cos(), -sine
        tanh = z.tanh()
        slope = 1 - tanh.square()
        return tanh, slope, -2 * tanh * slope
