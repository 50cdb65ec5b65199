"""Tables that print themselves as text, Markdown and HTML, and the reports that calls return, which are tables."""

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

from comera.extras import installed, require

WIDTH = 100  # columns of a terminal that every result fits


@dataclass(frozen=True)
class Table:
    """Rows of text under a header. align: one letter per column, l or r. total: the last row is the sum."""

    header: tuple[str, ...]
    align: str
    rows: tuple[tuple[str, ...], ...]
    total: bool = False

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.header) == len(self.align) for row in self.rows)

    def text(self) -> str:
        """Aligned columns for a terminal."""
        head, *body = self._padded()
        rule = ["─" * len(cell) for cell in head]
        lines = [head, rule, *body[:-1], rule, body[-1]] if self.total and body else [head, rule, *body]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def fitted(self, width: int = WIDTH) -> str:
        """As text of at most `width` columns: as it is, else transposed, else with long cells that continue below.

        The last of them needs rich.
        """
        for table in (self, self.transposed()):
            text = table.text()
            if max(map(len, text.splitlines())) <= width:
                return text
        return self.terminal(width)

    def markdown(self) -> str:
        """A Markdown table with an aligned source."""
        head, *body = self._padded(bar="\\|")
        rule = [
            f"{'-' * (len(cell) - 1)}:" if side == "r" else "-" * len(cell)
            for cell, side in zip(head, self.align, strict=True)
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))

    def transposed(self) -> "Table":
        """With a row for each column. The cells of the first column become the header."""
        header, *rows = zip(self.header, *self.rows, strict=True)
        return Table(header, "l" + "r" * len(self.rows), tuple(rows))

    def html(self, links: Mapping[str, str] | None = None) -> str:
        """A table element in a box that scrolls on narrow pages. links: addresses, by the text of a header cell."""

        def link(cell: str) -> str:
            address = (links or {}).get(cell)
            return escape(cell) if address is None else f'<a href="{escape(address)}">{escape(cell)}</a>'

        names = ["num" if side == "r" else "txt" for side in self.align]
        head = "".join(f'<th class="{name}">{link(cell)}</th>' for name, cell in zip(names, self.header, strict=True))
        lines = [
            "".join(f'<td class="{name}">{escape(cell)}</td>' for name, cell in zip(names, row, strict=True))
            for row in self.rows
        ]
        foot = f"<tfoot><tr>{lines.pop()}</tr></tfoot>" if self.total and lines else ""
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>{foot}</table></div>'

    def terminal(self, width: int) -> str:
        """At most `width` columns wide: long cells continue below. Needs rich."""
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text

        drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for name, side, cells in zip(self.header, self.align, zip(*self.rows, strict=True), strict=True):
            names = name == self.header[0] and max(map(len, (name, *cells))) <= width // 2  # stay whole if they can
            drawn.add_column(name, justify="right" if side == "r" else "left", overflow="fold", no_wrap=names)
        for place, row in enumerate(self.rows, 1):
            drawn.add_row(*map(Text, row), end_section=self.total and place == len(self.rows) - 1)
        console = Console(file=StringIO(), width=width, color_system=None, legacy_windows=False)
        console.print(drawn)
        return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))  # type: ignore[attr-defined]

    def _padded(self, bar: str = "|") -> list[list[str]]:
        lines = [[cell.replace("|", bar) for cell in line] for line in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return [
            [
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(line, widths, self.align, strict=True)
            ]
            for line in lines
        ]


class Report(ABC):
    """What a call did, as a table.

    Printed in a terminal it is as wide as the terminal (with rich, which comes with the extra `train`), elsewhere it is
    Markdown. A notebook shows it as HTML.
    """

    @property
    @abstractmethod
    def headline(self) -> str:
        """The result in one line."""

    @abstractmethod
    def table(self) -> Table:
        """The rows for people."""

    @abstractmethod
    def records(self) -> Sequence[dict[str, Any]]:
        """The rows for programs: column -> text, number or None."""

    def markdown(self) -> str:
        """Table and headline in Markdown."""
        return self._under(self.table().markdown())

    def to_frame(self) -> Any:
        """The rows as a polars DataFrame; `.to_pandas()` makes one of pandas of it.

        Raises MissingPackageError without polars.
        """
        require("to_frame", "comera[train]", "polars")
        import polars

        return polars.DataFrame(self.records(), infer_schema_length=None)

    def _under(self, table: str) -> str:
        return f"{table}\n\n{self.headline}" if self.table().rows else self.headline

    def __str__(self) -> str:
        if sys.stdout.isatty() and installed("rich"):
            return self._under(self.table().terminal(shutil.get_terminal_size().columns))
        return self.markdown()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def _repr_html_(self) -> str:
        return f"{self.table().html()}\n<p>{escape(self.headline)}</p>" if self.table().rows else escape(self.headline)
