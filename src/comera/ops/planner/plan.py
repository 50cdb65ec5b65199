"""Contraction plans: made from estimated costs, once per weight and batch bucket, and kept.

`plan_linear`, `plan_projection` and `plan_lookup` give a plan to print or to change; the operations ask `choose`, which
torch.compile evaluates while it traces. docs/method.md §4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from comera.kernels.tracing import constant_when_traced
from comera.ops.planner.groups import Groups
from comera.ops.planner.problem import (
    LinearProblem,
    LookupProblem,
    Option,
    Problem,
    ProjectionProblem,
    Strategy,
    batch_bucket,
)
from comera.tt.spec import Spec, TTMSpec, TTSpec

# The six-encoder step at 32 rows, where low-rank factors are planned to cost 1.2 to 1.4 times the cheapest groups:
# 60 ms with factors from a batched merge, 68 with the cheapest groups of every layer. At 8 rows, planned to cost 1.4
# to 2 times as much: 57 and 59 (two cores of an AMD EPYC 7003).
MERGED_ADVANTAGE = 2.0


@dataclass(frozen=True)
class ContractionPlan:
    """The chosen way to contract among the options that were compared; prints itself as a table.

    options: the cheapest one and those with a name, the preferred one first among equals.
    """

    problem: Problem
    options: tuple[Option, ...]
    chosen: Option

    @property
    def strategy(self) -> Strategy:
        """Strategy of the chosen option."""
        return self.chosen.strategy

    @property
    def groups(self) -> Groups:
        """Groups of the chosen option."""
        return self.chosen.groups

    @property
    def flops(self) -> int:
        """Floating-point operations of the chosen option, forward and backward."""
        return self.chosen.cost.flops

    @property
    def bytes(self) -> int:
        """Bytes that the chosen option reads and writes, forward and backward."""
        return self.chosen.cost.bytes

    @property
    def seconds(self) -> float:
        """Estimated time of the chosen option."""
        return self.chosen.cost.seconds

    def using(self, choice: Strategy | Sequence[int]) -> ContractionPlan:
        """The same plan with another choice: the cheapest option of a strategy, or with groups that end as given.

        choice: a strategy, or for each group the number of cores up to its end: (2, 6) means groups of cores 1 to 2
        and 3 to 6. Raises ValueError where there is no such option.
        """
        if isinstance(choice, str):
            found = [option for option in self.options if option.strategy == choice]
        else:
            ends = tuple(choice)
            found = [option for option in self.options if option.ends == ends]
            is_partition = ends[-1:] == (self.problem.spec.order,) and [0, *ends] == sorted({0, *ends})
            if is_partition and (priced := self.problem.option(ends)):
                found.append(priced)
        if not found:
            known = ", ".join(f"{option.strategy} {option.ends}" for option in self.options)
            raise ValueError(
                f"expected a strategy or the ends of groups that {self.problem} supports, such as {known}; "
                f"got {choice!r}"
            )
        return replace(self, chosen=min(found, key=lambda option: option.cost.seconds))

    def __str__(self) -> str:
        width = max(len(option.name) for option in self.options)
        lines = [str(self.problem), f"  {'strategy':<10} {'cores':<{width}} {'MFLOP':>12}{'MB':>11}{'est. ms':>11}"]
        for option in self.options:
            cost, mark = option.cost, "→" if option == self.chosen else " "
            columns = f" {cost.flops / 1e6:>12,.3f}{cost.bytes / 1e6:>11,.3f}{cost.seconds * 1e3:>11,.3f}"
            lines.append(f"{mark} {option.strategy:<10} {option.name:<{width}}{columns}")
        return "\n".join(lines)


@lru_cache(maxsize=4096)
def make_plan(problem: Problem) -> ContractionPlan:
    """The plan of a problem, made once: the cheapest of its options."""
    options = problem.options()
    return ContractionPlan(problem, tuple(options), min(options, key=lambda option: option.cost.seconds))


def plan_linear(
    spec: TTSpec, batch: int, itemsize: int = 4, *, device: str = "cpu", grad_x: bool = True, grad_cores: bool = True
) -> ContractionPlan:
    """The plan of y = x W for x (batch, in_features); arguments and options as in `LinearProblem`."""
    return make_plan(LinearProblem(spec, batch, itemsize, device, grad_x, grad_cores))


def plan_projection(spec: TTMSpec, batch: int, itemsize: int = 4, *, device: str = "cpu") -> ContractionPlan:
    """The plan of y = x Eᵀ for x (batch, embedding_dim); arguments and options as in `ProjectionProblem`."""
    return make_plan(ProjectionProblem(spec, batch, itemsize, device))


def plan_lookup(spec: TTMSpec, count: int, itemsize: int = 4, *, device: str = "cpu") -> ContractionPlan:
    """The plan of looking up `count` different rows; arguments and options as in `LookupProblem`."""
    return make_plan(LookupProblem(spec, count, itemsize, device))


def choose(
    kind: type[Problem],
    spec: Spec,
    rows: int,
    itemsize: int,
    device: str = "cpu",
    *gradients: bool,
    plan: ContractionPlan | None = None,
    merged: bool = False,
) -> tuple[Strategy, Groups]:
    """Strategy and groups of `plan`, by default of the plan for a problem of this kind; arguments as it takes them.

    merged: the factors come from a batched merge, whose calls serve all layers; low_rank is then chosen up to
    MERGED_ADVANTAGE times the cost of the cheapest groups.
    """
    if plan is not None:
        return plan.strategy, plan.groups
    choice: tuple[Strategy, Groups] = _choose(merged, kind, spec, batch_bucket(rows), itemsize, device, *gradients)
    return choice


# arithmetic on a spec and a bucket: torch.compile has nothing to trace
@constant_when_traced
def _choose(*problem: Any) -> tuple[Strategy, Groups]:
    return _chosen(*problem)


@lru_cache(maxsize=4096)
def _chosen(merged: bool, kind: type[Problem], spec: Spec, *settings: object) -> tuple[Strategy, Groups]:
    plan = make_plan(kind(spec, *settings))  # type: ignore[arg-type]
    chosen = plan.chosen
    if merged:
        low_rank = next(option for option in plan.options if option.strategy == "low_rank")
        if low_rank.cost.seconds <= MERGED_ADVANTAGE * chosen.cost.seconds:
            chosen = low_rank
    return chosen.strategy, chosen.groups
