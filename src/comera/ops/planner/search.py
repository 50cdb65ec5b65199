"""The cheapest way to take x through a tensor train, by exact search on the chain of cores.

A way is a list of groups of neighbouring cores: each is merged, then x absorbs group after group (chain.py). What x
looks like between two groups depends only on the bond that it has reached, so costs add up along the chain, and the
best of all 2^(order-1) lists is a shortest path over the bonds:

    best(0) = 0,   best(b) = min over a < b of  best(a) + merge(a, b) + absorb(a, b)

with the cores of a group merged in their cheapest order, merge(a, b) = min over c of merge(a, c) + merge(c, b) +
product: the matrix-chain problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from comera.ops.planner.cost import Cost, Machine, product, work
from comera.ops.sequential import Groups, Tree, simple_tree
from comera.tt.spec import Spec, TTSpec

# Cores are merged in the simple order, from the ends of the chain inwards, unless another is cheaper by this factor.
SIMPLE = 1.05

Merge = tuple[Tree, Cost]


@dataclass(frozen=True)
class ChainSearch:
    """Costs of all ways through one tensor train, for one batch.

    batch: rows of x. itemsize: bytes of a number of x. on: the machine. grad_x, grad_cores: gradients that the
    backward has to give; a product runs once forward and once for each of its operands that has one.
    """

    spec: TTSpec
    batch: int
    itemsize: int
    on: Machine
    grad_x: bool = True
    grad_cores: bool = True

    def best(self) -> tuple[int, ...]:
        """The bonds at which the groups of the cheapest way end."""
        paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for b in range(1, self.spec.order + 1):
            steps = [paths[a][0] + self.merges[a, b][1].seconds + self.absorb(a, b).seconds for a in range(b)]
            a = min(range(b), key=steps.__getitem__)
            paths.append((steps[a], (*paths[a][1], b)))
        return paths[-1][1]

    def price(self, ends: Sequence[int], *, simple: bool = False) -> tuple[Groups, Cost]:
        """The groups that end at these bonds and their cost; `simple`: merged in the simple order at any price."""
        groups: list[Tree] = []
        total = Cost()
        for a, b in zip((0, *ends[:-1]), ends, strict=True):
            tree, cost = self._priced(simple_tree(self.spec, a, b)) if simple else self.merges[a, b]
            groups.append(tree)
            total = total + cost + self.absorb(a, b)
        return tuple(groups), total

    @cached_property
    def merges(self) -> dict[tuple[int, int], Merge]:
        """Order and cost of merging cores a..b-1 into one, for every a < b."""
        best: dict[tuple[int, int], Merge] = {(k, k + 1): (k, Cost()) for k in range(self.spec.order)}
        for length in range(2, self.spec.order + 1):
            for a in range(self.spec.order - length + 1):
                b = a + length
                joined = [self._join(a, c, b, best[a, c], best[c, b]) for c in range(a + 1, b)]
                best[a, b] = min(joined, key=lambda merge: merge[1].seconds)
        for (a, b), (_, cost) in best.items():
            simple = self._priced(simple_tree(self.spec, a, b))
            if simple[1].seconds <= SIMPLE * cost.seconds:
                best[a, b] = simple
        return best

    def _join(self, a: int, c: int, b: int, left: Merge, right: Merge) -> Merge:
        passes = 3 if self.grad_cores else 1
        return (left[0], right[0]), left[1] + right[1] + joining(self.spec, self.on, a, c, b, passes, self.itemsize)

    def _priced(self, tree: Tree) -> Merge:
        passes = 3 if self.grad_cores else 1
        return tree, merging(self.spec, self.on, tree, passes=passes, itemsize=self.itemsize)

    def absorb(self, a: int, b: int) -> Cost:
        """Cost of taking x, which has absorbed the cores before a, through the merged cores a..b-1."""
        spec, batch, split = self.spec, self.batch, self.spec.split
        here, there = prod(spec.modes[a : min(b, split)]), prod(spec.modes[max(a, split) : b])
        if a == 0 and b >= split:  # the padding is cut off the weight
            here = spec.in_features
        if a <= split and b == spec.order:
            there = spec.out_features
        to_come, done = prod(spec.modes[b:split]), prod(spec.modes[split:a])
        rows, inner, cols = batch * to_come * done, spec.ranks[a] * here, there * spec.ranks[b]
        passes = 1 + (self.grad_x or (a > 0 and self.grad_cores)) + self.grad_cores
        cost = product(self.on, rows, inner, cols, self.itemsize, passes=passes)
        if a == 0 and b < split and batch > 1:  # x is turned, and its gradient back
            turns = 1 + self.grad_x
            cost += work(self.on, self.itemsize, moved=turns * 2 * batch * here * to_come * self.itemsize, calls=turns)
        if self.itemsize == 2 and b > a:  # the merged cores are rounded, their gradient is widened
            casts = 1 + self.grad_cores
            cost += work(self.on, 4, moved=casts * inner * cols * (4 + self.itemsize), calls=casts)
        return cost


def merging(spec: Spec, on: Machine, tree: Tree, *, passes: int = 3, itemsize: int = 4) -> Cost:
    """Cost of merging the cores of a tree in its order; in float32 at least."""
    if isinstance(tree, int):
        return Cost()
    (a, c), (_, b) = _span(tree[0]), _span(tree[1])
    parts = merging(spec, on, tree[0], passes=passes, itemsize=itemsize)
    parts += merging(spec, on, tree[1], passes=passes, itemsize=itemsize)
    return parts + joining(spec, on, a, c, b, passes, itemsize)


def joining(spec: Spec, on: Machine, a: int, c: int, b: int, passes: int, itemsize: int) -> Cost:
    """Cost of the product of the merged cores a..c-1 with the merged cores c..b-1."""
    rows, cols = spec.ranks[a] * prod(spec.sizes[a:c]), prod(spec.sizes[c:b]) * spec.ranks[b]
    return product(on, rows, spec.ranks[c], cols, max(4, itemsize), passes=passes)


def _span(tree: Tree) -> tuple[int, int]:
    """First core of a tree, and the one after its last."""
    if isinstance(tree, int):
        return tree, tree + 1
    return _span(tree[0])[0], _span(tree[1])[1]
