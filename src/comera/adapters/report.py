"""What `adapt_` and `load_adapters_` did to each layer, as a table."""

from dataclasses import asdict, dataclass
from typing import Any

from comera.tables import Report, Table
from comera.tt.format import spec_size
from comera.tt.spec import Spec


@dataclass(frozen=True)
class AdapterRow:
    """A layer that the targets match: its type, and the modes and ranks of its adapter; or why it has none.

    See `adapt_`.
    """

    name: str
    layer: str
    spec: Spec | None
    note: str = ""

    @property
    def parameters(self) -> int:
        """Cores and gates of the adapter."""
        return spec_size(self.spec) if self.spec else 0


@dataclass(frozen=True, repr=False)
class AdapterReport(Report):
    """The layers that have an adapter now, and those that were matched and have none.

    rows: a layer each. trained, total: parameters that are trained, those of `also_train` included, and all.

    See `adapt_`.
    """

    rows: tuple[AdapterRow, ...]
    trained: int
    total: int

    @property
    def headline(self) -> str:
        adapted = sum(row.spec is not None for row in self.rows)
        share = f" ({self.trained / self.total:.2%})" if self.total else ""
        layers = f"{adapted} layer{'s' * (adapted != 1)} adapted"
        return f"{layers}, {self.trained:,} of {self.total:,} parameters trained{share}"

    def records(self) -> list[dict[str, Any]]:
        return [
            {**asdict(row), "spec": str(row.spec) if row.spec else None, "parameters": row.parameters}
            for row in self.rows
        ]

    def table(self) -> Table:
        rows = tuple(
            (row.name, row.layer, str(row.spec or ""), f"{row.parameters:,}" if row.spec else "-", row.note)
            for row in self.rows
        )
        return Table(("layer", "is", "adapter", "parameters", "note"), "lllrl", rows)
