"""From the files of a click log to its rows: Criteo's own, or a table with a header, read as blocks of whole lines, in
bounded memory.

    Criteo   label \\t 13 integers \\t 26 hexadecimal categories \\n
    table    CSV or TSV, one row a line, columns by name: the label 0 or 1, any finite numbers, categories of any text

A row with another number of fields, or one that cannot be read, is bad and skipped. As in the published DLRM, a missing
or negative integer is 0, an integer x becomes log(1 + x), a missing category is 0. Of a table, a number x becomes
sign(x) log(1 + |x|), and a category is hashed to 32 bits: an integer above 0 becomes the same value.
The Kaggle data is one file, train.txt, in time order; the larger sets have one file a day. Any may be gzipped.
R good rows."""

import csv
import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl
import xxhash

from comera.errors import ConfigError, DataError
from comera.files import typed_path
from comera.recipes.data.tables import check_names, comma_reader
from comera.recipes.dlrm.criteo.config import CATEGORIES, INTEGERS, CriteoConfig

Array = np.ndarray[Any, Any]

TRAIN = ("train.txt", "train.txt.gz")  # as published, in a folder with a test file that has no labels
DAY = re.compile(r"day_?(\d+)(\.txt|\.tsv)?(\.gz)?")
GZIP = b"\x1f\x8b"
BLOCK = 2 * 2**20  # bytes of text at a time: fits the caches, yet large enough to amortize the calls
END_MISSING = "the compressed file ends here, cut short"
GZIP_ERRORS = (OSError, EOFError, zlib.error)
STAMP = 2**20  # bytes at either end that identify a file, besides its size and time


TOO_FEW, TOO_MANY, LABEL, INTEGER, CATEGORY = KINDS = (
    "too few fields",
    "too many fields",
    "label other than 0 or 1",
    "unparsable integer",
    "category that is not hexadecimal",
)
NUMBER, UNREADABLE = "unparsable number", "quotation marks that do not match"  # of tables
CUT_SHORT = "file cut short"  # a compressed file lacks its end, and part of its last row
FORMS = {"label": "[01]", "integer": "(-?[0-9]{1,10})?", "category": "[0-9a-fA-F]{0,8}"}
WANTED = {  # for a field: the kind of mistake in others, and what was expected
    "label": (LABEL, "0 or 1"),
    "integer": (INTEGER, "a decimal integer of 32 bits"),
    "category": (CATEGORY, "up to 8 hexadecimal digits"),
}
INTEGER_NAMES = [f"integer {k + 1}" for k in range(INTEGERS)]
CATEGORY_NAMES = [f"category {k + 1}" for k in range(CATEGORIES)]
LEAST, MOST = -(2**31), 2**31 - 1  # of an integer


class Place(NamedTuple):
    """Where reading resumes: index of the file, bytes of its text read, lines read."""

    file: int = 0
    offset: int = 0
    line: int = 0


START = Place()


class Block(NamedTuple):
    """Whole lines of a file, each ended by a newline. begin, end: their places. read: bytes of all files read so far
    (compressed bytes, for a progress bar). cut_short: the file is compressed and ends in the middle of what follows."""

    text: bytes
    begin: Place
    end: Place
    read: int
    cut_short: bool = False


def find_files(path: str) -> list[Path]:
    """The file `path`; for a folder, its train.txt, or else its files day_0, day_1, … in that order. Files may be
    gzipped. Raises DataError if there are none, or one is empty, an archive, or named .gz but not gzip."""
    root = typed_path(path, "data.path")
    if root.is_dir():
        present = sorted(root.iterdir(), reverse=True)  # if a day is both plain and compressed, the plain file counts
        days = {int(match[1]): file for file in present if (match := DAY.fullmatch(file.name))}
        train = [file for file in map(root.joinpath, TRAIN) if file.is_file()][:1]
        files = train or [days[day] for day in sorted(days)]
        if not files:
            names = ", ".join(file.name for file in present[::-1][:10]) or "nothing"
            raise DataError(f"expected {' or '.join(TRAIN)} or day_0, day_1, … in {root}, got {names}: check data.path")
    elif root.exists():
        files = [root]
    else:
        raise DataError(
            f"expected Criteo's click log, a file or a folder, got {root}, which does not exist: check data.path"
        )
    for file in files:
        _check(file)
    return files


def stamp(file: Path) -> list[object]:
    """Identifies a file without reading all of it: size, modification time, digest of both ends."""
    status = file.stat()
    with open(file, "rb") as raw:
        ends = raw.read(STAMP)
        raw.seek(max(0, status.st_size - STAMP))
        ends += raw.read(STAMP)
    return [status.st_size, status.st_mtime_ns, hashlib.blake2b(ends, digest_size=16).hexdigest()]


def read_blocks(files: Sequence[Path], place: Place = START) -> Iterator[Block]:
    """The text of all files from `place` on, a few megabytes at a time; adds a missing newline at the end of a file.
    Raises DataError, with file and line, for unreadable files, endless lines and files without lines."""
    before = sum(file.stat().st_size for file in files[: place.file])
    for number in range(place.file, len(files)):
        file = files[number]
        yield from _read_file(file, place if place.file == number else Place(number), before)
        before += file.stat().st_size


def first_line(file: Path) -> bytes:
    """The first line of a file, plain or gzipped, with its end; raises GZIP_ERRORS."""
    with open(file, "rb") as raw:
        compressed = raw.read(len(GZIP)) == GZIP
        raw.seek(0)
        return (gzip.GzipFile(fileobj=raw) if compressed else raw).readline(BLOCK)


def _check(file: Path) -> None:
    if file.exists() and not file.is_file():
        raise DataError(f"{file}: expected a file, got a folder, pipe or device: check data.path")
    try:
        with open(file, "rb") as raw:
            start = raw.read(len(GZIP))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}): check data.path") from error
    if not start:
        raise DataError(f"{file}: expected rows of a click log, got an empty file: fetch it again")
    if file.name.endswith((".tar.gz", ".tgz", ".tar", ".zip")):
        raise DataError(f"{file}: expected the rows themselves, got an archive: unpack it and name the file inside")
    if file.suffix == ".gz" and start != GZIP:
        raise DataError(f"{file}: expected gzip, as the name says, got other data: rename it or fetch it again")


def _read_file(file: Path, place: Place, before: int) -> Iterator[Block]:
    text, whole = bytearray(), False  # read, but not yet part of a block
    try:
        with open(file, "rb") as raw:
            compressed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if compressed else raw
            stream.seek(place.offset)  # in a compressed file: reads up to there
            while chunk := stream.read1(BLOCK - len(text)):
                text += chunk
                if len(text) < BLOCK:
                    continue
                cut = text.rfind(b"\n") + 1
                if not cut:
                    raise DataError(
                        f"{file}, line {place.line + 1}: expected lines of 40 fields, got {len(text):,} bytes without "
                        "a newline: is this Criteo's click log? Check data.path"
                    )
                block = _block(bytes(text[:cut]), place, before + raw.tell())
                yield block
                place = block.end
                del text[:cut]
            whole = True
    except EOFError:
        del text[text.rfind(b"\n") + 1 :]  # the rows so far are good; the caller decides
    except (OSError, zlib.error) as error:
        raise DataError(
            f"{file}, line {place.line + 1}: cannot be read ({error}): is the file complete? Fetch it again"
        ) from error
    size = before + file.stat().st_size
    if text:
        block = _block(bytes(text), place, size)
        yield block
        place = block.end
    if not whole:
        yield Block(b"", place, Place(place.file + 1), size, cut_short=True)
    elif not place.offset:
        raise DataError(f"{file}: expected rows of a click log, got no text in it: fetch it again")


def _block(text: bytes, begin: Place, read: int) -> Block:
    """A block that begins with this text, with a newline at its end."""
    whole = text if text.endswith(b"\n") else text + b"\n"
    return Block(whole, begin, Place(begin.file, begin.offset + len(text), begin.line + whole.count(b"\n")), read)


MISSING = 0  # the value of an empty category; it never counts as rare


@dataclass(frozen=True)
class CriteoRows:
    """How rows in Criteo's format are read, with or without labels. numbers, categories: one item a column. start:
    place of the first row."""

    labeled: bool = True
    numbers: Sequence[object] = range(INTEGERS)
    categories: Sequence[object] = range(CATEGORIES)
    start: Place = START

    def parse(self, block: bytes) -> "Rows":
        """Parse a block of whole lines, each ended by a newline, a carriage return before which is ignored. Without
        labels, they are 0."""
        names = self._names
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
                (pl.col("label") == "1" if self.labeled else pl.lit(False)).cast(pl.UInt8).alias("label"),
            )
            .filter(pl.all_horizontal(integers.is_between(LEAST, MOST)))
            .collect()
        )
        bad = np.delete(np.arange(len(lines)), rows["index"].to_numpy()).tolist()
        return Rows(
            rows["label"].to_numpy(),
            log_integers(rows.select(INTEGER_NAMES).to_numpy().T),
            rows.select(CATEGORY_NAMES).to_numpy().T,
            len(lines),
            [Bad(place, *self._mistake(lines[place].encode("latin-1"))) for place in bad],
        )

    def _mistake(self, line: bytes) -> tuple[str, str]:
        """The first mistake of a bad line: its kind, and what was expected and what came."""
        fields = line.removesuffix(b"\r").split(b"\t")
        names = self._names
        if len(fields) != len(names):
            kind = TOO_FEW if len(fields) < len(names) else TOO_MANY
            return kind, f"expected {len(names)} fields between tabs, got {len(fields)} ({quote(line)})"
        for name, field in zip(names, fields, strict=True):
            form = name.split()[0]
            valid = re.fullmatch(FORMS[form].encode(), field)
            if not valid or (form == "integer" and not LEAST <= int(field or 0) <= MOST):
                kind, wanted = WANTED[form]
                return kind, f"expected {wanted} as {name}, got {quote(field)}"
        raise AssertionError(f"a good line: {line!r}")

    @property
    def _names(self) -> list[str]:
        """The fields of a row."""
        return ["label"] * self.labeled + INTEGER_NAMES + CATEGORY_NAMES


@dataclass(frozen=True)
class TableRows:
    """How rows of a table are read, likewise: its header, and the places of the columns in it. label: None without
    labels. start: of the first row, in the file."""

    header: tuple[str, ...]
    delimiter: str
    label: int | None
    numbers: tuple[int, ...]
    categories: tuple[int, ...]
    start: Place

    @property
    def labeled(self) -> bool:
        """Whether they have labels."""
        return self.label is not None

    def parse(self, block: bytes) -> "Rows":
        """Parse a block, as above."""
        lines = block.split(b"\n")[:-1]
        labels, dense, values, bad = [], [], [], list[Bad]()
        for place, line in enumerate(lines):
            fields = self._fields(line)
            mistake = self._mistake(line, fields)
            if mistake is not None:
                bad.append(Bad(place, *mistake))
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
            bad,
        )

    def _fields(self, line: bytes) -> list[str] | None:
        text = line.decode("latin-1").removesuffix("\r")  # every byte is a character
        if self.delimiter == "\t":
            return text.split("\t")
        try:
            return next(comma_reader([text]), [])
        except csv.Error:  # a quotation mark that does not end
            return None

    def _mistake(self, line: bytes, fields: list[str] | None) -> tuple[str, str] | None:
        """The first mistake of a line, as above; None for a good one."""
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


RowFormat = CriteoRows | TableRows


class Bad(NamedTuple):
    """A bad line: its place in a block, from 0, the kind of its first mistake, and what was expected and what came."""

    place: int
    kind: str
    mistake: str


class Rows(NamedTuple):
    """The rows of a block. labels: (R,) uint8; dense: (13, R) float32, log(1 + x); values: (26, R) uint32, 0 where
    missing; of other tables, as many as they have. lines: in the block. bad: those of them that are no rows."""

    labels: Array
    dense: Array
    values: Array
    lines: int
    bad: list[Bad]

    @property
    def places(self) -> Array:
        """The lines of the rows, (R,) from 0."""
        return np.delete(np.arange(self.lines), [each.place for each in self.bad])


def log_integers(integers: Array) -> Array:
    """log(1 + x), 0 for negative x, rounded once from double precision: float32."""
    return np.log1p(np.maximum(integers, 0), dtype=np.float64).astype(np.float32)


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
    try:
        header = text.split("\t") if ".tsv" in file.suffixes else next(comma_reader([text], strict=False), [])
    except csv.Error as error:  # a carriage return within it
        raise DataError(
            f"{file}, line 1: expected a header between commas that ends in a newline, got {quote(line)}: end each "
            "line with one"
        ) from error
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


def quote(text: bytes) -> str:
    """The beginning of a text, for a message."""
    return repr(text[:60].decode("utf-8", "replace")) + ("…" if len(text) > 60 else "")
