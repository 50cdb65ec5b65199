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
        order = np.argsort(values)  # searching in order is several times faster in a large dictionary
        wanted, ids = values[order], np.empty(len(values), np.int32)
        places = np.minimum(np.searchsorted(self._values, wanted), len(self._values) - 1)
        ids[order] = np.where(self._values[places] == wanted, self._ids[places], UNKNOWN)
        return ids


def make_ids(raw: Path, folder: Path, name: str, *, size: int | None, min_count: int) -> int:
    """Write NAME.ids.bin, int32, from a column of uint32 values; returns the size of its table. size: of the table to
    hash into; None numbers the values, and also writes them (sorted, NAME.values.npy) and their ids (NAME.table.npy).
    The ids get their final name once everything is complete."""
    if size is None:
        values = _distinct(raw)
        lookup = _save_numbers(values, folder, name)
        if min_count > 1:
            counts = np.zeros(lookup.size, np.int64)
            for chunk in _chunks(raw):
                counts += np.bincount(lookup(chunk), minlength=lookup.size)
            lookup = _save_numbers(values[(counts[1:] >= min_count) | (values == MISSING)], folder, name)
    else:
        lookup = Lookup(folder, name, size, hashing=True)
    partial = folder / f"{name}.partial"
    with open(partial, "wb") as target:
        for chunk in _chunks(raw):
            lookup(chunk).tofile(target)
    os.replace(partial, folder / f"{name}.{IDS}")
    return lookup.size


def _save_numbers(values: Array, folder: Path, name: str) -> Lookup:
    """Write the dictionary that numbers these values 1, 2, …"""
    order = np.argsort(values)
    np.save(folder / f"{name}.{VALUES}", values[order])
    np.save(folder / f"{name}.{TABLE}", (order + 1).astype(np.int32))
    return Lookup(folder, name, len(values) + 1, hashing=False)


def _distinct(raw: Path) -> Array:
    """The values of a column in order of appearance. Those of single chunks are merged into the others when they are as
    many: their number bounds the memory, and each is merged a few times only."""
    values, found = pl.Series(dtype=pl.UInt32), pl.Series(dtype=pl.UInt32)
    for chunk in _chunks(raw):
        found = found.append(pl.Series(chunk).unique(maintain_order=True))
        if len(found) > len(values):
            values, found = values.append(found).unique(maintain_order=True), found.clear()
    return values.append(found).unique(maintain_order=True).to_numpy()


def _chunks(raw: Path) -> Iterator[Array]:
    with open(raw, "rb") as source:
        while len(values := np.fromfile(source, np.uint32, CHUNK)):
            yield values
