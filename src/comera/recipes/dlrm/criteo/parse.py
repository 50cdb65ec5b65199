"""Parses rows of Criteo's click log, thousands at a time and without a loop over rows.

    label \\t 13 integers \\t 26 hexadecimal categories \\n

A good row has 40 fields between 39 tabs; any other is bad and skipped.
As in the published DLRM, a missing or negative integer is 0, an integer x becomes log(1 + x), a missing category is 0.
R good rows."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import polars as pl

from comera.recipes.dlrm.criteo.files import START, Place

INTEGERS, CATEGORIES = 13, 26
TOO_FEW, TOO_MANY, LABEL, INTEGER, CATEGORY = KINDS = (
    "too few fields",
    "too many fields",
    "label other than 0 or 1",
    "unparsable integer",
    "category that is not hexadecimal",
)
NUMBER, UNREADABLE = "unparsable number", "quotation marks that do not match"  # of tables
ALL_KINDS = (*KINDS, NUMBER, UNREADABLE)
CUT_SHORT = "file cut short"  # a compressed file lacks its end, and part of its last row
FORMS = {"label": "[01]", "integer": "(-?[0-9]{1,10})?", "category": "[0-9a-fA-F]{0,8}"}
WANTED = {"label": "0 or 1", "integer": "a decimal integer of 32 bits", "category": "up to 8 hexadecimal digits"}
MISTAKES = {"label": LABEL, "integer": INTEGER, "category": CATEGORY}
INTEGER_NAMES = [f"integer {k + 1}" for k in range(INTEGERS)]
CATEGORY_NAMES = [f"category {k + 1}" for k in range(CATEGORIES)]
LEAST, MOST = -(2**31), 2**31 - 1  # of an integer

Array = np.ndarray[Any, Any]


class RowFormat(Protocol):
    """How the rows of a file are read. numbers, categories: one item a column. start: place of the first row."""

    @property
    def labeled(self) -> bool: ...
    @property
    def numbers(self) -> Sequence[object]: ...
    @property
    def categories(self) -> Sequence[object]: ...
    @property
    def start(self) -> Place: ...

    def parse(self, block: bytes) -> "Rows":
        """The rows of a block of whole lines."""

    def explain(self, line: bytes) -> str:
        """What is wrong with a bad line."""


@dataclass(frozen=True)
class CriteoRows:
    """Rows in Criteo's format, with or without labels."""

    labeled: bool = True
    numbers: Sequence[object] = range(INTEGERS)
    categories: Sequence[object] = range(CATEGORIES)
    start: Place = START

    def parse(self, block: bytes) -> "Rows":
        """See `parse`."""
        return parse(block, self.labeled)

    def explain(self, line: bytes) -> str:
        """See `explain`."""
        return explain(line, self.labeled)


class Rows(NamedTuple):
    """The good rows of a block, and the places of the bad ones. labels: (R,) uint8; dense: (13, R) float32, log(1 + x);
    values: (26, R) uint32, 0 where missing; of other tables, as many as they have. lines: in the block. bad_lines:
    int64 indices, from 0, of the bad lines; bad_kinds: uint8 indices into ALL_KINDS of their first mistakes."""

    labels: Array
    dense: Array
    values: Array
    lines: int
    bad_lines: Array
    bad_kinds: Array


def parse(block: bytes, labeled: bool = True) -> Rows:
    """Parse a block of whole lines, each ended by a newline (a carriage return before it is ignored). labeled: whether
    rows begin with a label; otherwise labels are 0."""
    names = _names(labeled)
    form = "\t".join(FORMS[name.split()[0]] for name in names)
    lines = block.decode("latin-1").split("\n")[:-1]  # every byte is a character
    line, integers = pl.col("line").str, pl.col(INTEGER_NAMES)
    rows = (
        pl.LazyFrame({"line": lines}, {"line": pl.String})
        .with_row_index()
        .filter(line.contains(f"^{form}\r?$"))
        .select("index", line.strip_suffix("\r").str.split_exact("\t", len(names) - 1).struct.rename_fields(names))
        .unnest("line")
        .with_columns(
            integers.cast(pl.Int64, strict=False).fill_null(0),
            pl.col(CATEGORY_NAMES).str.to_integer(base=16, dtype=pl.UInt32, strict=False).fill_null(0),
            (pl.col("label") == "1" if labeled else pl.lit(False)).cast(pl.UInt8).alias("label"),
        )
        .filter(pl.all_horizontal(integers.is_between(LEAST, MOST)))
        .collect()
    )
    bad_lines = np.delete(np.arange(len(lines)), rows["index"].to_numpy())
    mistakes = [_mistake(lines[bad].encode("latin-1"), labeled)[0] for bad in bad_lines]
    return Rows(
        rows["label"].to_numpy(),
        log_integers(rows.select(INTEGER_NAMES).to_numpy().T),
        rows.select(CATEGORY_NAMES).to_numpy().T,
        len(lines),
        bad_lines,
        np.array([KINDS.index(mistake) for mistake in mistakes], np.uint8),
    )


def log_integers(integers: Array) -> Array:
    """log(1 + x), 0 for negative x, rounded once from double precision: float32."""
    return np.log1p(np.maximum(integers, 0), dtype=np.float64).astype(np.float32)


def explain(line: bytes, labeled: bool = True) -> str:
    """What is wrong with a bad line: the field, what was expected and what came."""
    return _mistake(line, labeled)[1]


def _mistake(line: bytes, labeled: bool) -> tuple[str, str]:
    """The first mistake of a bad line: its kind, and an explanation."""
    fields = line.rstrip(b"\n").removesuffix(b"\r").split(b"\t")
    names = _names(labeled)
    if len(fields) != len(names):
        kind = TOO_FEW if len(fields) < len(names) else TOO_MANY
        return kind, f"expected {len(names)} fields between tabs, got {len(fields)} ({quote(line)})"
    for name, field in zip(names, fields, strict=True):
        kind = name.split()[0]
        valid = re.fullmatch(FORMS[kind].encode(), field)
        if not valid or (kind == "integer" and not LEAST <= int(field or 0) <= MOST):
            return MISTAKES[kind], f"expected {WANTED[kind]} as {name}, got {quote(field)}"
    raise AssertionError(f"a good line: {line!r}")


def _names(labeled: bool) -> list[str]:
    """The fields of a row."""
    return ["label"] * labeled + INTEGER_NAMES + CATEGORY_NAMES


def quote(text: bytes) -> str:
    """The beginning of a text, for a message."""
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")
