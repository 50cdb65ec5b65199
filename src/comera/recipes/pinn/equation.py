"""The equation that a network solves, with a known solution: Hamilton-Jacobi-Bellman in n dimensions; and derivatives
of a function from its values alone, what a device that only evaluates can measure.

    u_t + Δu − ‖∇u‖² / n = −2   on [0, 1]ⁿ × [0, 1],      u(x, 1) = ‖x‖₁,      solved by u = ‖x‖₁ + 1 − t

The control problem behind it: steer a diffusion so that the cost at the end, ‖x‖₁, and that of steering are least. For
n = 20, 1/n is the 0.05 of the source. The condition at t = 1 is built in: the network is f in u = (1 − t) f + ‖x‖₁.

**Stein's identity**: smoothed by a Gaussian, f_σ(x) = E f(x + σδ), a function has derivatives that are means of its
values::

    ∇f_σ = E[δ (f(x + σδ) − f(x))] / σ        Δf_σ = E[(‖δ‖² − n) (f(x + σδ) − f(x))] / σ²        over n dimensions

Both means are sums over nodes δ_k with weights w_k: drawn, in pairs ±δ, or on a sparse grid. f_σ is off from f by
O(σ²). f(x) is subtracted although both means of it vanish, because in float32 the differences are what is left.

The sparse grid is Smolyak's of level 3 over Gauss-Hermite rules of 1, 2 and 3 nodes: 2n² + 2n + 1 nodes in n
dimensions, exact for polynomials of degree 5, and so for both means of a cubic f.

Sources: Zhao et al. 2025 (arXiv:2502.12384), whose grid it is; He et al. 2022 (arXiv:2202.09340) drew the nodes;
docs/method.md §11.
B points, n dimensions, I = n + 1 inputs of the network, the time last, K nodes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product
from math import comb, prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_LEVEL = 3


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


@cache
def sparse_grid(dimension: int, level: int = _LEVEL) -> tuple[Tensor, Tensor]:
    """Nodes (K, dimension) and weights (K,) of a standard normal distribution, float64; without the origin, whose
    difference is 0. Weights can be negative."""
    rules = [_gauss(count) for count in range(1, level + 1)]
    weights: Counter[tuple[tuple[int, float], ...]] = Counter()  # by the coordinates that are not 0
    for spent in range(max(0, level - dimension), level):  # how far the rules of a product are above the first one
        sign = (-1) ** (level - 1 - spent) * comb(dimension - 1, level - 1 - spent)
        for axes in combinations_with_replacement(range(dimension), spent):
            raised = Counter(axes)  # axis -> level of its rule
            for chosen in product(*(rules[above] for above in raised.values())):
                place = tuple((axis, node) for axis, (node, _) in zip(raised, chosen, strict=True) if node)
                weights[place] += sign * prod(weight for _, weight in chosen)
    del weights[()]
    nodes_KI = torch.zeros(len(weights), dimension, dtype=torch.float64)
    for k, place in enumerate(weights):
        for axis, node in place:
            nodes_KI[k, axis] = node
    return nodes_KI, torch.tensor(list(weights.values()), dtype=torch.float64)


def _gauss(count: int) -> list[tuple[float, float]]:
    """Nodes and weights of a Gauss-Hermite rule for the standard normal distribution. The middle one is exactly 0."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(count)
    return [
        (0.0 if abs(x) < 1e-12 else float(x), float(w / weights.sum())) for x, w in zip(nodes, weights, strict=True)
    ]


def drawn_nodes(dimension: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` nodes, an even number, in pairs ±δ, and their weights."""
    half = torch.randn(count // 2, dimension, generator=generator)
    return torch.cat([half, -half]), torch.full((count,), 1 / count)


def stein_derivatives(
    function: Callable[[Tensor], Tensor], points_BI: Tensor, nodes_KI: Tensor, weights_K: Tensor, sigma: float
) -> Derivatives:
    """The value of a function at its points, with estimates of its derivatives from K + 1 values each. function:
    (rows, I) -> (rows,)."""
    shifted_KBI = points_BI + sigma * nodes_KI[:, None]
    rows_RI = torch.cat([points_BI[None], shifted_KBI]).flatten(0, 1)
    value_B, *_ = values = function(rows_RI).view(-1, len(points_BI))
    differences_KB = values[1:] - value_B
    squares_K = nodes_KI[:, :-1].square().sum(1) - (nodes_KI.shape[1] - 1)
    gradient_BI = differences_KB.mT @ (weights_K[:, None] * nodes_KI) / sigma
    return Derivatives(value_B, gradient_BI, (weights_K * squares_K) @ differences_KB / sigma**2)
