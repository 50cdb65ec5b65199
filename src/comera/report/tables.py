"""Tables that print themselves as text, Markdown and HTML, and numbers formatted for people."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

from comera.tt.spec import Spec

MEGA = 2**20  # bytes per MB throughout this library, as in the published results


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

    def markdown(self) -> str:
        """A Markdown table with an aligned source."""
        head, *body = self._padded(bar="\\|")
        rule = [
            f"{'-' * (len(cell) - 1)}:" if side == "r" else "-" * len(cell)
            for cell, side in zip(head, self.align, strict=True)
        ]
        return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))

    def html(self) -> str:
        """A table element in a box that scrolls on narrow pages."""
        names = ["num" if side == "r" else "txt" for side in self.align]
        head = "".join(f'<th class="{name}">{escape(cell)}</th>' for name, cell in zip(names, self.header, strict=True))
        lines = [
            "".join(f'<td class="{name}">{escape(cell)}</td>' for name, cell in zip(names, row, strict=True))
            for row in self.rows
        ]
        foot = f"<tfoot><tr>{lines.pop()}</tr></tfoot>" if self.total and lines else ""
        body = "\n".join(f"<tr>{line}</tr>" for line in lines)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>{foot}</table></div>'

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


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, at most five decimals, no exponent; a dash for an unknown value."""
    if value is None or not isfinite(value):
        return "∞" if value == float("inf") else "–"
    before = floor(log10(abs(value))) + 1 if value else 1
    return f"{value:,.{min(5, max(0, digits - before))}f}"


def count(value: float) -> str:
    """A count in thousands, millions or billions."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return number(value / unit) + name
    return f"{value:.0f}"


def megabytes(value: float) -> str:
    """Bytes in MB, without the unit; a dash for 0, which means unknown."""
    return number(value / MEGA if value else None)


def times(value: float | None) -> str:
    """A ratio."""
    shown = number(value)
    return shown if shown == "–" else f"{shown}×"


def label(name: str) -> str:
    """The name of a metric for people, such as nats per byte."""
    return name.replace("_per_", " per ")


def metric(name: str, value: float | None, percent: str = "") -> str:
    """A metric; accuracy in percent, followed by the sign `percent`; nats per byte in thousandths, as a loss."""
    if value is not None and name == "nats_per_byte":
        return f"{value:.3f}"
    return f"{100 * value:.1f}{percent}" if value is not None and name == "accuracy" else number(value)


def join_ranks(ranks: Iterable[int]) -> str:
    """Inner ranks of a tensor train, such as 8-12-12."""
    return "-".join(map(str, ranks))


def time_unit(longest: float) -> tuple[str, float]:
    """The unit for times up to `longest` seconds, and its length in seconds."""
    if longest < 600:
        return "s", 1.0
    return ("min", 60.0) if longest < 7200 else ("h", 3600.0)


def duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    unit, length = time_unit(seconds)
    return f"{number(seconds / length)} {unit}"


def modes_of(spec: Spec) -> str:
    """Format and modes of a tensor train, such as TT 8·8 / 16·16."""
    return re.split(" ranks? ", str(spec))[0]
