"""Which ranks to keep within a budget: the least loss of importance, over all chains at once.

Of the importance T_k of a bond's entries, rank r keeps the largest ones' share, t_k(r)/T_k. The shares of a chain's
bonds multiply, so what a choice of ranks costs is counted in logarithms, and its size couples neighbours only:

    min  Σ_k T_k · log(T_k / t_k(r_k))    with    Σ_k r_{k-1} sizes_k r_k + Σ_k r_k  ≤  budget

With a price λ on each number the chains fall apart, and along a chain the best ranks follow from one sweep of dynamic
programming. λ is found by bisection; the choice is then the cheapest of its size by this count (a proxy: losses of one
chain's bonds overlap), and what the budget leaves over is given back rank by rank.

Shapes: C chains with the same number of bonds, Q, R candidate ranks of a bond and of the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log

import torch
from torch import Tensor

from comera.tt.spec import Spec

_BISECTIONS = 50


def allocate(
    specs: Sequence[Spec],
    importances: Sequence[Sequence[Sequence[float]]],
    budget: int,
    *,
    multiple: int = 1,
    rounding: bool = False,
) -> list[tuple[int, ...]]:
    """Ranks of every chain's inner bonds whose total size, rank parameters counted, is at most `budget`.

    importances: for each chain and inner bond those of its entries that may stay, ascending; dropping the first m of
    them leaves rank len − m. multiple: ranks stay at multiples of it, or at what they are. rounding: no rank is above
    what its neighbours allow, r_k ≤ sizes · r_{k±1}, as SVD rounding leaves it. No bond that has an entry falls below
    one (multiple); where that is still above the budget, these smallest ranks are returned.
    """
    costs = [[_costs(entries, multiple) for entries in bonds] for bonds in importances]
    by_length: dict[int, list[int]] = {}
    for c, bonds in enumerate(costs):
        by_length.setdefault(len(bonds), []).append(c)
    groups = [
        (chains, _Group([specs[c] for c in chains], [costs[c] for c in chains], rounding))
        for chains in by_length.values()
    ]

    def choose(price: float) -> list[list[int]]:
        ranks: list[list[int]] = [[] for _ in specs]
        for chains, group in groups:
            for c, bonds in zip(chains, group.choose(price), strict=True):
                ranks[c] = bonds
        return ranks

    def size(ranks: Sequence[Sequence[int]]) -> int:
        return sum(tt_size(spec, bonds) for spec, bonds in zip(specs, ranks, strict=True))

    best = choose(0.0)
    if size(best) > budget:
        # in logarithms, from a price at which anything goes to one at which nothing does
        largest = max((cost for bonds in costs for bond in bonds for cost in bond.values()), default=0.0)
        low, high = log(1e-12 * largest + 1e-300), log(2 * largest + 1e-300)
        best = choose(inf)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            found = choose(exp(middle))
            if size(found) > budget:
                low = middle
            else:
                high, best = middle, found
        _give_back(specs, costs, best, budget - size(best), rounding)
    return [tuple(bonds) for bonds in best]


def tt_size(spec: Spec, bonds: Sequence[int]) -> int:
    """Numbers that a chain of these inner ranks stores."""
    ends = [1, *bonds, 1]
    return sum(r * n * s for r, n, s in zip(ends[:-1], spec.sizes, ends[1:], strict=True)) + sum(bonds)


def _costs(entries: Sequence[float], multiple: int) -> dict[int, float]:
    """T log(T / t(r)) for each rank that a bond may take."""
    largest = len(entries)
    kept = [0.0, *accumulate(reversed(entries))]
    ranks = sorted({largest, *range(multiple, largest, multiple)})
    return {rank: kept[-1] * log(kept[-1] / kept[rank]) if kept[-1] > 0 else 0.0 for rank in ranks}


class _Group:
    """Chains with the same number of bonds, side by side."""

    def __init__(self, specs: Sequence[Spec], costs: Sequence[Sequence[dict[int, float]]], rounding: bool) -> None:
        self.gates, self.chains = len(costs[0]), len(specs)
        candidates = max((len(bond) for bonds in costs for bond in bonds), default=1)
        shape = (self.gates, self.chains, candidates)
        self.cost_QCR = torch.full(shape, inf, dtype=torch.float64)
        self.rank_QCR = torch.zeros(shape, dtype=torch.float64)
        for c, bonds in enumerate(costs):
            for k, bond in enumerate(bonds):
                self.cost_QCR[k, c, : len(bond)] = torch.tensor(list(bond.values()), dtype=torch.float64)
                self.rank_QCR[k, c, : len(bond)] = torch.tensor(list(bond), dtype=torch.float64)
        sizes_QC = torch.tensor([spec.sizes for spec in specs], dtype=torch.float64).T
        self.first_C, self.last_C, inner_QC = sizes_QC[0], sizes_QC[-1], sizes_QC[1:-1]
        # numbers of the core between bonds k and k+1, and which pairs of their ranks may meet
        self.cores, self.barred = [], []
        for k in range(self.gates - 1):
            left_CR1, right_C1S = self.rank_QCR[k][:, :, None], self.rank_QCR[k + 1][:, None, :]
            size_C11 = inner_QC[k][:, None, None]
            self.cores.append(left_CR1 * size_C11 * right_C1S)
            self.barred.append(
                (left_CR1 > size_C11 * right_C1S) | (right_C1S > size_C11 * left_CR1) if rounding else None
            )
        if rounding and self.gates:
            self.cost_QCR[0][self.rank_QCR[0] > self.first_C[:, None]] = inf
            self.cost_QCR[-1][self.rank_QCR[-1] > self.last_C[:, None]] = inf

    def choose(self, price: float) -> list[list[int]]:
        """The ranks of least cost plus price · size in each chain; the smallest ones for an infinite price."""
        if not self.gates:
            return [[] for _ in range(self.chains)]
        weight, price = (1.0, price) if price < inf else (0.0, 1.0)
        own_QCR = self.cost_QCR.clone()
        own_QCR[own_QCR < inf] *= weight
        own_QCR += price * self.rank_QCR
        best_CR = own_QCR[0] + price * self.first_C[:, None] * self.rank_QCR[0]
        came_from: list[Tensor] = []
        for core_CRS, barred, own_CR in zip(self.cores, self.barred, own_QCR[1:], strict=True):
            total_CRS = best_CR[:, :, None] + price * core_CRS
            if barred is not None:
                total_CRS = total_CRS.masked_fill(barred, inf)
            found = total_CRS.min(1)
            came_from.append(found.indices)
            best_CR = found.values + own_CR
        place_C1 = (best_CR + price * self.last_C[:, None] * self.rank_QCR[-1]).argmin(1, keepdim=True)
        ranks = [self.rank_QCR[-1].gather(1, place_C1)]
        for k in range(self.gates - 2, -1, -1):
            place_C1 = came_from[k].gather(1, place_C1)
            ranks.insert(0, self.rank_QCR[k].gather(1, place_C1))
        return [[int(rank) for rank in bonds] for bonds in torch.cat(ranks, 1).tolist()]


def _give_back(
    specs: Sequence[Spec],
    costs: Sequence[Sequence[dict[int, float]]],
    ranks: list[list[int]],
    left: int,
    rounding: bool,
) -> None:
    """Raise ranks, in place, while the numbers that are left over allow it; the best gain per number first."""

    def raised(c: int, k: int) -> tuple[float, int, int] | None:
        """(gain per number, numbers, rank) of the next rank of a bond; None where it does not fit."""
        rank, spec = ranks[c][k], specs[c]
        above = min((candidate for candidate in costs[c][k] if candidate > rank), default=None)
        if above is None:
            return None
        before = ranks[c][k - 1] if k else 1
        after = ranks[c][k + 1] if k + 1 < len(ranks[c]) else 1
        if rounding and above > min(before * spec.sizes[k], spec.sizes[k + 1] * after):
            return None
        numbers = (above - rank) * (before * spec.sizes[k] + spec.sizes[k + 1] * after + 1)
        return ((costs[c][k][rank] - costs[c][k][above]) / numbers, numbers, above) if numbers <= left else None

    while True:
        found = [(*step, c, k) for c, chain in enumerate(ranks) for k in range(len(chain)) if (step := raised(c, k))]
        if not found:
            return
        _, numbers, rank, c, k = max(found)
        ranks[c][k] = rank
        left -= numbers
