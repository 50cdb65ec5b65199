"""Which ranks to keep within a budget: what matters least for the numbers that it takes goes first.

Dropping one entry of bond k saves ``r_{k-1} sizes_k + sizes_{k+1} r_{k+1}`` core entries and its rank parameter. The
greedy choice drops, again and again, the entry of lowest importance per number saved. Savings only fall while the
neighbours shrink, so an old ratio in the heap is a lower bound: it is computed anew when it comes up.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from comera.tt.spec import Spec


def allocate(
    specs: Sequence[Spec], importances: Sequence[Sequence[Sequence[float]]], budget: int, *, multiple: int = 1
) -> list[tuple[int, ...]]:
    """Ranks of every chain's inner bonds whose total size, rank parameters counted, is at most `budget`.

    importances: for each chain and inner bond those of its entries that may stay, ascending; dropping the first m of
    them leaves rank len − m. multiple: ranks stay at multiples of it, or at what they are. No bond that has an entry
    falls below one (multiple); where that is still above the budget, these smallest ranks are returned.
    """
    ranks = [[len(bond) for bond in chain] for chain in importances]
    size = sum(spec.with_ranks((1, *chain, 1)).numel + sum(chain) for spec, chain in zip(specs, ranks, strict=True))

    def drop(c: int, k: int) -> tuple[float, int, int, int, int] | None:
        """(importance per number saved, rank before, entries, chain, bond) of the next cut of a bond."""
        rank, sizes = ranks[c][k], specs[c].sizes
        count = rank % multiple or multiple
        if rank - count < 1:
            return None
        left = ranks[c][k - 1] if k else 1
        right = ranks[c][k + 1] if k + 1 < len(ranks[c]) else 1
        saved = count * (left * sizes[k] + sizes[k + 1] * right + 1)
        gone = len(importances[c][k]) - rank
        return sum(importances[c][k][gone : gone + count]) / saved, rank, saved, c, k

    heap = [entry for c, chain in enumerate(ranks) for k in range(len(chain)) if (entry := drop(c, k)) is not None]
    heapify(heap)
    while size > budget and heap:
        entry = heappop(heap)
        _, rank, saved, c, k = entry
        now = drop(c, k)
        if now is None or rank != ranks[c][k]:
            continue
        if now[2] != saved:
            heappush(heap, now)
            continue
        ranks[c][k] -= rank % multiple or multiple
        size -= saved
        following = drop(c, k)
        if following is not None:
            heappush(heap, following)
    return [tuple(chain) for chain in ranks]
