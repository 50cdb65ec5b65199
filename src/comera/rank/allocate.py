"""Which ranks to keep within a budget, over all tensor trains at once.

Each gate has an importance. At inner rank k, let T_k be the sum of all importances and t_k(r) the sum of the r largest;
keeping rank r keeps the fraction t_k(r)/T_k. Within a train these fractions multiply, so the cost of a choice of ranks
is counted in logarithms, and its size couples neighboring ranks only::

    min  Σ_k T_k · log(T_k / t_k(r_k))    subject to    Σ_k r_{k-1} sizes_k r_k + Σ_k r_k  ≤  budget

With a price λ per parameter the trains decouple, and dynamic programming finds the best ranks of each in one sweep.
Bisection finds λ. The result is the cheapest choice of its size by this count, which is a proxy, since the losses at
different inner ranks of one train overlap. What remains of the budget is spent rank by rank.

Shapes: C trains of equal order, K inner ranks of each, R and S candidates for inner ranks k and k+1.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log

import torch
from torch import Tensor

from comera.rank.ngrams import NGramGates
from comera.tt.format import spec_size
from comera.tt.spec import Spec

_BISECTIONS = 50
_TIE = 1e-300  # per parameter: less than any importance


def allocate(
    specs: Sequence[Spec],
    importances: Sequence[Sequence[Sequence[float]]],
    tables: Sequence[NGramGates],
    budget: int,
    *,
    multiple: int = 1,
    rounding: bool = False,
) -> tuple[list[tuple[int, ...]], list[list[Tensor]]]:
    """Inner ranks of every tensor train, and of n-gram tables the gates of each order that stay, of a total size, gates
    included, of at most `budget`.

    No inner rank with a gate falls below 1 (or `multiple`); if even these smallest ranks exceed the budget, they are
    returned. A gate of a table costs its importance, as a gate of a train does to first order. All gates of a table may
    go.

    importances: for each train and inner rank, those of the gates that may stay, ascending; dropping the first m of
    them leaves rank len − m. multiple: ranks stay at multiples of it, or as they are. rounding: no rank exceeds what
    its neighbors allow, r_k ≤ reach · r_{k±1}, as SVD rounding leaves it.
    """
    costs = [[_costs(gates, multiple) for gates in train] for train in importances]
    by_order: dict[int, list[int]] = {}
    for c, train in enumerate(costs):
        by_order.setdefault(len(train), []).append(c)
    groups = [
        (members, _Group([specs[c] for c in members], [costs[c] for c in members], rounding))
        for members in by_order.values()
    ]

    def choose(price: float) -> tuple[list[list[int]], list[list[Tensor]]]:
        ranks: list[list[int]] = [[] for _ in specs]
        for members, group in groups:
            for c, inner in zip(members, group.choose(price), strict=True):
                ranks[c] = inner
        return ranks, [table.choose(price) for table in tables]

    def size(choice: tuple[Sequence[Sequence[int]], Sequence[Sequence[Tensor]]]) -> int:
        ranks, kept = choice
        trains = sum(spec_size(spec, inner) for spec, inner in zip(specs, ranks, strict=True))
        return trains + sum(table.size(own) for table, own in zip(tables, kept, strict=True))

    # gates of zero importance stay as long as there is room for them: they may not have been measured yet
    best = choose(0.0 if rounding else -_TIE)
    if size(best) > budget:
        # Bisect in logarithms, from a price at which everything is kept to one at which nothing is.
        largest = max((cost for train in costs for gates in train for cost in gates.values()), default=0.0)
        largest = max([largest, *(table.most for table in tables)])
        low, high = log(1e-12 * largest + 1e-300), log(2 * largest + 1e-300)
        best = choose(inf)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            found = choose(exp(middle))
            if size(found) > budget:
                low = middle
            else:
                high, best = middle, found
        _spend(specs, costs, best[0], budget - size(best), rounding)
    return [tuple(inner) for inner in best[0]], best[1]


def _costs(gates: Sequence[float], multiple: int) -> dict[int, float]:
    """T log(T / t(r)) for each candidate r of an inner rank."""
    largest = len(gates)
    kept = [0.0, *accumulate(reversed(gates))]
    ranks = sorted({largest, *range(multiple, largest, multiple)})
    return {rank: kept[-1] * log(kept[-1] / kept[rank]) if kept[-1] > 0 else 0.0 for rank in ranks}


class _Group:
    """Trains of equal order, batched."""

    def __init__(self, specs: Sequence[Spec], costs: Sequence[Sequence[dict[int, float]]], rounding: bool) -> None:
        self.inner, self.trains = len(costs[0]), len(specs)
        candidates = max((len(gates) for train in costs for gates in train), default=1)
        shape = (self.inner, self.trains, candidates)
        self.cost_KCR = torch.full(shape, inf, dtype=torch.float64)
        self.rank_KCR = torch.zeros(shape, dtype=torch.float64)
        for c, train in enumerate(costs):
            for k, gates in enumerate(train):
                self.cost_KCR[k, c, : len(gates)] = torch.tensor(list(gates.values()), dtype=torch.float64)
                self.rank_KCR[k, c, : len(gates)] = torch.tensor(list(gates), dtype=torch.float64)
        sizes_KC = torch.tensor([spec.sizes for spec in specs], dtype=torch.float64).T
        reach_KC = torch.tensor([spec.reach for spec in specs], dtype=torch.float64).T
        self.first_C, self.last_C, inner_KC = sizes_KC[0], sizes_KC[-1], sizes_KC[1:-1]
        # Entries of the core between inner ranks k and k+1, and the pairs of their candidates that cannot meet.
        self.cores, self.barred = [], []
        for k in range(self.inner - 1):
            left_CR1, right_C1S = self.rank_KCR[k][:, :, None], self.rank_KCR[k + 1][:, None, :]
            self.cores.append(left_CR1 * inner_KC[k][:, None, None] * right_C1S)
            reach_C11 = reach_KC[k + 1][:, None, None]
            barred_CRS = (left_CR1 > reach_C11 * right_C1S) | (right_C1S > reach_C11 * left_CR1)
            self.barred.append(barred_CRS if rounding else None)
        if rounding and self.inner:
            self.cost_KCR[0][self.rank_KCR[0] > reach_KC[0][:, None]] = inf
            self.cost_KCR[-1][self.rank_KCR[-1] > reach_KC[-1][:, None]] = inf

    def choose(self, price: float) -> list[list[int]]:
        """The ranks of least cost + price · size in each train; for an infinite price, the smallest ones."""
        if not self.inner:
            return [[] for _ in range(self.trains)]
        weight, price = (1.0, price) if price < inf else (0.0, 1.0)
        own_KCR = self.cost_KCR.clone()
        own_KCR[own_KCR < inf] *= weight
        own_KCR += price * self.rank_KCR
        best_CR = own_KCR[0] + price * self.first_C[:, None] * self.rank_KCR[0]
        came_from: list[Tensor] = []
        for core_CRS, barred, own_CS in zip(self.cores, self.barred, own_KCR[1:], strict=True):
            total_CRS = best_CR[:, :, None] + price * core_CRS
            found = (total_CRS if barred is None else total_CRS.masked_fill(barred, inf)).min(1)
            came_from.append(found.indices)
            best_CR = found.values + own_CS
        place_C1 = (best_CR + price * self.last_C[:, None] * self.rank_KCR[-1]).argmin(1, keepdim=True)
        ranks = [self.rank_KCR[-1].gather(1, place_C1)]
        for k in range(self.inner - 2, -1, -1):
            place_C1 = came_from[k].gather(1, place_C1)
            ranks.insert(0, self.rank_KCR[k].gather(1, place_C1))
        return [[int(rank) for rank in inner] for inner in torch.cat(ranks, 1).tolist()]


def _spend(
    specs: Sequence[Spec],
    costs: Sequence[Sequence[dict[int, float]]],
    ranks: list[list[int]],
    left: int,
    rounding: bool,
) -> None:
    """Raise ranks, in place, as far as the `left` parameters allow; the best gain per parameter first."""
    candidates = [[sorted(gates) for gates in train] for train in costs]

    def raised(c: int, k: int) -> tuple[float, int, int] | None:
        """(gain per parameter, parameters, rank) of the next candidate for an inner rank; None if it does not fit."""
        rank, spec = ranks[c][k], specs[c]
        place = bisect_right(candidates[c][k], rank)
        if place == len(candidates[c][k]):
            return None
        above = candidates[c][k][place]
        before = ranks[c][k - 1] if k else 1
        after = ranks[c][k + 1] if k + 1 < len(ranks[c]) else 1
        if rounding and above > min(before * spec.reach[k], spec.reach[k + 1] * after):
            return None
        added = (above - rank) * (before * spec.sizes[k] + spec.sizes[k + 1] * after + 1)
        return ((costs[c][k][rank] - costs[c][k][above]) / added, added, above) if added <= left else None

    while True:
        found = [(*step, c, k) for c, inner in enumerate(ranks) for k in range(len(inner)) if (step := raised(c, k))]
        if not found:
            return
        _, added, rank, c, k = max(found)
        ranks[c][k] = rank
        left -= added
