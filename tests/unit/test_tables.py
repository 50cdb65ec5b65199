"""Tables as text, Markdown, HTML and as wide as a terminal; reports that are tables."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from comera import tables
from comera.errors import ComeraError
from comera.tables import Report, Table

TABLE = Table(("name", "size"), "lr", (("a", "1"), ("b<c", "1,234"), ("all", "1,235")), total=True)


def test_text_is_aligned_and_rules_off_the_total() -> None:
    assert TABLE.text().splitlines() == [
        "name   size",
        "────  ─────",
        "a         1",
        "b<c   1,234",
        "────  ─────",
        "all   1,235",
    ]


def test_markdown_is_aligned_in_its_source() -> None:
    assert TABLE.markdown().splitlines() == [
        "| name |  size |",
        "| ---- | ----: |",
        "| a    |     1 |",
        "| b<c  | 1,234 |",
        "| all  | 1,235 |",
    ]


def test_a_wide_table_is_transposed_and_a_long_one_continues_below() -> None:
    wide = Table(("method", "parameters", "step ms"), "lrr", (("dense", "11", "1.0"), ("comera", "5", "2.0")))
    assert wide.fitted(width=30) == wide.text()
    assert wide.fitted(width=26).splitlines() == [
        "method      dense  comera",
        "──────────  ─────  ──────",
        "parameters     11       5",
        "step ms       1.0     2.0",
    ]
    long = Table(("layer", "size"), "lr", (("a" * 30, "1"), ("b" * 30, "2"), ("c" * 30, "3")))
    assert max(map(len, long.fitted(width=20).splitlines())) <= 20


def test_html_escapes_and_puts_the_total_into_the_foot() -> None:
    html = TABLE.html()
    assert '<td class="txt">b&lt;c</td><td class="num">1,234</td>' in html
    assert '<tfoot><tr><td class="txt">all</td><td class="num">1,235</td></tr></tfoot>' in html


@pytest.mark.parametrize("width", [24, 80])
def test_no_line_is_wider_than_the_terminal_and_nothing_is_lost(width: int) -> None:
    long = Table(("layer", "[ranks]"), "lr", (("encoder.layer.0.attention.query", "[bold]12-30-30"), ("all", "5")))
    lines = long.terminal(width).splitlines()
    assert max(map(len, lines)) <= width
    shown = "".join("".join(lines).split())
    assert all(letter in shown for letter in "[bold]")
    assert sum(letter.isdigit() for letter in shown) == sum(
        cell.isdigit() for row in long.rows for c in row for cell in c
    )


class Made(Report):
    """A report of one row."""

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows

    @property
    def headline(self) -> str:
        return "1 < 2 layers"

    def table(self) -> Table:
        return Table(("layer", "size"), "lr", (("encoder.query", "12"),) * self.rows)

    def records(self) -> Sequence[dict[str, Any]]:
        return [{"layer": "encoder.query", "size": 12, "error": None}] * self.rows


def test_a_report_is_short_as_a_value_and_markdown_in_a_file() -> None:
    assert repr(Made()) == "<Made: 1 < 2 layers>"
    assert str(Made()) == Made().markdown()
    assert Made().markdown().splitlines()[2:] == ["| encoder.query |   12 |", "", "1 < 2 layers"]
    assert str(Made(0)) == "1 < 2 layers"


def test_a_report_in_a_terminal_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(tables.shutil, "get_terminal_size", lambda: os.terminal_size((16, 24)))
    lines = str(Made()).splitlines()
    assert "|" not in lines[0]
    assert max(map(len, lines)) <= 16
    monkeypatch.setitem(sys.modules, "rich", None)
    assert str(Made()) == Made().markdown()  # without rich


def test_a_report_in_a_notebook_is_html() -> None:
    html = Made()._repr_html_()
    assert '<td class="txt">encoder.query</td><td class="num">12</td>' in html
    assert html.endswith("<p>1 &lt; 2 layers</p>")


def test_a_report_as_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Made().to_frame().to_dicts() == Made().records()
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(ComeraError, match=r"to_frame needs polars: pip install 'comera\[train\]'"):
        Made().to_frame()
