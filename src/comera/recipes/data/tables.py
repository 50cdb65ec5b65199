"""Rows of data in files: JSON lines, CSV and TSV, plain or gzipped. The first row of a table names its columns.

.jsonl   a JSON object in each line, also .ndjson
.csv     fields between commas; a field in double quotes may hold commas and newlines
.tsv     fields between tabs, as in GLUE: quotes are ordinary characters
.parquet columns by name; `read_rows` alone reads it
"""

import csv
import gzip
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from comera.errors import DataError

TABLE_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz", *TABLE_SUFFIXES)
PARQUET = ".parquet"
FIRST_ROWS = 1000


class Row(NamedTuple):
    """The values of a row by column, and the line that it ends in, from 1; without lines, its number."""

    line: int
    values: Mapping[str, Any]


Bad: TypeAlias = Callable[[DataError], object]  # is handed the error of a row that does not parse


def refuse(error: DataError) -> None:
    """Raise the error of a row."""
    raise error


def read_rows(file: Path, bad: Bad = refuse) -> Iterator[Row]:
    """The rows of a file. bad: for single rows that do not parse, which are skipped. Raises DataError, with file and
    line, for unreadable files."""
    return _parquet(file) if file.suffix.lower() == PARQUET else parse_rows(file, read_lines(file), bad)


def parse_rows(file: Path, lines: Iterable[str], bad: Bad = refuse) -> Iterator[Row]:
    """The rows in the lines of a file, each with its end; by the suffix of the file. bad: is handed a DataError, with
    file and line, for a line that is no JSON object and a row with more or fewer fields than the header; by default it
    raises. Raises one for a table without a header or with a column named twice, and for quotes that are opened and not
    closed in their line."""
    name = file.name.lower().removesuffix(".gz")
    if _is_table(name):
        return _table(file, lines, "\t" if name.endswith(".tsv") else ",", bad)
    return _json(file, lines, bad)


def _is_table(name: str) -> bool:
    return name.lower().endswith(TABLE_SUFFIXES)


def _parquet(file: Path) -> Iterator[Row]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            check_names(table.schema_arrow.names, "columns", str(file))
            batches = (batch.to_pylist() for batch in table.iter_batches(FIRST_ROWS))
            for number, values in enumerate(chain.from_iterable(batches), 1):
                yield Row(number, values)
    except (OSError, ArrowException) as error:
        raise DataError(f"{file}: cannot be read as Parquet ({error}): is the file complete? Fetch it again") from error


def _json(file: Path, lines: Iterable[str], bad: Bad) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where, shown = f"{file}, line {number}", line.rstrip("\r\n")[:80]
        try:
            values = json.loads(line, object_pairs_hook=partial(_object, where=where))
            if not isinstance(values, dict):
                raise DataError(f'{where}: expected a JSON object, such as {{"text": "..."}}, got {shown!r}')
        except DataError as error:
            bad(error)
        except (ValueError, RecursionError) as error:
            bad(DataError(f"{where}: expected JSON, got {shown!r} ({error})"))
        else:
            yield Row(number, values)


def _object(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        check_names([name for name, _ in pairs], "fields", where)
    return values


def check_names(names: Sequence[str], what: str, where: str) -> None:
    """Raise DataError for a name that occurs twice, but for an empty one, by which nobody can choose. what: has these
    names. where: for the message."""
    for name, count in Counter(names).items():
        if name and count > 1:
            raise DataError(
                f"{where}: expected {what} of different names, got {name!r} {count} times: rename or remove one"
            )


def open_rows(file: Path, wanted: Iterable[str], bad: Bad) -> tuple[list[str], Iterator[Row]]:
    """The columns of a file, and its rows. Of JSON lines, each of which may lack some, the fields of the first
    FIRST_ROWS, and of further ones until all that are wanted have occurred. Raises DataError for a file without
    rows, and what `read_rows` raises."""
    rows, first, found, wanted = read_rows(file, bad), list[Row](), dict[str, None](), set(wanted)
    for row in rows:
        first.append(row)
        found |= dict.fromkeys(row.values)
        if (
            file.suffix.lower() == PARQUET
            or _is_table(file.name)
            or (len(first) >= FIRST_ROWS and wanted <= found.keys())
        ):
            break
    if not found:
        raise DataError(f"{file}: expected rows, got none that can be read: check this file")
    return list(found), chain(first, rows)


def _table(file: Path, lines: Iterable[str], delimiter: str, bad: Bad) -> Iterator[Row]:
    header: list[str] | None = None
    for number, fields in _tabs(lines) if delimiter == "\t" else _commas(file, lines, bad):
        if header is None:
            check_names(header := fields, "columns", str(file))
        elif len(fields) == len(header):
            yield Row(number, dict(zip(header, fields, strict=True)))
        else:
            bad(
                DataError(
                    f"{file}, line {number}: expected {len(header)} fields as in the header, got {len(fields)}: is the "
                    "file complete? Repair this line, or remove it"
                )
            )
    if header is None:
        raise DataError(f"{file}: expected a header with the names of the columns, got an empty file")


def _tabs(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if text := line.rstrip("\r\n"):
            yield number, text.split("\t")


def _commas(file: Path, lines: Iterable[str], bad: Bad) -> Iterator[tuple[int, list[str]]]:
    reader = comma_reader(lines)
    while True:
        before = reader.line_num
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            wrong = DataError(
                f"{file}, line {reader.line_num}: expected fields between commas, got a row that cannot be read "
                f"({error}): repair it, or remove it"
            )
            # An open quote swallows rows up to here: nobody knows how many.
            (refuse if reader.line_num > before + 1 or "unexpected end" in str(error) else bad)(wrong)
            continue
        if fields:
            yield reader.line_num, fields


def row_suffix(file: Path) -> str:
    """How a file of rows is read, by its name: a member of ROW_SUFFIXES without .gz; "" for what has no rows."""
    name = file.name.lower().removesuffix(".gz")
    name = name.removesuffix(".ndjson") + ".jsonl" if name.endswith(".ndjson") else name  # another name of it
    return next((each for each in ROW_SUFFIXES if name.endswith(each)), "")


def comma_reader(lines: Iterable[str], *, strict: bool = True) -> Any:
    """A `csv.reader`, of fields of any length. strict: it raises csv.Error for quotes that do not match."""
    csv.field_size_limit(sys.maxsize)  # whole documents, where Python allows 128 KB
    return csv.reader(lines, strict=strict)


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a file with their ends, without a byte order mark; only a newline ends a line, since text may hold
    other separators. Raises DataError, with file and line, for what is not UTF-8 or cannot be read."""
    number = 0
    try:
        with gzip.open(file) if file.suffix.lower() == ".gz" else open(file, "rb") as raw:
            for number, line in enumerate(raw, 1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, line {number}: expected UTF-8, got {error.object[:80]!r}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{file}, line {number + 1}: cannot be read ({error}): is the file complete? Fetch it again"
        ) from error
