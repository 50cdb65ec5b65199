"""Which way to contract a compressed weight with its input: planned from costs, once per layer and batch bucket.

The groups of cores are found by exact search for a tensor train (search.py), by trying all for rows of a tensor-train
matrix; for x times a tensor-train matrix there are two, or one. Costs are operations, bytes and calls (cost.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import combinations
from math import prod

from torch import Tensor

from comera.kernels.tracing import constant_when_traced
from comera.ops.planner.cost import Cost, Machine, machine, product, work
from comera.ops.planner.search import ChainSearch, merging
from comera.ops.rows import cut
from comera.ops.sequential import Groups, Tree, leaves, simple_tree
from comera.tt.spec import Spec, TTMSpec, TTSpec

# The six-encoder step at 32 rows, where halves are planned to cost 1.2 to 1.4 times the best: 60 ms with halves, merged
# together, 68 with the best for each; at 8 rows, planned at 1.4 to 2, 57 and 59 (two cores of an AMD EPYC 7003).
SHARED = 2.0


@dataclass(frozen=True)
class Option:
    """One way to contract: groups of the chain of cores (as trees, chain.py), how they print, their cost.

    strategy: "halves" for two groups that meet at the middle bond (TT) or at any bond (TTM), "dense" for one group,
    "chain" for every core alone, "groups" for anything else.
    """

    strategy: str
    groups: Groups
    name: str
    cost: Cost

    @property
    def split(self) -> int:
        """Bond at which the first group ends; 0 where it is the only one."""
        return len(leaves(self.groups[0])) if len(self.groups) > 1 else 0


@dataclass(frozen=True)
class ContractionPlan:
    """The chosen way among those that were weighed; prints itself as a table.

    subject: what is contracted with what, in words. options: the best and those with a name, by preference at equal
    cost. price: the option whose groups end at the given bonds, where any list of groups is possible.
    """

    subject: str
    options: tuple[Option, ...]
    chosen: Option
    price: Callable[[Sequence[int]], Option] | None = field(default=None, repr=False, compare=False)

    @property
    def strategy(self) -> str:
        """Kind of the chosen way: "halves", "dense", "chain" or "groups"."""
        return self.chosen.strategy

    @property
    def groups(self) -> Groups:
        """Groups of the chosen way."""
        return self.chosen.groups

    @property
    def split(self) -> int:
        """Bond at which the first group of the chosen way ends; 0 where it is the only one."""
        return self.chosen.split

    @property
    def flops(self) -> int:
        """Floating-point operations of the chosen way, forward and backward."""
        return self.chosen.cost.flops

    @property
    def bytes(self) -> int:
        """Bytes that the chosen way reads and writes, forward and backward."""
        return self.chosen.cost.bytes

    @property
    def seconds(self) -> float:
        """Estimated time of the chosen way."""
        return self.chosen.cost.seconds

    def using(self, choice: str, split: int | None = None) -> ContractionPlan:
        """The same plan with another choice: a strategy (and split), or groups as they print: "(1 2)(3 4 5 6)".

        Raises ValueError when there is no such way.
        """
        for option in self.options:
            if choice in (option.strategy, option.name) and split in (None, option.split):
                return replace(self, chosen=option)
        if self.price is not None and split is None:
            cores = [core for tree in self.chosen.groups for core in leaves(tree)]
            groups = [[int(core) - 1 for core in group.split()] for group in re.findall(r"\(([\d ]+)\)", choice)]
            if [core for group in groups for core in group] == cores:
                return replace(self, chosen=self.price([group[-1] + 1 for group in groups]))
        known = ", ".join(f"{option.strategy} {option.name}" for option in self.options)
        wanted = choice if split is None else f"{choice} with split {split}"
        raise ValueError(f"expected one of the planned options {known}, or other groups of a TT's cores; got {wanted}")

    def __str__(self) -> str:
        width = max(len(option.name) for option in self.options)
        lines = [self.subject, f"  {'strategy':<9} {'cores':<{width}} {'MFLOP':>12}{'MB':>11}{'est. ms':>11}"]
        for option in self.options:
            cost, mark = option.cost, "→" if option == self.chosen else " "
            numbers = f" {cost.flops / 1e6:>12,.3f}{cost.bytes / 1e6:>11,.3f}{cost.seconds * 1e3:>11,.3f}"
            lines.append(f"{mark} {option.strategy:<9} {option.name:<{width}}{numbers}")
        return "\n".join(lines)


def batch_bucket(batch: int) -> int:
    """The batch size that plans are made for: 0, or the next power of two."""
    bucket = 1
    while bucket < batch:
        bucket *= 2
    return bucket if batch else 0


def plan_linear(
    spec: TTSpec,
    batch: int,
    itemsize: int = 4,
    *,
    device: str = "cpu",
    grad_x: bool = True,
    grad_cores: bool = True,
) -> ContractionPlan:
    """Plan of y = x W for x (batch, in_features): the best groups of cores, found by exact search.

    itemsize: bytes of a number of x. device: type of device, "cpu" or another (cost.py). grad_x, grad_cores: the
    gradients that the backward has to give; neither is planned as both, so that evaluation runs what training ran.
    Cached per batch bucket and everything else. Besides the best its options are

    halves  one group for the input cores and one for the output cores, A and B: (x A) B, in `two_sided`
    dense   one group: materialise W, then x W
    chain   every core a group: absorb one after the other
    """
    wanted = (grad_x, grad_cores) if grad_x or grad_cores else (True, True)
    return _plan_linear(spec, batch_bucket(batch), itemsize, device, *wanted)


def plan_projection(spec: TTMSpec, batch: int, itemsize: int = 4, *, device: str = "cpu") -> ContractionPlan:
    """Plan of x Eᵀ for x (batch, embedding_dim); cached per (spec, batch bucket, itemsize, device).

    halves  merge the cores left and right of a bond to L and R, contract x with R, then with L
    dense   materialise E, then x Eᵀ
    """
    return _plan_projection(spec, batch_bucket(batch), itemsize, device)


def plan_lookup(spec: TTMSpec, count: int, itemsize: int = 4, *, device: str = "cpu") -> ContractionPlan:
    """Plan of looking up `count` different rows; cached per (spec, bucket of the count, itemsize, device).

    halves  merge the cores left and right of a bond to L and R, gather and multiply the two blocks of each row
    chain   merge nothing: of every part of the chain only the rows that occur, from those of its parts
    dense   materialise the table and gather its rows

    and the best of all lists of groups, where it is none of these.
    """
    return _plan_lookup(spec, batch_bucket(min(count, spec.num_embeddings)), itemsize, device)


def choose_groups(
    spec: TTSpec, x_BI: Tensor, cores: Sequence[Tensor], plan: ContractionPlan | None = None, *, shared: bool = False
) -> tuple[str, Groups]:
    """(strategy, groups) of `plan` or, without one, of `plan_linear` for this x and the gradients wanted.

    shared: the halves are merged together with those of other chains (together.py), which spares their calls; they are
    chosen up to SHARED times the cost of the best.
    """
    if plan is not None:
        return plan.strategy, plan.groups
    grad_cores = any(core.requires_grad for core in cores)
    choice: tuple[str, Groups] = _choose_groups(
        spec, batch_bucket(x_BI.shape[0]), x_BI.element_size(), x_BI.device.type, x_BI.requires_grad, grad_cores, shared
    )
    return choice


def choose_rows(
    spec: TTMSpec, count: int, itemsize: int, plan: ContractionPlan | None = None, *, device: str = "cpu"
) -> Groups:
    """Groups of `plan` or, without one, of `plan_lookup` for `count` different rows."""
    if plan is not None:
        return plan.groups
    groups: Groups = _choose_rows(spec, batch_bucket(count), itemsize, device)
    return groups


def choose_projection(
    spec: TTMSpec, batch: int, itemsize: int, plan: ContractionPlan | None = None, *, device: str = "cpu"
) -> tuple[str, int]:
    """(strategy, split) of `plan` or, without one, of `plan_projection`."""
    if plan is not None:
        return plan.strategy, plan.split
    choice: tuple[str, int] = _choose_projection(spec, batch_bucket(batch), itemsize, device)
    return choice


def choose_strategy(
    spec: TTSpec, rows: int, itemsize: int, device: str, grad_x: bool, grad_cores: bool, *, merged: bool = False
) -> str:
    """The strategy of `plan_linear` for so many rows."""
    return _choose_groups(spec, batch_bucket(rows), itemsize, device, grad_x, grad_cores, merged)[0]  # type: ignore[no-any-return]


# arithmetic on a spec and a bucket: torch.compile has nothing to trace
@constant_when_traced
def _choose_groups(
    spec: TTSpec, bucket: int, itemsize: int, device: str, grad_x: bool, grad_cores: bool, shared: bool
) -> tuple[str, Groups]:
    plan = plan_linear(spec, bucket, itemsize, device=device, grad_x=grad_x, grad_cores=grad_cores)
    if shared and plan.using("low_rank").seconds <= SHARED * plan.seconds:
        plan = plan.using("low_rank")
    return plan.strategy, plan.groups


@constant_when_traced
def _choose_rows(spec: TTMSpec, bucket: int, itemsize: int, device: str) -> Groups:
    return plan_lookup(spec, bucket, itemsize, device=device).groups


@constant_when_traced
def _choose_projection(spec: TTMSpec, bucket: int, itemsize: int, device: str) -> tuple[str, int]:
    plan = plan_projection(spec, bucket, itemsize, device=device)
    return plan.strategy, plan.split


@lru_cache(maxsize=1024)
def _plan_linear(
    spec: TTSpec, batch: int, itemsize: int, device: str, grad_x: bool, grad_cores: bool
) -> ContractionPlan:
    search, order = ChainSearch(spec, batch, itemsize, machine(device), grad_x, grad_cores), spec.order

    def option(strategy: str, ends: Sequence[int], *, simple: bool = False) -> Option:
        groups, cost = search.price(ends, simple=simple)
        return Option(strategy, groups, "".join(_show(spec, tree) for tree in groups), cost)

    options = [
        option("low_rank", (spec.split, order), simple=True),
        option("dense", (order,)),
        option("chain", range(1, order + 1)),
    ]
    best = option("groups", search.best())
    if best.groups not in [named.groups for named in options]:
        options.append(best)
    return _cheapest(f"x ({batch} × {spec.in_features}) times {spec}", *options, price=partial(option, "groups"))


@lru_cache(maxsize=1024)
def _plan_projection(spec: TTMSpec, batch: int, itemsize: int, device: str) -> ContractionPlan:
    rows, cols, on = spec.num_embeddings, prod(spec.col_modes), machine(device)
    options = []
    for split in range(1, spec.order):
        rank, (_, cols_l), (rows_r, cols_r) = spec.ranks[split], *half_shapes(spec, split)
        rows_l = -(-rows // rows_r)
        # x with R, once more in the backward; then with L
        cost = product(on, batch * cols_l, cols_r, rank * rows_r, itemsize, passes=4)
        cost += product(on, rows_l, cols_l * rank, rows_r, itemsize, times=batch)
        options.append(_halves_option(spec, on, split, cost))
    dense = _dense_option(spec, on, product(on, batch, cols, rows, itemsize))
    return _cheapest(f"x ({batch} × {spec.embedding_dim}) times the transpose of {spec}", *options, dense)


@lru_cache(maxsize=1024)
def _plan_lookup(spec: TTMSpec, count: int, itemsize: int, device: str) -> ContractionPlan:
    on, order = machine(device), spec.order
    gathering = work(on, itemsize, moved=6 * count * prod(spec.col_modes) * itemsize, calls=3)

    def option(ends: Sequence[int]) -> Option:
        groups = tuple(simple_tree(spec, a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True))
        if len(groups) == 1:
            return _dense_option(spec, on, gathering)
        strategy = {order: "chain", 2: "low_rank"}.get(len(groups), "groups")
        cost = _rows_cost(spec, on, groups, count, itemsize)
        return Option(strategy, groups, "".join(_show(spec, tree) for tree in groups), cost)

    ways = [option((*ends, order)) for size in range(order) for ends in combinations(range(1, order), size)]
    named = [way for strategy in ("low_rank", "dense", "chain") for way in ways if way.strategy == strategy]
    best = min(ways, key=lambda way: way.cost.seconds)
    return _cheapest(f"{count} rows of {spec}", *named, *([] if best in named else [best]), price=option)


def _rows_cost(spec: TTMSpec, on: Machine, groups: Groups, count: int, itemsize: int) -> Cost:
    """Merging every group, and from part to part of the chain the products of as many rows as can occur (rows.py)."""
    if len(groups) == 1:
        return merging(spec, on, groups[0])
    k = cut(groups)
    first, middle, last = leaves(groups[0])[0], leaves(groups[k])[0], leaves(groups[-1])[-1] + 1
    rank, left, right = spec.ranks[middle], slice(first, middle), slice(middle, last)
    x, y = spec.ranks[first] * prod(spec.col_modes[left]), prod(spec.col_modes[right]) * spec.ranks[last]
    numbers, flops = rank * (x + y) + x * y, 3 * 2 * x * rank * y
    # finding the different ids, gathering two blocks (twice), adding up their gradients: some 30 small operations
    cost = work(on, itemsize, count * flops, 4 * count * numbers * itemsize, calls=30)
    for part, trees in ((left, groups[:k]), (right, groups[k:])):
        cost += _rows_cost(spec, on, trees, min(count, prod(spec.row_modes[part])), itemsize)
    return cost


def half_shapes(spec: TTMSpec, split: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) that the cores left and right of bond `split` stand for."""
    rows, cols = spec.row_modes, spec.col_modes
    return (prod(rows[:split]), prod(cols[:split])), (prod(rows[split:]), prod(cols[split:]))


def _halves_option(spec: TTMSpec, on: Machine, split: int, cost: Cost) -> Option:
    """The cores of a TTM left and right of a bond merged to L and R, besides `cost`."""
    groups = simple_tree(spec, 0, split), simple_tree(spec, split, spec.order)
    for tree in groups:
        cost += merging(spec, on, tree)
    return Option("low_rank", groups, "".join(_show(spec, tree) for tree in groups), cost)


def _dense_option(spec: TTMSpec, on: Machine, cost: Cost) -> Option:
    """All cores of a TTM merged and the rows of the table brought together, one copy forward, one backward."""
    tree = simple_tree(spec, 0, spec.order)
    cost += merging(spec, on, tree) + work(on, 4, moved=4 * prod(spec.sizes) * 4)
    return Option("dense", (tree,), _show(spec, tree), cost)


def _show(spec: Spec, tree: Tree) -> str:
    """A group as it prints: cores counted from 1, with inner brackets where they are not merged in the simple order."""
    cores = leaves(tree)
    if tree == simple_tree(spec, cores[0], cores[-1] + 1):
        return f"({' '.join(str(core + 1) for core in cores)})"
    return f"({' '.join(str(part + 1) if isinstance(part, int) else _show(spec, part) for part in tree)})"


def _cheapest(
    subject: str, *options: Option, price: Callable[[Sequence[int]], Option] | None = None
) -> ContractionPlan:
    return ContractionPlan(subject, options, min(options, key=lambda option: option.cost.seconds), price)
