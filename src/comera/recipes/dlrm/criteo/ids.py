"""Maps a feature's 32-bit values to rows of its embedding table, a column at a time and in bounded memory.

    numbered: 1, 2, … in order of appearance; values rarer than min_count, and unknown ones, share 0
    hashed:   0 for a missing value, else 1 + value mod (size - 1)

Appearance follows the order of the rows, so the ids depend on the data alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from comera.recipes.dlrm.criteo.parse import Array

MISSING = 0  # the value of an empty field; it never counts as rare
UNKNOWN = 0  # the id of values that are rare or were absent when the ids were made
CHUNK = 2**18  # rows at a time
# Files of a finished column, after the feature's name: ids of the rows; the known values (sorted); their ids.
IDS, VALUES, TABLE = "ids.bin", "values.npy", "table.npy"


def hashed(values: Array, size: int) -> Array:
    """Ids of values in a table of `size` rows, one of which is for missing values: int32."""
    if size == 1:
        return np.zeros(len(values), np.int32)
    return np.where(values == MISSING, 0, 1 + values % np.uint32(size - 1)).astype(np.int32)


class Lookup:
    """Ids for rows, old or new, of a prepared column. folder: of the prepared data. name: of the feature. size: rows of
    its table. hashing: whether ids are hashed."""

    def __init__(self, folder: Path, name: str, size: int, hashing: bool) -> None:
        self.size, self.hashing = size, hashing
        if not hashing:
            self._values = np.load(folder / f"{name}.{VALUES}", mmap_mode="r")
            self._ids = np.load(folder / f"{name}.{TABLE}", mmap_mode="r")

    def __call__(self, values: Array) -> Array:
        """Ids of uint32 values: int32, UNKNOWN for values not in the dictionary."""
        if self.hashing:
            return hashed(values, self.size)
        if not len(self._values):
            return np.full(len(values), UNKNOWN, np.int32)
        places = np.minimum(np.searchsorted(self._values, values), len(self._values) - 1)
        ids: Array = np.where(self._values[places] == values, self._ids[places], np.int32(UNKNOWN))
        return ids


def make_ids(raw: Path, folder: Path, name: str, *, size: int | None, min_count: int) -> int:
    """Write NAME.ids.bin, int32, from a column of uint32 values; returns the size of its table. size: of the table to
    hash into; None numbers the values, and also writes them (sorted, NAME.values.npy) and their ids (NAME.table.npy).
    The ids get their final name once everything is complete."""
    hashing = size is not None
    if size is None:
        kept = _distinct(raw).filter((pl.col("value") == MISSING) | (pl.col("count") >= min_count))
        table = kept.select(pl.col("value"), id=pl.int_range(1, pl.len() + 1, dtype=pl.Int32)).sort("value")
        np.save(folder / f"{name}.{VALUES}", table["value"].to_numpy())
        np.save(folder / f"{name}.{TABLE}", table["id"].to_numpy())
        size = len(table) + 1
    partial, ids_of = folder / f"{name}.partial", Lookup(folder, name, size, hashing)
    with open(partial, "wb") as target:
        for values in _chunks(raw):
            ids_of(values).tofile(target)
    os.replace(partial, folder / f"{name}.{IDS}")
    return size


def _distinct(raw: Path) -> pl.DataFrame:
    """The values of a column in order of appearance, and how often each occurs. Chunks are merged into the result when
    together they have as many values as it has: its size bounds the memory, and each value is merged a few times."""
    merged, waiting, size = _counted([]), [], 0
    for values in _chunks(raw):
        waiting.append(_counted([pl.DataFrame({"value": values, "count": np.ones(len(values), np.int64)})]))
        size += len(waiting[-1])
        if size > len(merged):
            merged, waiting, size = _counted([merged, *waiting]), [], 0
    return _counted([merged, *waiting])


def _counted(parts: list[pl.DataFrame]) -> pl.DataFrame:
    """The sums of equal values' counts."""
    parts = [pl.DataFrame(schema={"value": pl.UInt32, "count": pl.Int64}), *parts]
    return pl.concat(parts).group_by("value", maintain_order=True).sum()


def _chunks(raw: Path) -> Iterator[Array]:
    with open(raw, "rb") as source:
        while len(values := np.fromfile(source, np.uint32, CHUNK)):
            yield values
