"""Groups of neighboring cores, each merged into one: what a contraction plan consists of.

A list of groups covers a train from its first core to its last. A group fixes the order of its products too: it is a
binary tree with cores as leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TypeAlias

from comera.tt.spec import Spec, TTSpec


@dataclass(frozen=True)
class Group:
    """Cores first, ..., end - 1, merged into one.

    pair: the left and the right group that the last product multiplies; None for a single core.

    Prints its cores counted from 1. They merge from left to right except where inner parentheses say otherwise:

        >>> from comera.ops.planner.groups import Group
        >>> print(Group.of(0, 1, 2), Group.of(0, Group.of(1, 2)))
        (1 2 3) (1 (2 3))
    """

    first: int
    end: int
    pair: tuple[Group, Group] | None = None

    @classmethod
    def of(cls, *parts: int | Group) -> Group:
        """Cores and groups that follow one another, merged from left to right."""
        groups = [part if isinstance(part, Group) else cls(part, part + 1) for part in parts]
        return reduce(lambda left, right: cls(left.first, right.end, (left, right)), groups)

    @property
    def cores(self) -> range:
        """Indices of the cores."""
        return range(self.first, self.end)

    def __str__(self) -> str:
        return f"({self._inner()})"

    def _inner(self) -> str:
        if self.pair is None:
            return str(self.end)
        left, right = self.pair
        return f"{left._inner()} {right._inner() if right.pair is None else right}"


Groups: TypeAlias = tuple[Group, ...]


def default_group(spec: Spec, first: int, end: int) -> Group:
    """Cores first, ..., end - 1 in the default order: inwards from the ends of the train, where the outer rank is 1.

    With the first core it merges from left to right, with the last core from right to left; with both, a TT merges its
    factors A and B and then multiplies them. Cores in the middle merge from left to right.
    """
    if isinstance(spec, TTSpec) and first == 0 and end == spec.order:
        return Group.of(default_group(spec, 0, spec.split), default_group(spec, spec.split, end))
    if end == spec.order and first > 0:
        return reduce(lambda right, core: Group.of(core, right), range(end - 2, first - 1, -1), Group.of(end - 1))
    return Group.of(*range(first, end))


def default_groups(spec: Spec, ends: Sequence[int]) -> Groups:
    """The groups that end before the cores `ends`, the last of which is the order, all in the default order."""
    return tuple(default_group(spec, first, end) for first, end in pairwise((0, *ends)))


def two_parts(groups: Groups) -> tuple[Groups, Groups]:
    """Two groups or more as a left and a right part whose numbers of cores differ least."""
    first, end = groups[0].first, groups[-1].end
    unevenness = [abs(2 * group.first - first - end) for group in groups[1:]]
    cut = 1 + unevenness.index(min(unevenness))
    return groups[:cut], groups[cut:]
