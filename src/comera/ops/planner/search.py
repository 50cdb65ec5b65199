"""The cheapest groups of cores for y = x W, W a tensor train: an exact search.

Each group of neighboring cores is merged, then x absorbs group after group (ops/sequential.py). The intermediate result
between two groups depends only on how many cores x has absorbed, so costs add up along the train, and the best of all
2^(order-1) partitions is a shortest path over the cores:

    best(0) = 0,   best(b) = min over a < b of  best(a) + merge(a, b) + absorb(a, b)

The cores of a group are merged in their cheapest order, which is the matrix-chain problem:

    merge(a, b) = min over c of  merge(a, c) + merge(c, b) + product
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod

from comera.ops.planner.cost import Cost, Machine, product, work
from comera.ops.planner.groups import Group, Groups, default_group
from comera.tt.spec import Spec, TTSpec

# A group merges in the default order unless another order is cheaper by this factor.
DEFAULT_ADVANTAGE = 1.05

_Merge = tuple[Group, Cost]


@dataclass(frozen=True)
class GroupSearch:
    """Costs of all partitions of one tensor train into groups, for one batch size.

    batch: rows of x. itemsize: bytes per element of x. on: the machine.
    grad_x, grad_cores: gradients that the backward computes; a product runs once forward and once for each of its
    operands that needs a gradient.
    """

    spec: TTSpec
    batch: int
    itemsize: int
    on: Machine
    grad_x: bool = True
    grad_cores: bool = True

    def best(self) -> tuple[int, ...]:
        """Where the groups of the cheapest partition end."""
        paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for b in range(1, self.spec.order + 1):
            steps = [paths[a][0] + self.merges[a, b][1].seconds + self.absorb(a, b).seconds for a in range(b)]
            a = min(range(b), key=steps.__getitem__)
            paths.append((steps[a], (*paths[a][1], b)))
        return paths[-1][1]

    def price(self, ends: Sequence[int], *, default_order: bool = False) -> tuple[Groups, Cost]:
        """The groups with these ends and their cost; each merged in its cheapest order, or in the default order."""
        groups: list[Group] = []
        total = Cost()
        for a, b in pairwise((0, *ends)):
            group, cost = self._priced(default_group(self.spec, a, b)) if default_order else self.merges[a, b]
            groups.append(group)
            total = total + cost + self.absorb(a, b)
        return tuple(groups), total

    @cached_property
    def merges(self) -> dict[tuple[int, int], _Merge]:
        """For every a < b the order in which cores a, ..., b - 1 are merged, and its cost."""
        best: dict[tuple[int, int], _Merge] = {(k, k + 1): (Group.of(k), Cost()) for k in range(self.spec.order)}
        for length in range(2, self.spec.order + 1):
            for a in range(self.spec.order - length + 1):
                b = a + length
                merges = [self._join(best[a, c], best[c, b]) for c in range(a + 1, b)]
                best[a, b] = min(merges, key=lambda merge: merge[1].seconds)
        for (a, b), (_, cost) in best.items():
            default = self._priced(default_group(self.spec, a, b))
            if default[1].seconds <= DEFAULT_ADVANTAGE * cost.seconds:
                best[a, b] = default
        return best

    def _join(self, left: _Merge, right: _Merge) -> _Merge:
        joined = joining(self.spec, self.on, left[0], right[0], self._merge_passes, self.itemsize)
        return Group.of(left[0], right[0]), left[1] + right[1] + joined

    def _priced(self, group: Group) -> _Merge:
        return group, merging(self.spec, self.on, group, passes=self._merge_passes, itemsize=self.itemsize)

    @property
    def _merge_passes(self) -> int:
        return 3 if self.grad_cores else 1

    def absorb(self, a: int, b: int) -> Cost:
        """Cost of multiplying x, which has absorbed cores 0, ..., a - 1, by the merged cores a, ..., b - 1."""
        spec, batch, split = self.spec, self.batch, self.spec.split
        here, there = prod(spec.modes[a : min(b, split)]), prod(spec.modes[max(a, split) : b])
        if a == 0 and b >= split:  # the padding is sliced off the weight
            here = spec.in_features
        if a <= split and b == spec.order:
            there = spec.out_features
        to_come, done = prod(spec.modes[b:split]), prod(spec.modes[split:a])
        rows, inner, cols = batch * to_come * done, spec.ranks[a] * here, there * spec.ranks[b]
        passes = 1 + (self.grad_x or (a > 0 and self.grad_cores)) + self.grad_cores
        cost = product(self.on, rows, inner, cols, self.itemsize, passes=passes)
        if a == 0 and b < split and batch > 1:  # x is transposed, and its gradient back
            copies = 1 + self.grad_x
            moved = copies * 2 * batch * here * to_come * self.itemsize
            cost += work(self.on, self.itemsize, moved=moved, calls=copies)
        if self.itemsize == 2 and b > a:  # the merged cores are cast to half precision, their gradient to float32
            casts = 1 + self.grad_cores
            cost += work(self.on, 4, moved=casts * inner * cols * (4 + self.itemsize), calls=casts)
        return cost


def merging(spec: Spec, on: Machine, group: Group, *, passes: int = 3, itemsize: int = 4) -> Cost:
    """Cost of merging the cores of a group in its order, in float32 or wider."""
    if group.pair is None:
        return Cost()
    left, right = (merging(spec, on, part, passes=passes, itemsize=itemsize) for part in group.pair)
    return left + right + joining(spec, on, *group.pair, passes, itemsize)


def joining(spec: Spec, on: Machine, left: Group, right: Group, passes: int, itemsize: int) -> Cost:
    """Cost of the product of two merged neighbors."""
    rows = spec.ranks[left.first] * prod(spec.sizes[left.first : left.end])
    cols = prod(spec.sizes[right.first : right.end]) * spec.ranks[right.end]
    return product(on, rows, spec.ranks[left.end], cols, max(4, itemsize), passes=passes)
