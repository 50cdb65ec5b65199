"""Parses rows of Criteo's click log, thousands at a time and without a loop over rows.

    label \\t 13 integers \\t 26 hexadecimal categories \\n

A good row has 40 fields between 39 tabs; any other is bad and skipped.
As in the published DLRM, a missing or negative integer is 0, an integer x becomes log(1 + x), a missing category is 0.
R good rows."""

import re
from typing import Any, NamedTuple

import numpy as np
import polars as pl

INTEGERS, CATEGORIES = 13, 26
TOO_FEW, TOO_MANY, LABEL, INTEGER, CATEGORY = KINDS = (
    "too few fields",
    "too many fields",
    "label other than 0 or 1",
    "unparsable integer",
    "category that is not hexadecimal",
)
CUT_SHORT = "file cut short"  # a compressed file lacks its end, and part of its last row
FORMS = {"label": "^[01]$", "integer": "^(-?[0-9]{1,10})?$", "category": "^[0-9a-fA-F]{0,8}$"}
INTEGER_NAMES = [f"integer {k + 1}" for k in range(INTEGERS)]
CATEGORY_NAMES = [f"category {k + 1}" for k in range(CATEGORIES)]
LEAST, MOST = -(2**31), 2**31 - 1  # of an integer

Array = np.ndarray[Any, Any]


class Rows(NamedTuple):
    """The good rows of a block, and the places of the bad ones. labels: (R,) uint8; dense: (13, R) float32, log(1 + x);
    values: (26, R) uint32, 0 where missing. lines: in the block. bad_lines: int64 indices, from 0, of the bad lines;
    bad_kinds: uint8 indices into KINDS of their first mistakes."""

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
    lines = block.decode("latin-1").split("\n")[:-1]  # every byte is a character
    line = pl.col("line").str
    fields = pl.LazyFrame({"line": lines}, {"line": pl.String}).select(
        line.count_matches("\t", literal=True).add(1).alias("count"),
        line.strip_suffix("\r").str.split_exact("\t", len(names) - 1).struct.rename_fields(names).struct.unnest(),
    )
    if not labeled:
        fields = fields.with_columns(pl.lit("0").alias("label"))
    integers = pl.col(INTEGER_NAMES).cast(pl.Int64, strict=False).fill_null(0)
    mistakes = {
        TOO_FEW: pl.col("count") < len(names),
        TOO_MANY: pl.col("count") > len(names),
        LABEL: ~pl.col("label").str.contains(FORMS["label"]),
        INTEGER: ~pl.all_horizontal(
            pl.col(INTEGER_NAMES).str.contains(FORMS["integer"]), integers.is_between(LEAST, MOST)
        ),
        CATEGORY: ~pl.all_horizontal(pl.col(CATEGORY_NAMES).str.contains(FORMS["category"])),
    }
    rows = fields.select(
        pl.coalesce(pl.when(mistakes[kind]).then(pl.lit(k, pl.UInt8)) for k, kind in enumerate(KINDS)).alias("mistake"),
        (pl.col("label") == "1").cast(pl.UInt8),
        integers,
        pl.col(CATEGORY_NAMES).str.to_integer(base=16, dtype=pl.UInt32, strict=False).fill_null(0),
    ).collect()
    good, bad = rows.filter(rows["mistake"].is_null()), rows["mistake"].is_not_null()
    return Rows(
        good["label"].to_numpy(),
        log_integers(good.select(INTEGER_NAMES).to_numpy().T),
        good.select(CATEGORY_NAMES).to_numpy().T,
        len(lines),
        bad.arg_true().to_numpy().astype(np.int64),
        rows["mistake"].filter(bad).to_numpy(),
    )


def log_integers(integers: Array) -> Array:
    """log(1 + x), 0 for negative x, rounded once from double precision: float32."""
    return np.log1p(np.maximum(integers, 0), dtype=np.float64).astype(np.float32)


def explain(line: bytes, labeled: bool = True) -> str:
    """What is wrong with a bad line: the field, what was expected and what came."""
    fields = line.rstrip(b"\n").removesuffix(b"\r").split(b"\t")
    names = _names(labeled)
    if len(fields) != len(names):
        return f"expected {len(names)} fields between tabs, got {len(fields)} ({_quote(line)})"
    wanted = {"label": "0 or 1", "integer": "a decimal integer of 32 bits", "category": "up to 8 hexadecimal digits"}
    for name, field in zip(names, fields, strict=True):
        kind, text = name.split()[0], field.decode("latin-1")
        if not re.search(FORMS[kind], text) or (kind == "integer" and not LEAST <= int(text or 0) <= MOST):
            return f"expected {wanted[kind]} as {name}, got {_quote(field)}"
    raise AssertionError(f"a good line: {line!r}")


def _names(labeled: bool) -> list[str]:
    return ["label"] * labeled + INTEGER_NAMES + CATEGORY_NAMES


def _quote(text: bytes) -> str:
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")
