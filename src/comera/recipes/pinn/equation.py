"""The equation that a network solves, with a known solution: Hamilton-Jacobi-Bellman in n dimensions.

    u_t + Δu − ‖∇u‖² / n = −2   on [0, 1]ⁿ × [0, 1],      u(x, 1) = ‖x‖₁,      solved by u = ‖x‖₁ + 1 − t

The control problem behind it: steer a diffusion so that the cost at the end, ‖x‖₁, and that of steering are least. For
n = 20, 1/n is the 0.05 of the source. The condition at t = 1 is built in: the network is f in u = (1 − t) f + ‖x‖₁.

Source: Zhao et al. 2025 (arXiv:2502.12384); docs/method.md §11.
B points, n dimensions, I = n + 1 inputs of the network, the time last."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Derivatives(NamedTuple):
    """Of a function at B points. value (B,); gradient by all inputs (B, I); laplacian in space (B,)."""

    value: Tensor
    gradient: Tensor
    laplacian: Tensor


@dataclass(frozen=True)
class HJB:
    """The equation in `dimension` dimensions. Points are (B, I): x in [0, 1]ⁿ, then t in [0, 1]."""

    dimension: int

    @property
    def inputs(self) -> int:
        """Numbers that make a point."""
        return self.dimension + 1

    def points(self, count: int, generator: torch.Generator) -> Tensor:
        """Points drawn uniformly."""
        return torch.rand(count, self.inputs, generator=generator)

    def exact(self, points_BI: Tensor) -> Tensor:
        """The solution, (B,)."""
        return points_BI[:, :-1].abs().sum(1) + 1 - points_BI[:, -1]

    def solution(self, points_BI: Tensor, f_B: Tensor) -> Tensor:
        """u from the network's f, (B,)."""
        return (1 - points_BI[:, -1]) * f_B + points_BI[:, :-1].abs().sum(1)

    def derivatives(self, points_BI: Tensor, f: Derivatives) -> Derivatives:
        """Those of u from those of f: the built-in condition is differentiated by hand, not by an estimator."""
        left_B = 1 - points_BI[:, -1]
        space_BN = left_B[:, None] * f.gradient[:, :-1] + points_BI[:, :-1].sign()
        time_B = left_B * f.gradient[:, -1] - f.value
        gradient_BI = torch.cat([space_BN, time_B[:, None]], 1)
        return Derivatives(self.solution(points_BI, f.value), gradient_BI, left_B * f.laplacian)

    def residual(self, u: Derivatives) -> Tensor:
        """By how much a function misses the equation at each point, (B,)."""
        slope_B = u.gradient[:, :-1].square().sum(1) / self.dimension
        return u.gradient[:, -1] + u.laplacian - slope_B + 2
