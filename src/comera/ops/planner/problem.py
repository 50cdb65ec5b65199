"""Problems to plan: one class for each kind of product, with its options and their costs.

The kinds are

    LinearProblem      y = x W       W a tensor train
    ProjectionProblem  y = x Eᵀ      E a tensor-train matrix
    LookupProblem      rows of E     E a tensor-train matrix
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Literal

from comera.ops.planner.cost import Cost, Machine, machine, product, work
from comera.ops.planner.groups import Groups, default_groups, two_parts
from comera.ops.planner.search import GroupSearch, merging
from comera.tt.spec import Spec, TTMSpec, TTSpec

Strategy = Literal["low_rank", "two_parts", "dense", "sequential", "groups"]


@dataclass(frozen=True)
class Option:
    """One way to contract: groups of cores and their cost.

    strategy: "low_rank" for factors A and B of a TT, "two_parts" for the left and right part L and R of a TTM, "dense"
    for one group of all cores, "sequential" for every core a group of its own, "groups" for anything else.
    """

    strategy: Strategy
    groups: Groups
    cost: Cost

    @property
    def ends(self) -> tuple[int, ...]:
        """Where each group ends: the number of cores up to there."""
        return tuple(group.end for group in self.groups)

    @property
    def name(self) -> str:
        """The groups as they print: "(1 2)(3 4)"."""
        return "".join(map(str, self.groups))


def batch_bucket(batch: int) -> int:
    """The batch size that plans are made for: 0, or the next power of two."""
    bucket = 1
    while bucket < batch:
        bucket *= 2
    return bucket if batch else 0


@dataclass(frozen=True)
class Problem(ABC):
    """What a plan depends on.

    spec: the compressed weight. batch: rows of x, or different ids of a lookup; rounded up to its bucket.
    itemsize: bytes per element of x. device: type of device, as `torch.device.type` names it.
    """

    spec: Spec
    batch: int
    itemsize: int = 4
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", batch_bucket(self.batch))

    @property
    def on(self) -> Machine:
        """Speed of the device."""
        return machine(self.device)

    @abstractmethod
    def options(self) -> list[Option]:
        """The options to compare, the preferred one first among equals."""

    @abstractmethod
    def option(self, ends: Sequence[int]) -> Option | None:
        """The option whose groups end there; None where this kind of product supports no such groups."""

    def _dense(self, cost: Cost) -> Option:
        """The table of a TTM, merged and its rows put in order with one copy forward and one backward, then `cost`."""
        groups = default_groups(self.spec, (self.spec.order,))
        copies = work(self.on, 4, moved=4 * prod(self.spec.sizes) * 4)
        return Option("dense", groups, cost + (merging(self.spec, self.on, groups[0]) + copies))


@dataclass(frozen=True)
class LinearProblem(Problem):
    """y = x W for x (batch, in_features): the cheapest groups of cores, found by exact search.

    grad_x, grad_cores: gradients that the backward computes. Neither counts as both, so that evaluation runs what
    training ran. Besides the cheapest groups the options are

    low_rank    one group for the input cores and one for the output cores: (x A) B
    dense       one group: materialize W, then x W
    sequential  every core a group: absorb one after the other
    """

    spec: TTSpec
    grad_x: bool = True
    grad_cores: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.grad_x or self.grad_cores):
            object.__setattr__(self, "grad_x", True)
            object.__setattr__(self, "grad_cores", True)

    def __str__(self) -> str:
        return f"x ({self.batch} × {self.spec.in_features}) times {self.spec}"

    @cached_property
    def _search(self) -> GroupSearch:
        return GroupSearch(self.spec, self.batch, self.itemsize, self.on, self.grad_x, self.grad_cores)

    def options(self) -> list[Option]:
        order, price = self.spec.order, self._search.price
        options = [
            Option("low_rank", *price((self.spec.split, order), default_order=True)),
            Option("dense", *price((order,))),
            Option("sequential", *price(range(1, order + 1))),
        ]
        best = self.option(self._search.best())
        return options if best.groups in [option.groups for option in options] else [*options, best]

    def option(self, ends: Sequence[int]) -> Option:
        return Option("groups", *self._search.price(ends))


@dataclass(frozen=True)
class ProjectionProblem(Problem):
    """y = x Eᵀ for x (batch, embedding_dim).

    two_parts  merge a left and a right part of the cores to L and R; contract x with R, then with L
    dense      materialize E, then x Eᵀ
    """

    spec: TTMSpec

    def __str__(self) -> str:
        return f"x ({self.batch} × {self.spec.embedding_dim}) times the transpose of {self.spec}"

    def options(self) -> list[Option]:
        order = self.spec.order
        return [*(self._two_parts(split) for split in range(1, order)), self._materialized()]

    def option(self, ends: Sequence[int]) -> Option | None:
        if len(ends) > 2:
            return None
        return self._two_parts(ends[0]) if len(ends) == 2 else self._materialized()

    def _materialized(self) -> Option:
        rows, cols = self.spec.num_embeddings, prod(self.spec.col_modes)
        return self._dense(product(self.on, self.batch, cols, rows, self.itemsize))

    def _two_parts(self, split: int) -> Option:
        spec, on, batch = self.spec, self.on, self.batch
        rows_r = prod(spec.row_modes[split:])
        rows_l = -(-spec.num_embeddings // rows_r)
        cols_l, cols_r, rank = prod(spec.col_modes[:split]), prod(spec.col_modes[split:]), spec.ranks[split]
        # x with R, once more in the backward; then with L
        cost = product(on, batch * cols_l, cols_r, rank * rows_r, self.itemsize, passes=4)
        if cols_l == rows_r == 1:  # a low rank
            cost += product(on, batch, rank, rows_l, self.itemsize)
        else:
            cost += product(on, rows_l, cols_l * rank, rows_r, self.itemsize, times=batch)
        groups = default_groups(spec, (split, spec.order))
        for group in groups:
            cost += merging(spec, on, group)
        return Option("two_parts", groups, cost)


@dataclass(frozen=True)
class LookupProblem(Problem):
    """Rows of E for `batch` different ids; the cheapest of all partitions into groups.

    two_parts   merge a left and a right part of the cores to L and R, gather and multiply the two blocks of each row
    sequential  merge nothing: of every part of the cores make only the rows that occur, from the rows of its own parts
    dense       materialize the table and gather its rows
    """

    spec: TTMSpec

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", min(self.batch, self.spec.num_embeddings))
        super().__post_init__()

    def __str__(self) -> str:
        return f"{self.batch} rows of {self.spec}"

    def options(self) -> list[Option]:
        order = self.spec.order
        every = [self.option((*ends, order)) for size in range(order) for ends in combinations(range(1, order), size)]
        kinds: tuple[Strategy, ...] = "two_parts", "dense", "sequential"
        named = [option for strategy in kinds for option in every if option.strategy == strategy]
        best = min(every, key=lambda option: option.cost.seconds)
        return named if best in named else [*named, best]

    def option(self, ends: Sequence[int]) -> Option:
        spec, groups = self.spec, default_groups(self.spec, ends)
        if len(groups) == 1:
            moved = 6 * self.batch * prod(spec.col_modes) * self.itemsize
            return self._dense(work(self.on, self.itemsize, moved=moved, calls=3))
        by_count: dict[int, Strategy] = {spec.order: "sequential", 2: "two_parts"}
        return Option(by_count.get(len(groups), "groups"), groups, self._rows(groups, self.batch))

    def _rows(self, groups: Groups, count: int) -> Cost:
        """Cost of merging every group, and of the products for all rows of a part that can occur."""
        spec, on, itemsize = self.spec, self.on, self.itemsize
        if len(groups) == 1:
            return merging(spec, on, groups[0])
        parts = two_parts(groups)
        (first, middle), (_, last) = ((part[0].first, part[-1].end) for part in parts)
        x = spec.ranks[first] * prod(spec.col_modes[first:middle])
        y = prod(spec.col_modes[middle:last]) * spec.ranks[last]
        rank = spec.ranks[middle]
        rows_r = prod(spec.row_modes[middle:last])
        gathered = rank * (x + y) if rows_r > 1 else rank * x
        elements, flops = gathered + x * y, 3 * 2 * x * rank * y
        # finding the different ids, gathering two blocks (twice), adding up their gradients: some 30 small operations
        cost = work(on, itemsize, count * flops, 4 * count * elements * itemsize, calls=30)
        for part in parts:
            cost += self._rows(part, min(count, prod(spec.row_modes[part[0].first : part[-1].end])))
        return cost
