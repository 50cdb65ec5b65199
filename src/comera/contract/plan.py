"""Which way to contract a compressed weight with its input: planned from costs, once per layer and batch bucket.

A way of contracting is a list of matrix products. In training every product (m × k) @ (k × n) happens three times
with the same three operands, once forward and twice backward, so it costs itself thrice; merging the small cores
counts like any other product. One product takes

    time = CALL_SECONDS + flops / FLOPS_PER_SECOND + bytes / BYTES_PER_SECOND

and the bytes make skinny products slow, as they are. The constants come from single-threaded float32 products on one
core of an AMD EPYC 7003 (AVX2, MKL), fresh output buffers included; GFLOP/s measured and by the formula:

    m × k × n               measured   formula        m × k × n               measured   formula
    1024 × 768 × 768            85        89           30 × 768 × 1024            56        56
    1024 × 30 × 768             58        56           12 × 768 × 1024            40        36
    1024 × 30 × 3072            55        57           30 × 768 × 128             68        50

Only ratios decide: about 10 operations per byte moved and 0.5 million operations per call. An accelerator does more
operations per byte and per call; the constants were not measured on one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from comera.tt.spec import Spec, TTMSpec, TTSpec

FLOPS_PER_SECOND = 95e9
BYTES_PER_SECOND = 10e9
CALL_SECONDS = 5e-6


@dataclass(frozen=True)
class Cost:
    """Work of some products, forward and backward: floating-point operations, bytes moved, calls of an operation."""

    flops: int = 0
    bytes: int = 0
    calls: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.calls + other.calls)

    @property
    def seconds(self) -> float:
        """Estimated time (formula at the top of the file)."""
        return self.calls * CALL_SECONDS + self.flops / FLOPS_PER_SECOND + self.bytes / BYTES_PER_SECOND


@dataclass(frozen=True)
class Option:
    """One way to contract: its name, the bond at which the chain is cut into halves, its cost."""

    strategy: str
    split: int
    cost: Cost


@dataclass(frozen=True)
class ContractionPlan:
    """The chosen way among all that were weighed; prints itself as a table.

    subject: what is contracted with what, in words. options: in order of preference at equal cost.
    """

    subject: str
    options: tuple[Option, ...]
    chosen: Option

    @property
    def strategy(self) -> str:
        """Name of the chosen way: "halves", "chain" or "dense"."""
        return self.chosen.strategy

    @property
    def split(self) -> int:
        """Bond at which the chosen way cuts the chain into a left and a right half."""
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

    def using(self, strategy: str, split: int | None = None) -> ContractionPlan:
        """The same plan with another choice. Raises ValueError when it is not among the options."""
        for option in self.options:
            if option.strategy == strategy and split in (None, option.split):
                return replace(self, chosen=option)
        known = ", ".join(f"{o.strategy} (split {o.split})" for o in self.options)
        wanted = strategy if split is None else f"{strategy} (split {split})"
        raise ValueError(f"expected one of the planned options {known}, got {wanted}")

    def __str__(self) -> str:
        lines = [self.subject, f"  {'strategy':<10}{'split':>5}{'MFLOP':>13}{'MB':>11}{'est. ms':>11}"]
        for o in self.options:
            numbers = f"{o.cost.flops / 1e6:>13,.3f}{o.cost.bytes / 1e6:>11,.3f}{o.cost.seconds * 1e3:>11,.3f}"
            lines.append(f"{'→' if o == self.chosen else ' '} {o.strategy:<10}{o.split:>5}{numbers}")
        return "\n".join(lines)


def batch_bucket(batch: int) -> int:
    """The batch size that plans are made for: 0, or the next power of two."""
    bucket = 1
    while bucket < batch:
        bucket *= 2
    return bucket if batch else 0


def plan_linear(spec: TTSpec, batch: int, itemsize: int = 4) -> ContractionPlan:
    """Plan of y = x W for x (batch, in_features); cached per (spec, batch bucket, itemsize).

    halves  merge the input cores to A and the output cores to B, then (x A) B
    chain   absorb one core after the other into the batch
    dense   materialise W = A B, then x W
    """
    return _plan_linear(spec, batch_bucket(batch), itemsize)


def plan_projection(spec: TTMSpec, batch: int, itemsize: int = 4) -> ContractionPlan:
    """Plan of x Eᵀ for x (batch, embedding_dim); cached per (spec, batch bucket, itemsize).

    halves  merge the cores left and right of a bond to L and R, contract x with R, then with L
    dense   materialise E, then x Eᵀ
    """
    return _plan_projection(spec, batch_bucket(batch), itemsize)


def plan_lookup(spec: TTMSpec, count: int, itemsize: int = 4) -> ContractionPlan:
    """Plan of looking up `count` different rows; cached per (spec, bucket of the count, itemsize).

    halves  merge the cores left and right of a bond to L and R, gather and multiply the two blocks of each row
    dense   materialise the table and gather its rows
    """
    return _plan_lookup(spec, batch_bucket(min(count, spec.num_embeddings)), itemsize)


def choose(kind: str, spec: Spec, batch: int, itemsize: int, plan: ContractionPlan | None = None) -> tuple[str, int]:
    """(strategy, split) of `plan` or, without one, of plan_linear, plan_projection or plan_lookup (`kind`)."""
    if plan is not None:
        return plan.strategy, plan.split
    choice: tuple[str, int] = _choose(kind, spec, batch_bucket(batch), itemsize)
    return choice


# arithmetic on a spec and a bucket: torch.compile has nothing to trace
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _choose(kind: str, spec: Spec, bucket: int, itemsize: int) -> tuple[str, int]:
    plan = _PLANNERS[kind](spec, bucket, itemsize)
    return plan.strategy, plan.split


@lru_cache(maxsize=1024)
def _plan_linear(spec: TTSpec, batch: int, itemsize: int) -> ContractionPlan:
    rank, split = spec.ranks[spec.split], spec.split
    rows, cols = prod(spec.in_modes), prod(spec.out_modes)
    merging = _merging(spec, 0, split) + _merging(spec, split, spec.order)
    halves = merging + _product(rank, rows, batch, itemsize) + _product(batch, rank, cols, itemsize)
    dense = merging + _product(rows, rank, cols, itemsize) + _product(batch, rows, cols, itemsize)
    chain, left, done = Cost(), rows, 1
    for k, (mode, r, s) in enumerate(zip(spec.modes, spec.ranks[:-1], spec.ranks[1:], strict=True)):
        if k < split:  # (s × r·mode) @ (r·mode × modes still to come), for each sample
            left //= mode
            chain += _product(s, r * mode, left, itemsize, times=batch)
        else:  # (batch · modes already there × r) @ (r × mode·s)
            chain += _product(batch * done, r, mode * s, itemsize)
            done *= mode
    return _cheapest(
        f"x ({batch} × {spec.in_features}) times {spec}",
        Option("halves", split, halves),
        Option("dense", split, dense),
        Option("chain", split, chain),
    )


@lru_cache(maxsize=1024)
def _plan_projection(spec: TTMSpec, batch: int, itemsize: int) -> ContractionPlan:
    rows, cols = spec.num_embeddings, prod(spec.col_modes)
    options = []
    for split in range(1, spec.order):
        rank, (_, cols_l), (rows_r, cols_r) = spec.ranks[split], *half_shapes(spec, split)
        rows_l = -(-rows // rows_r)
        cost = _merging(spec, 0, split) + _merging(spec, split, spec.order)
        # x with R, once more in the backward; then with L
        cost += _product(batch * cols_l, cols_r, rank * rows_r, itemsize, passes=4)
        cost += _product(rows_l, cols_l * rank, rows_r, itemsize, times=batch)
        options.append(Option("halves", split, cost))
    dense = _materialising(spec) + _product(batch, cols, rows, itemsize)
    return _cheapest(
        f"x ({batch} × {spec.embedding_dim}) times the transpose of {spec}", *options, Option("dense", 0, dense)
    )


@lru_cache(maxsize=1024)
def _plan_lookup(spec: TTMSpec, count: int, itemsize: int) -> ContractionPlan:
    options = []
    for split in range(1, spec.order):
        rank, (_, cols_l), (_, cols_r) = spec.ranks[split], *half_shapes(spec, split)
        cost = _merging(spec, 0, split) + _merging(spec, split, spec.order)
        cost += _product(cols_l, rank, cols_r, itemsize, times=count)
        # finding the different ids, gathering two blocks (twice), adding up their gradients: some 30 small operations
        cost += Cost(0, 6 * count * rank * (cols_l + cols_r) * itemsize, 30)
        options.append(Option("halves", split, cost))
    dense = _materialising(spec) + Cost(0, 6 * count * prod(spec.col_modes) * itemsize, 3)
    return _cheapest(f"{count} rows of {spec}", *options, Option("dense", 0, dense))


def half_shapes(spec: TTMSpec, split: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(rows, columns) that the cores left and right of bond `split` stand for."""
    rows, cols = spec.row_modes, spec.col_modes
    return (prod(rows[:split]), prod(cols[:split])), (prod(rows[split:]), prod(cols[split:]))


def _cheapest(subject: str, *options: Option) -> ContractionPlan:
    return ContractionPlan(subject, options, min(options, key=lambda option: option.cost.seconds))


def _product(m: int, k: int, n: int, itemsize: int, *, times: int = 1, passes: int = 3) -> Cost:
    """`times` products (m × k) @ (k × n) in one call, forward and twice backward."""
    numbers = m * k + k * n + m * n
    return Cost(passes * times * 2 * m * k * n, passes * times * numbers * itemsize, passes)


def _merging(spec: Spec, first: int, last: int) -> Cost:
    """Merging cores first..last-1 from the end of the chain that they touch, in float32."""
    sizes, ranks = spec.sizes[first:last], spec.ranks[first : last + 1]
    if first:  # from the right: mirror the chain
        sizes, ranks = sizes[::-1], ranks[::-1]
    cost, merged = Cost(), sizes[0]
    for k in range(1, len(sizes)):
        cost += _product(merged, ranks[k], sizes[k] * ranks[k + 1], 4)
        merged *= sizes[k]
    return cost


def _materialising(spec: TTMSpec) -> Cost:
    """All cores merged, and the table with its rows brought together: one copy forward, one backward."""
    return _merging(spec, 0, spec.order) + Cost(0, 4 * prod(spec.sizes) * 4, 0)


_PLANNERS: dict[str, Callable[..., ContractionPlan]] = {
    "linear": plan_linear,
    "projection": plan_projection,
    "lookup": plan_lookup,
}
