"""What pruning or rounding did to the ranks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from comera.tables import Report, Table


@dataclass(frozen=True)
class RankRow:
    """One tensor train: its qualified name and its inner ranks before and after.

    error: relative Frobenius error that rounding made in the weight, padding included, in float64 before the cast to
    the train's dtype; None after pruning, which leaves the function as it is.

    See `prune_`.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    error: float | None = None


@dataclass(frozen=True, repr=False)
class RankReport(Report):
    """What `prune_` or `round_` did. Printing it gives a table of the tensor trains that changed;
    `to_frame` gives all of them.

    before, after: parameters stored in all tensor trains, cores and gates. rows: one per tensor train, changed or not.
    target: the size that was asked for, in parameters; None after `prune_`.

    See `prune_` and `round_`.
    """

    action: Literal["pruned", "rounded"]
    before: int
    after: int
    rows: tuple[RankRow, ...]
    target: int | None = None

    @property
    def changed(self) -> bool:
        """Whether any rank fell."""
        return any(row.before != row.after for row in self.rows)

    @property
    def error(self) -> float:
        """Largest relative error of any tensor train; 0 after pruning."""
        return max((row.error or 0.0 for row in self.rows), default=0.0)

    def following(self, first: RankReport) -> RankReport:
        """This report and the one on what was done just before it, as one."""
        rows = (replace(row, before=earlier.before) for row, earlier in zip(self.rows, first.rows, strict=True))
        return replace(self, before=first.before, rows=tuple(rows))

    @property
    def headline(self) -> str:
        goal = "" if self.target is None else f", target {self.target:,}"
        changed = sum(row.before != row.after for row in self.rows)
        if not changed:
            return f"{self.action} nothing: {len(self.rows)} tensor trains, {self.before:,} parameters{goal}"
        kept = f"{self.before:,} -> {self.after:,} parameters ({self.after / self.before:.1%}{goal})"
        return f"{changed} of {len(self.rows)} tensor trains {self.action}: {kept}"

    def records(self) -> list[dict[str, Any]]:
        return [
            {"tensor train": row.name, "before": _dashed(row.before), "after": _dashed(row.after), "error": row.error}
            for row in self.rows
        ]

    def table(self) -> Table:
        changed = [row for row in self.rows if row.before != row.after]
        rows = [(row.name, _dashed(row.before), _dashed(row.after)) for row in changed]
        if self.action == "pruned":
            return Table(("tensor train", "ranks before", "after"), "lll", tuple(rows))
        errors = ["" if row.error is None else f"{row.error:.2%}" for row in changed]
        with_errors = tuple((*row, error) for row, error in zip(rows, errors, strict=True))
        return Table(("tensor train", "ranks before", "after", "error"), "lllr", with_errors)


def _dashed(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks))
