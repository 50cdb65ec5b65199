"""Prepared clicks: memory-mapped columns, their batches, and new rows encoded the same way.

An epoch visits the training rows in time order, or shuffled in a way that keeps reading local: rows form runs, the
runs are shuffled, some tens of runs make a pool, and the rows of a pool are shuffled. A batch then reads from a few
places of every column, however many rows there are.
B batch, F features."""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from comera.errors import DataError
from comera.files import SUMS, damage
from comera.recipes.dlrm.criteo.columns import DENSE, IDS, LABELS, TABLE, VALUES, Lookup, features
from comera.recipes.dlrm.criteo.config import INTEGERS
from comera.recipes.dlrm.criteo.rows import Array, Rows

PARTS = ("train", "validation", "test")
MANIFEST = "manifest.json"
HASHED, NUMBERED = "hashed", "numbered"  # how ids are made
RUN = 2048  # rows that stay together: 8 KB of a column
POOL = 32  # runs whose rows are shuffled together; with more, a batch would touch more memory than the caches hold


class ClickBatch(NamedTuple):
    """dense: (B, 13) float32, log(1 + x); ids: (B, 26) int64, each feature contiguous; labels: (B,) float32. Other
    tables have as many as they have columns."""

    dense: Tensor
    ids: Tensor
    labels: Tensor


class ClickData:
    """Prepared clicks in time order, memory-mapped. table_sizes: rows of each feature's embedding table. train,
    validation, test: their ranges of rows. click_rate: of the training rows. bad: skipped rows by kind. manifest:
    everything known about the data. shuffle: whether training visits the rows in random order rather than in time
    order. Raises OSError, ValueError or KeyError if the columns are damaged."""

    def __init__(self, folder: Path, *, shuffle: bool = True) -> None:
        self.folder, self.shuffle = folder, shuffle
        self.manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        self.table_sizes: tuple[int, ...] = tuple(self.manifest["table_sizes"])
        self.train, self.validation, self.test = (range(*self.manifest["parts"][part]) for part in PARTS)
        self.click_rate: float = self.manifest["click_rate"]["train"]
        self.bad: dict[str, int] = self.manifest["bad"]
        rows = self.rows = self.test.stop
        self._labels = _column(folder / LABELS, np.uint8, rows)
        self._dense = _column(folder / DENSE, np.float32, rows, self.manifest.get("numbers", INTEGERS))
        names = features(len(self.table_sizes))
        self._ids = [_column(folder / f"{name}.{IDS}", np.int32, rows) for name in names]

    def __len__(self) -> int:
        return self.rows

    def steps_per_epoch(self, size: int, processes: int = 1) -> int:
        """Steps that cover all training rows, with `processes` batches of `size` rows per step."""
        return -(-len(self.train) // (size * processes))

    def train_batch(self, index: int, size: int, seed: int) -> ClickBatch:
        """The `index`-th batch, counted over all epochs: a pure function of its arguments. Each epoch contains every
        training row once; the next one begins within the batch in which it ends."""
        first = index * size
        if self.shuffle:
            return self._read(_shuffled(len(self.train), first, size, seed))
        epoch_end = len(self.train) - first % len(self.train)
        if size <= epoch_end:
            return self._read(slice(first % len(self.train), first % len(self.train) + size))
        return self._read(np.arange(first, first + size) % len(self.train))

    def batch_count(self, part: str, size: int) -> int:
        """Batches of `size` rows in "train", "validation" or "test"; the last may be smaller."""
        return -(-len(self._part(part)) // size)

    def batch(self, part: str, index: int, size: int) -> ClickBatch:
        """The `index`-th batch of a part, in time order; raises DataError for an unknown part or batch."""
        count = self.batch_count(part, size)
        if not 0 <= index < count:
            raise DataError(f"{part}: expected a batch from 0 to {count - 1}, got {index}")
        rows = self._part(part)[index * size : (index + 1) * size]
        return self._read(slice(rows.start, rows.stop))

    def batches(self, part: str, size: int) -> Iterator[ClickBatch]:
        """All rows of a part, in time order."""
        return (self.batch(part, index, size) for index in range(self.batch_count(part, size)))

    def _part(self, part: str) -> range:
        if part not in PARTS:
            raise DataError(f"expected a part of the data, one of {', '.join(PARTS)}, got {part!r}")
        rows: range = getattr(self, part)
        return rows

    def _read(self, rows: slice | Array) -> ClickBatch:
        labels_B = _rows_of(self._labels, rows).astype(np.float32)
        ids_FB = np.empty((len(self._ids), len(labels_B)), np.int64)
        for ids_B, column in zip(ids_FB, self._ids, strict=True):
            ids_B[:] = _rows_of(column, rows)
        dense = torch.from_numpy(_rows_of(self._dense, rows))
        return ClickBatch(dense, torch.from_numpy(ids_FB).t(), torch.from_numpy(labels_B))


class RowEncoder:
    """Turns rows in Criteo's format into batches, with the dictionaries or the hashing of a prepared folder.
    hashed_sizes: sizes of the tables to hash categories into; hashing needs no dictionaries, so the folder is not read.
    Raises DataError if the folder has no complete prepared data."""

    def __init__(self, folder: Path, *, hashed_sizes: Sequence[int] | None = None) -> None:
        hashing, sizes = hashed_sizes is not None, hashed_sizes
        try:
            if sizes is None:
                manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
                hashing, sizes = {HASHED: True, NUMBERED: False}[manifest["ids"]], manifest["table_sizes"]
                kinds = () if hashing else (VALUES, TABLE)
                read = [MANIFEST, *(f"{name}.{kind}" for name in features(len(sizes)) for kind in kinds)]
                if (folder / SUMS).exists() and (found := damage(folder, read)):  # earlier versions wrote no sums
                    raise ValueError(found)
            self.table_sizes = tuple(sizes)
            names = features(len(self.table_sizes))
            self._lookups = [
                Lookup.load(folder, name, size, hashing) for name, size in zip(names, self.table_sizes, strict=True)
            ]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"expected prepared click data in {folder}, got something else ({error}): prepare the same files with "
                "the same settings first"
            ) from error

    def encode_rows(self, rows: Rows, part: slice, labeled: bool) -> ClickBatch:
        """Some of the good rows of a parsed block; without `labeled`, their labels are NaN."""
        labels_B = rows.labels[part].astype(np.float32)
        ids_FB = np.stack([find(values[part]) for find, values in zip(self._lookups, rows.values, strict=True)])
        return ClickBatch(
            torch.from_numpy(np.ascontiguousarray(rows.dense[:, part].T)),
            torch.from_numpy(ids_FB.astype(np.int64)).t(),
            torch.from_numpy(labels_B if labeled else np.full_like(labels_B, np.nan)),
        )


def _rows_of(column: Array, rows: slice | Array) -> Array:
    """A copy of some rows of a column."""
    return np.array(column[rows]) if isinstance(rows, slice) else column.take(rows, 0)


def _column(file: Path, dtype: type[np.generic], *shape: int) -> Array:
    if file.stat().st_size != np.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError(f"{file} does not have {shape[0]:,} rows")
    return np.asarray(np.memmap(file, dtype, mode="r", shape=shape))


def _shuffled(rows: int, first: int, count: int, seed: int) -> Array:
    """Rows `first` to `first + count` of an endless sequence of shuffled epochs, sorted for reading."""
    taken = []
    while count:
        epoch, place = divmod(first, rows)
        starts = _epoch(rows, seed, epoch)[1]
        pool = int(np.searchsorted(starts, place, "right")) - 1
        offset = place - int(starts[pool])
        part = _pool(rows, seed, epoch, pool)[offset : offset + count]
        taken.append(part)
        first, count = first + len(part), count - len(part)
    return np.sort(np.concatenate(taken))


def _run_bounds(rows: int) -> Array:
    """Starts of runs of near-equal length, then the end of the last."""
    runs = -(-rows // RUN)
    return np.arange(runs + 1) * rows // runs


@lru_cache(maxsize=4)
def _epoch(rows: int, seed: int, epoch: int) -> tuple[Array, Array]:
    """The runs in the order of an epoch, and where each pool begins."""
    lengths = np.diff(_run_bounds(rows))
    runs = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths[runs])])[:-1:POOL]
    return runs, starts


@lru_cache(maxsize=8)
def _pool(rows: int, seed: int, epoch: int, pool: int) -> Array:
    """The rows of a pool, shuffled."""
    bounds, runs = _run_bounds(rows), _epoch(rows, seed, epoch)[0][pool * POOL : (pool + 1) * POOL]
    members = np.concatenate([np.arange(bounds[run], bounds[run + 1]) for run in runs])
    return np.random.default_rng([seed, epoch, 1 + pool]).permutation(members)
