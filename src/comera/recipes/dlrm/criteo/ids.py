"""Maps a feature's 32-bit values to rows of its embedding table, a column at a time and in bounded memory.

    numbered: 1, 2, … in order of appearance; values rarer than min_count, and unknown ones, share 0
    hashed:   0 for a missing value, else 1 + value mod (size - 1)

Appearance follows the order of the rows, so the ids depend on the data alone."""

import os
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MISSING = 0  # the value of an empty field; it never counts as rare
UNKNOWN = 0  # the id of values that are rare or were absent when the ids were made
CHUNK = 2**18  # rows at a time
GOLDEN = np.uint32(2_654_435_769)  # 2³² / golden ratio: spreads neighboring values over the slots
# Files of a finished column, after the feature's name: ids of the rows; the known values (sorted); their ids.
IDS, VALUES, TABLE = "ids.bin", "values.npy", "table.npy"


class Numbering:
    """Numbers 32-bit values 1, 2, … in order of appearance: a hash table with open addressing. A slot holds value · 2³²
    + number, or 0 if free; a value lies in the first free slot from its hash on."""

    def __init__(self) -> None:
        self._bits = 12
        self._slots = np.zeros(1 << self._bits, np.uint64)
        self._values = np.empty(0, np.uint32)  # by number, with room to grow
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> Array:
        """The values by number, starting with number 1: uint32."""
        return self._values[: self._count]

    def find(self, values: Array) -> Array:
        """Numbers of `values`, 0 for unknown ones: int32."""
        places = self._places(values)
        slots = self._slots[places]
        pending = np.flatnonzero((slots >> np.uint64(32) != values) & (slots != 0))
        while len(pending):  # another value has their slot: try the next
            places[pending] = (places[pending] + 1) & (len(self._slots) - 1)
            slots[pending] = self._slots[places[pending]]
            pending = pending[(slots[pending] >> np.uint64(32) != values[pending]) & (slots[pending] != 0)]
        return slots.astype(np.uint32).view(np.int32)

    def add(self, values: Array) -> Array:
        """Numbers of `values`, new ones for values not seen before: int32."""
        numbers = self.find(values)
        unknown = np.flatnonzero(numbers == 0)
        if len(unknown):
            # sorts by value, then by place, as plain integers: several times faster than an argsort
            pairs = np.sort(_pack(values[unknown], 0))
            heads = np.flatnonzero(np.diff(pairs >> np.uint64(32), prepend=np.uint64(2**33)))
            first = np.sort(pairs[heads].astype(np.uint32))
            self._append(values[unknown[first]])
            numbers[unknown] = self.find(values[unknown])
        return numbers

    def _append(self, values: Array) -> None:
        first, self._count = self._count, self._count + len(values)
        if self._count > len(self._values):
            self._values = np.concatenate([self._values, np.empty(max(self._count, 1024), np.uint32)])
        self._values[first : self._count] = values
        if self._count * 3 > len(self._slots) * 2:
            while self._count * 3 > 2 << self._bits:
                self._bits += 1
            self._slots = np.zeros(1 << self._bits, np.uint64)
            first = 0
        for start in range(first, self._count, CHUNK):
            self._place(start, min(start + CHUNK, self._count))

    def _place(self, first: int, end: int) -> None:
        """Give each of these values, which have none yet, a slot."""
        values = self._values[first:end]
        entries = _pack(values, first + 1)
        places, pending = self._places(values), np.arange(len(values))
        while len(pending):
            free = pending[self._slots[places[pending]] == 0]
            self._slots[places[free]] = entries[free]  # if several collide, the last stays
            pending = pending[self._slots[places[pending]] != entries[pending]]
            places[pending] = (places[pending] + 1) & (len(self._slots) - 1)

    def _places(self, values: Array) -> Array:
        places: Array = ((values * GOLDEN) >> np.uint32(32 - self._bits)).astype(np.int64)
        return places


def _pack(values: Array, first: int) -> Array:
    """Values in the upper 32 bits, numbers from `first` on in the lower: uint64."""
    numbers = np.arange(first, first + len(values), dtype=np.uint64)
    numbers |= values.astype(np.uint64) << np.uint64(32)
    return numbers


def hashed(values: Array, size: int) -> Array:
    """Ids of values in a table of `size` rows, one of which is for missing values: int32."""
    if size == 1:
        return np.zeros(len(values), np.int32)
    return np.where(values == MISSING, 0, 1 + values % np.uint32(size - 1)).astype(np.int32)


class Lookup:
    """Ids for new rows, as in a prepared column. folder: of the prepared data. name: of the feature. size: rows of its
    table. hashing: whether ids are hashed."""

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
    partial = folder / f"{name}.partial"
    numbers, counts = Numbering(), np.zeros(1, np.int64)
    with open(raw, "rb") as source, open(partial, "wb") as target:
        while len(values := np.fromfile(source, np.uint32, CHUNK)):
            if size is None:
                ids = numbers.add(values)
                if min_count > 1:
                    counts = np.concatenate([counts, np.zeros(len(numbers) + 1 - len(counts), np.int64)])
                    counts += np.bincount(ids, minlength=len(counts))
            else:
                ids = hashed(values, size)
            ids.tofile(target)
    if size is None:
        kept = np.ones(len(numbers), bool)
        if min_count > 1:
            kept = (counts[1:] >= min_count) | (numbers.values == MISSING)
            _renumber(partial, np.concatenate([[UNKNOWN], np.where(kept, np.cumsum(kept), UNKNOWN)]).astype(np.int32))
        values = numbers.values[kept]
        del numbers  # the following needs as much memory
        order = np.argsort(values)
        np.save(folder / f"{name}.{VALUES}", values[order])
        np.save(folder / f"{name}.{TABLE}", (order + 1).astype(np.int32))
        size = len(values) + 1
    os.replace(partial, folder / f"{name}.{IDS}")
    return size


def _renumber(path: Path, ids_of: Array) -> None:
    """Replace each number in a file by its id."""
    with open(path, "r+b") as file:
        while len(numbers := np.fromfile(file, np.int32, CHUNK)):
            file.seek(-numbers.nbytes, os.SEEK_CUR)
            ids_of[numbers].tofile(file)
