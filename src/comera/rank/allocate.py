"""Which ranks to keep within a budget: what matters least for the numbers that it takes goes first.

Dropping an entry of bond k saves ``r_{k-1} sizes_k + sizes_{k+1} r_{k+1}`` core entries and its rank parameter. The
greedy choice drops, again and again, the entry of least cost per number saved, over all chains at once. What it costs
is its importance, counted the more the less its bond has left:

    cost_j = importance_j · (importance of the whole bond) / (importance of what it still has)

Added up, that is the logarithm of the part that is kept, and the parts that the bonds of a chain keep multiply. Without
it one bond is stripped to rank 1 while its neighbours stay wide, since each cut makes the neighbours' cuts save less.
Costs only rise and savings only fall on the way, so an old ratio in the heap is a lower bound: it is computed anew when
it comes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate

from comera.tt.spec import Spec


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
    them leaves rank len − m. multiple: ranks stay at multiples of it, or at what they are. rounding: ranks above what
    their neighbours allow, r_k ≤ sizes · r_{k±1}, go for free. No bond that has an entry falls below one (multiple);
    where that is still above the budget, these smallest ranks are returned.
    """
    chains = [_Chain(spec, bonds, multiple, rounding) for spec, bonds in zip(specs, importances, strict=True)]
    size = sum(chain.size() for chain in chains)
    heap = [(chain.price(k), c, k) for c, chain in enumerate(chains) for k in range(len(chain.ranks))]
    heapify(heap)
    while size > budget and heap:
        price, c, k = heappop(heap)
        chain = chains[c]
        if price < (now := chain.price(k)):
            heappush(heap, (now, c, k))
        elif now < float("inf"):
            size -= chain.drop(k)
            heappush(heap, (chain.price(k), c, k))
    return [tuple(chain.ranks) for chain in chains]


class _Chain:
    """The ranks of one chain on their way down."""

    def __init__(self, spec: Spec, importances: Sequence[Sequence[float]], multiple: int, rounding: bool) -> None:
        self.sizes, self.multiple, self.rounding = spec.sizes, multiple, rounding
        self.ranks = [len(entries) for entries in importances]
        # lost[k][m]: importance of the m entries of bond k that go first
        self.lost = [[0.0, *accumulate(entries)] for entries in importances]
        self._clip()

    def size(self) -> int:
        """Numbers stored: core entries and rank parameters."""
        ends = [1, *self.ranks, 1]
        return sum(r * n * s for r, n, s in zip(ends[:-1], self.sizes, ends[1:], strict=True)) + sum(self.ranks)

    def price(self, k: int) -> float:
        """Cost per number saved of the next cut of bond k; infinite where there is none."""
        rank, lost = self.ranks[k], self.lost[k]
        count = self._count(rank)
        if rank - count < 1:
            return float("inf")
        gone, whole = len(lost) - 1 - rank, lost[-1]
        left = self.ranks[k - 1] if k else 1
        right = self.ranks[k + 1] if k + 1 < len(self.ranks) else 1
        saved = count * (left * self.sizes[k] + self.sizes[k + 1] * right + 1)
        kept = whole - lost[gone]
        return (lost[gone + count] - lost[gone]) * (whole / kept) / saved if kept > 0 else 0.0

    def drop(self, k: int) -> int:
        """Take the next cut of bond k; returns the numbers saved."""
        before = self.size()
        self.ranks[k] -= self._count(self.ranks[k])
        self._clip()
        return before - self.size()

    def _count(self, rank: int) -> int:
        return rank % self.multiple or self.multiple

    def _clip(self) -> None:
        """Take out what rounding takes out, from either end."""
        if not self.rounding:
            return
        ranks, sizes, last = self.ranks, self.sizes, len(self.ranks) - 1
        for k in range(last + 1):
            ranks[k] = min(ranks[k], (ranks[k - 1] if k else 1) * sizes[k])
        for k in range(last, -1, -1):
            ranks[k] = min(ranks[k], (ranks[k + 1] if k < last else 1) * sizes[k + 1])
