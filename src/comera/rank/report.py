"""What pruning or rounding did to the ranks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class RankRow:
    """One tensor train: its qualified name and its inner ranks before and after.

    error: relative Frobenius error that rounding made in the weight, padding included, in float64 before the cast to
    the train's dtype; None after pruning, which leaves the function as it is.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    error: float | None = None


@dataclass(frozen=True)
class RankReport:
    """What `prune_` or `round_` did. Printing it gives a table of the tensor trains that changed.

    before, after: parameters stored in all tensor trains, cores and gates. rows: one per tensor train, changed or not.
    target: the size that was asked for, in parameters; None after `prune_`.
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

    def __str__(self) -> str:
        goal = "" if self.target is None else f", target {self.target:,}"
        rows = [row for row in self.rows if row.before != row.after]
        if not rows:
            return f"{self.action} nothing: {len(self.rows)} tensor trains, {self.before:,} parameters{goal}"
        cells = [(row.name, _dashed(row.before), _dashed(row.after)) for row in rows]
        name, before, after = (max(map(len, column)) for column in zip(*cells, strict=True))
        errors = ["" if row.error is None else f"  error {row.error:.2%}" for row in rows]
        lines = [
            f"{cell[0]:<{name}}  {cell[1]:<{before}} -> {cell[2]:<{after}}{error}".rstrip()
            for cell, error in zip(cells, errors, strict=True)
        ]
        kept = f"{self.before:,} -> {self.after:,} parameters ({self.after / self.before:.1%}{goal})"
        return "\n".join([*lines, f"{len(rows)} of {len(self.rows)} tensor trains {self.action}: {kept}"])


def _dashed(ranks: Sequence[int]) -> str:
    return "-".join(map(str, ranks))
