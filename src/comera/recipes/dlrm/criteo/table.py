"""Rows of clicks in a table of one's own: CSV or TSV with a header, one row a line, columns by name.

    label    0 or 1
    numbers  any finite ones; x becomes sign(x) log(1 + |x|), an empty field 0
    categories  any text, hashed to 32 bits; an empty field is missing

So every column becomes what Criteo's become, and an integer above 0 the same value.
R good rows."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import xxhash

from comera.errors import ConfigError, DataError
from comera.recipes.data.tables import check_names
from comera.recipes.dlrm.criteo.config import CriteoConfig
from comera.recipes.dlrm.criteo.files import GZIP_ERRORS, Place, first_line
from comera.recipes.dlrm.criteo.ids import MISSING
from comera.recipes.dlrm.criteo.parse import ALL_KINDS, LABEL, NUMBER, TOO_FEW, TOO_MANY, UNREADABLE, Rows, quote


@dataclass(frozen=True)
class TableRows:
    """How rows of a table are read: its header, and the places of the columns in it. label: None without labels.
    start: of the first row, in the file."""

    header: tuple[str, ...]
    delimiter: str
    label: int | None
    numbers: tuple[int, ...]
    categories: tuple[int, ...]
    start: Place

    @property
    def labeled(self) -> bool:
        """Whether rows have labels."""
        return self.label is not None

    def parse(self, block: bytes) -> Rows:
        """Parse a block of whole lines, each ended by a newline. Without a column of labels, they are 0."""
        lines = block.split(b"\n")[:-1]
        labels, dense, values = [], [], []
        bad_lines, bad_kinds = [], []
        for place, line in enumerate(lines):
            fields = self._fields(line)
            mistake = self._mistake(fields, line)
            if mistake is not None:
                bad_lines.append(place)
                bad_kinds.append(ALL_KINDS.index(mistake[0]))
                continue
            assert fields is not None
            labels.append(0 if self.label is None else int(float(fields[self.label])))
            dense.append([_number(fields[k]) for k in self.numbers])
            values.append([_hash(fields[k]) for k in self.categories])
        x = np.array(dense, np.float64).reshape(-1, len(self.numbers)).T
        return Rows(
            np.array(labels, np.uint8),
            (np.sign(x) * np.log1p(np.abs(x))).astype(np.float32),
            np.array(values, np.uint32).reshape(-1, len(self.categories)).T,
            len(lines),
            np.array(bad_lines, np.int64),
            np.array(bad_kinds, np.uint8),
        )

    def explain(self, line: bytes) -> str:
        """What is wrong with a bad line: the column, what was expected and what came."""
        mistake = self._mistake(self._fields(line), line)
        assert mistake is not None, f"a good line: {line!r}"
        return mistake[1]

    def _fields(self, line: bytes) -> list[str] | None:
        text = line.decode("latin-1").removesuffix("\r")  # every byte is a character
        if self.delimiter == "\t":
            return text.split("\t")
        try:
            return next(csv.reader([text], strict=True), [])
        except csv.Error:  # a quotation mark that does not end
            return None

    def _mistake(self, fields: list[str] | None, line: bytes) -> tuple[str, str] | None:
        """The first mistake of a line: its kind, and an explanation; None for a good one."""
        if fields is None:
            return UNREADABLE, f"expected fields between commas, got quotation marks that do not match ({quote(line)})"
        if len(fields) != len(self.header):
            kind = TOO_FEW if len(fields) < len(self.header) else TOO_MANY
            return kind, f"expected {len(self.header)} fields as in the header, got {len(fields)} ({quote(line)})"
        if self.label is not None and _float(fields[self.label]) not in (0.0, 1.0):
            return LABEL, f"expected 0 or 1 as {self.header[self.label]}, got {_quoted(fields[self.label])}"
        for k in self.numbers:
            if not isfinite(_number(fields[k])):
                return NUMBER, f"expected a number as {self.header[k]}, got {_quoted(fields[k])}"
        return None


def is_table(files: Sequence[Path], config: CriteoConfig) -> bool:
    """Whether the files are a table with a header, rather than Criteo's: by the suffix, or as columns are named."""
    named = bool(config.numbers or config.categories)
    return len(files) == 1 and (named or {".csv", ".tsv"} & {*files[0].suffixes} != set())


def open_table(file: Path, config: CriteoConfig, *, labeled: bool | None = True) -> TableRows:
    """How to read the rows of a table with a header. labeled: whether the column of labels must be there; None: it may.
    Raises ConfigError where the configuration names no columns, or others than the header; DataError for a file
    without a header."""
    if not config.numbers or not config.categories:
        what = f"the table {file} with the columns {', '.join(_header(file)[0])}"
        raise ConfigError(
            f"expected data.numbers and data.categories to name columns, got {what}: set both, and data.label "
            f"({config.label!r})"
        )
    header, start = _header(file)
    check_names(header, "columns", str(file))
    named = [*config.numbers, *config.categories, *([config.label] if labeled else [])]
    missing = [name for name in named if name not in header]
    if missing:
        raise ConfigError(
            f"{file}: expected the columns {', '.join(map(repr, missing))}, got {', '.join(map(repr, header))}: set "
            "data.label, data.numbers and data.categories to names of columns"
        )

    def places(names: Sequence[str]) -> tuple[int, ...]:
        return tuple(map(header.index, names))

    label = header.index(config.label) if labeled or (labeled is None and config.label in header) else None
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    return TableRows(tuple(header), delimiter, label, places(config.numbers), places(config.categories), start)


def _header(file: Path) -> tuple[list[str], Place]:
    """The names of the columns, and where the rows begin."""
    try:
        line = first_line(file)
    except GZIP_ERRORS as error:
        raise DataError(f"{file}, line 1: cannot be read ({error}): is the file complete? Fetch it again") from error
    text = line.decode("utf-8", "replace").removeprefix("\ufeff").rstrip("\r\n")
    header = text.split("\t") if ".tsv" in file.suffixes else next(csv.reader([text]), [])
    if not any(header):
        raise DataError(f"{file}, line 1: expected a header with the names of the columns, got {quote(line)}")
    return header, Place(0, len(line), 1)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _number(text: str) -> float:
    return 0.0 if not text.strip() else _float(text)


def _hash(text: str) -> int:
    """A category as a number above 0; MISSING if it is empty."""
    return (xxhash.xxh32_intdigest(text.encode("latin-1")) or 1) if text else MISSING


def _quoted(text: str) -> str:
    return quote(text.encode("latin-1"))
