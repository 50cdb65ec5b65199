"""Criteo's rows as columns on disk: several blocks parsed at a time, written in order, resumable; and their values as
rows of the embedding tables, a column at a time and in bounded memory.

    blocks of text -> parsing threads -> label.bin (N,) uint8, dense.bin (N, 13) float32, C01.raw, … (N,) uint32

    numbered: 1, 2, … in order of appearance; values rarer than min_count in training, and unknown ones, share 0
    hashed:   0 for a missing value, else 1 + value mod (size - 1)

The columns grow as rows arrive; RESUME regularly records how far they are good, and a killed preparation resumes
there."""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from comera.errors import DataError
from comera.files import replace_file
from comera.recipes.data.cache import RESUME, Progress
from comera.recipes.dlrm.criteo.config import CATEGORIES, INTEGERS, CriteoConfig
from comera.recipes.dlrm.criteo.rows import (
    BLOCK,
    CUT_SHORT,
    END_MISSING,
    MISSING,
    START,
    Array,
    Block,
    Place,
    RowFormat,
    Rows,
    read_blocks,
)

LABELS, DENSE, RAW = "label.bin", "dense.bin", "raw"
UNKNOWN = 0  # the id of values that are rare or were absent when the ids were made
CHUNK = 2**18  # rows at a time
# Files of a finished column, after the feature's name: ids of the rows; the known values (sorted); their ids.
IDS, VALUES, TABLE = "ids.bin", "values.npy", "table.npy"
CHECKPOINT = 100  # blocks between two saves of the state
BLOCKS_EACH = 4  # that make a thread worth starting
SHOWN = 3  # bad rows of each kind to show


def features(categories: int = CATEGORIES) -> tuple[str, ...]:
    """Names of the categorical columns: C01, C02, …"""
    return tuple(f"C{k:02}" for k in range(1, categories + 1))


def row_bytes(numbers: int = INTEGERS, categories: int = CATEGORIES) -> dict[str, int]:
    """Bytes of a row in each file."""
    return {LABELS: 1, DENSE: 4 * numbers, **{f"{name}.{RAW}": 4 for name in features(categories)}}


ROW_BYTES = row_bytes()  # of Criteo's rows


@dataclass
class State:
    """How far the columns are good. rows: good rows written. bad: bad rows by kind. shown: the first few of each kind,
    with file, line and mistake."""

    place: Place = START
    rows: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    shown: dict[str, list[str]] = field(default_factory=dict)
    complete: bool = False

    def save(self, folder: Path) -> None:
        replace_file(folder / RESUME, json.dumps(asdict(self)))

    @classmethod
    def load(cls, folder: Path, sizes: Mapping[str, int] = ROW_BYTES) -> State | None:
        """The state of unfinished columns; None if there are none or they are damaged. sizes: bytes of a row in each
        file."""
        try:
            values = json.loads((folder / RESUME).read_text("utf-8"))
            state = cls(**{**values, "place": Place(*values["place"])})
            whole = all(_column(folder, name).stat().st_size >= state.rows * size for name, size in sizes.items())
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return state if whole else None


def _column(folder: Path, name: str) -> Path:
    """The file of a column: the ids, once they have replaced the values."""
    ids = folder / f"{name.split('.')[0]}.{IDS}"
    return ids if ids.exists() else folder / name


class Columns(ExitStack):
    """The files of the columns, open for appending; anything after the first `rows` rows is cut off. sizes: bytes of a
    row in each."""

    def __init__(self, folder: Path, rows: int = 0, sizes: Mapping[str, int] = ROW_BYTES) -> None:
        super().__init__()
        self._files = [self.enter_context(open(folder / name, "ab", buffering=0)) for name in sizes]  # noqa: SIM115
        for file, size in zip(self._files, sizes.values(), strict=True):
            file.truncate(rows * size)

    def append(self, labels: Array, dense: Array, values: Array) -> None:
        """Add rows: labels (R,), dense (13, R), values (26, R), or as many as a table has."""
        for file, array in zip(self._files, [labels, dense.T, *values], strict=True):
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            while data:
                data = data[file.write(data) :]


def read_columns(
    files: Sequence[Path], folder: Path, config: CriteoConfig, rows_of: RowFormat, progress: Progress
) -> State:
    """Parse the files into columns in `folder`, from where an earlier call stopped; returns the complete state. Raises
    DataError, with file and line, for the first bad row beyond max_bad_rows, and for unreadable files."""
    sizes = row_bytes(len(rows_of.numbers), len(rows_of.categories))
    if (state := State.load(folder, sizes)) is None:
        shutil.rmtree(folder)
        folder.mkdir()
        state = State(rows_of.start)
        state.save(folder)
    if state.complete:
        return state
    size, max_rows = sum(file.stat().st_size for file in files), config.max_rows
    progress.start("reading the click log", size, "rows")
    workers = max(1, min(config.threads, size // (BLOCK * BLOCKS_EACH)))
    read = read_blocks(files, state.place)
    with Columns(folder, state.rows, sizes) as columns, closing(parsed(read, workers, rows_of)) as blocks:
        for number, (block, rows) in enumerate(blocks, 1):
            if max_rows is not None and len(rows.labels) > max_rows - state.rows:  # only as far as the last row wanted
                last = rows.places[max_rows - state.rows - 1]
                rows = rows_of.parse(b"\n".join([*block.text.split(b"\n")[: last + 1], b""]))
            _note_bad(state, files, block, rows, config.max_bad_rows)
            columns.append(rows.labels, rows.dense, rows.values)
            state.rows += len(rows.labels)
            state.place = block.end
            progress.to(block.read, state.rows)
            if state.rows == max_rows:
                break
            if number % CHECKPOINT == 0:
                state.save(folder)
    state.complete = True
    state.save(folder)
    return state


def _note_bad(state: State, files: Sequence[Path], block: Block, rows: Rows, limit: int) -> None:
    """Count the bad rows of a block; raises DataError for the first one beyond the limit."""
    for line, kind, what in [*rows.bad, *([(0, CUT_SHORT, END_MISSING)] if block.cut_short else [])]:
        state.bad[kind] = state.bad.get(kind, 0) + 1
        shown = state.shown.setdefault(kind, [])
        over = sum(state.bad.values()) > limit
        if over or len(shown) < SHOWN:
            shown.append(f"{files[block.begin.file]}, line {block.begin.line + line + 1}: {what}")
            if over:
                raise too_many_bad(state.bad, shown[-1], limit)


def too_many_bad(bad: dict[str, int], last: str, limit: int) -> DataError:
    """The error for more bad rows than allowed; last: one of them, with file and line."""
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
    return DataError(
        f"{last}; that makes {sum(bad.values()):,} bad rows ({kinds}), and data.max_bad_rows allows {limit:,}: is this "
        "the click log, and complete? Repair the file, or raise data.max_bad_rows to skip such rows"
    )


def parsed(blocks: Iterable[Block], workers: int, rows_of: RowFormat) -> Generator[tuple[Block, Rows], None, None]:
    """Blocks with their rows, in order; `workers` blocks are parsed at a time, and few more are held."""
    waiting: deque[tuple[Block, Future[Rows]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for block in blocks:
            waiting.append((block, pool.submit(rows_of.parse, block.text)))
            if len(waiting) > 2 * (workers - 1):
                block, rows = waiting.popleft()
                yield block, rows.result()
        yield from ((block, rows.result()) for block, rows in waiting)


def hashed(values: Array, size: int) -> Array:
    """Ids of values in a table of `size` rows, one of which is for missing values: int32."""
    if size == 1:
        return np.zeros(len(values), np.int32)
    return np.where(values == MISSING, 0, 1 + values % np.uint32(size - 1)).astype(np.int32)


class Lookup:
    """Ids for rows, old or new, of a prepared column. size: rows of its table. dictionary: its sorted values and their
    ids; None for ids that are hashed."""

    def __init__(self, size: int, dictionary: tuple[Array, Array] | None = None) -> None:
        self.size, self._dictionary = size, dictionary

    @classmethod
    def load(cls, folder: Path, name: str, size: int, hashing: bool) -> Lookup:
        """That of a feature in a folder of prepared data. Call it in one thread at a time: numpy parses the headers of
        its files as Python, which fails in Python up to 3.11.7 and 3.12.1 where several threads do."""
        if hashing:
            return cls(size)
        return cls(size, tuple(np.load(folder / f"{name}.{part}", mmap_mode="r") for part in (VALUES, TABLE)))

    def __call__(self, values: Array) -> Array:
        """Ids of uint32 values: int32, UNKNOWN for values not in the dictionary."""
        if self._dictionary is None:
            return hashed(values, self.size)
        known, numbers = self._dictionary
        if not len(known):
            return np.full(len(values), UNKNOWN, np.int32)
        order = np.argsort(values)  # searching in order is several times faster in a large dictionary
        wanted, ids = values[order], np.empty(len(values), np.int32)
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        ids[order] = np.where(known[places] == wanted, numbers[places], UNKNOWN)
        return ids


def make_ids(raw: Path, folder: Path, name: str, *, size: int | None, min_count: int, training: int) -> int:
    """Write NAME.ids.bin, int32, from a column of uint32 values; returns the size of its table. size: of the table to
    hash into; None numbers the values, and also writes them (sorted, NAME.values.npy) and their ids (NAME.table.npy).
    The ids get their final name once everything is complete."""
    if size is None:
        values = _distinct(raw)
        lookup = _save_numbers(values, folder, name)
        if min_count > 1:
            counts = np.zeros(lookup.size, np.int64)
            for chunk in _chunks(raw, training):
                counts += np.bincount(lookup(chunk), minlength=lookup.size)
            lookup = _save_numbers(values[(counts[1:] >= min_count) | (values == MISSING)], folder, name)
    else:
        lookup = Lookup(size)
    partial = folder / f"{name}.partial"
    with open(partial, "wb") as target:
        for chunk in _chunks(raw):
            lookup(chunk).tofile(target)
    os.replace(partial, folder / f"{name}.{IDS}")
    return lookup.size


def _save_numbers(values: Array, folder: Path, name: str) -> Lookup:
    """Write the dictionary that numbers these values 1, 2, …"""
    order = np.argsort(values)
    dictionary = values[order], (order + 1).astype(np.int32)
    for part, array in zip((VALUES, TABLE), dictionary, strict=True):
        np.save(folder / f"{name}.{part}", array)
    return Lookup(len(values) + 1, dictionary)  # from memory: see `Lookup.load`


def _distinct(raw: Path) -> Array:
    """The values of a column in order of appearance. Those of single chunks are merged into the others when they are as
    many: their number bounds the memory, and each is merged a few times only."""
    values, found = pl.Series(dtype=pl.UInt32), pl.Series(dtype=pl.UInt32)
    for chunk in _chunks(raw):
        found = found.append(pl.Series(chunk).unique(maintain_order=True))
        if len(found) > len(values):
            values, found = values.append(found).unique(maintain_order=True), found.clear()
    return values.append(found).unique(maintain_order=True).to_numpy()


def _chunks(raw: Path, rows: int = 2**62) -> Iterator[Array]:
    """The values of the first rows."""
    with open(raw, "rb") as source:
        while len(values := np.fromfile(source, np.uint32, min(CHUNK, rows))):
            yield values
            rows -= len(values)
