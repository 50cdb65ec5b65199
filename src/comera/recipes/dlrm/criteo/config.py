"""Where the clicks come from and how categories map to rows; the text under a field is its command-line help."""

import os
from dataclasses import dataclass
from typing import Literal

from comera.errors import check_fields

INTEGERS, CATEGORIES = 13, 26
SYNTHETIC = "synthetic"
HELD_OUT = 7  # the last seventh of the rows is held out: the last day of the Kaggle data
LEAST_ROWS = 2 * HELD_OUT  # at least one row for each part
_MOST_THREADS = 8  # the default never starts more: one reader cannot feed them

# fmt: off
KAGGLE_TABLES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on


@dataclass(frozen=True)
class CriteoConfig:
    """The click log and how its categories map to rows of embedding tables."""

    path: str | None = None
    """Criteo's train.txt (Kaggle), a folder that contains it or day_0, day_1, ..., or a table of one's own (.csv, .tsv)
    with a header; files may be gzipped. The default is "synthetic", a generated click log with planted structure."""
    label: str = "label"
    """Column of a table that holds 0 or 1."""
    numbers: tuple[str, ...] = ()
    """Columns of a table that hold numbers, such as "[age, price]"; x becomes sign(x) log(1 + |x|)."""
    categories: tuple[str, ...] = ()
    """Columns of a table that hold categories, any text; each one gets an embedding table."""
    table_sizes: Literal["appearance", "kaggle"] | tuple[int, ...] = "appearance"
    """Rows of the embedding tables. "appearance": one per category, numbered in order of appearance; 26 sizes: hash
    the categories into tables of these sizes; "kaggle": hash them into tables of the full Kaggle data's sizes."""
    min_count: int = 1
    """Categories that occur less often in the training rows share one row of their table, and new ones with them;
    requires table_sizes=appearance."""
    max_rows: int | None = None
    """Read at most this many rows."""
    max_bad_rows: int = 1000
    """Bad rows (wrong number of fields, label other than 0 or 1, ...) to skip and count before giving up."""
    shuffle: bool = True
    """Shuffle the training rows anew in each epoch; otherwise keep them in time order."""
    synthetic_rows: int = 200_000
    """Rows of the synthetic click log."""
    synthetic_seed: int = 0
    """Seed of the synthetic click log: of its planted structure and its rows."""
    workers: int | None = None
    """Threads that prepare the log; default: one per core, at most 8. The result does not depend on it."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        if not isinstance(self.table_sizes, str):
            object.__setattr__(self, "table_sizes", tuple(self.table_sizes))
        for name in ("numbers", "categories"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes, count = self.table_sizes, len(self.categories) or CATEGORIES
        columns = [self.label, *self.numbers, *self.categories]
        named = sizes == "appearance" or (sizes == "kaggle" and not self.categories)
        listed = not isinstance(sizes, str) and len(sizes) == count and all(0 < size < 2**31 for size in sizes)
        checks = {
            "categories": (len(set(columns)) == len(columns), "columns that are neither data.label nor data.numbers"),
            "table_sizes": (named or listed, f'"appearance", "kaggle" or {count} sizes from 1 to 2**31 - 1'),
            "min_count": (
                self.min_count == 1 or (self.min_count > 1 and sizes == "appearance"),
                "a number >= 1, and 1 unless table_sizes=appearance",
            ),
            "max_rows": (
                self.max_rows is None or self.max_rows >= LEAST_ROWS,
                f"at least {LEAST_ROWS} rows, for training, validation and test, or none",
            ),
            "max_bad_rows": (self.max_bad_rows >= 0, "a number >= 0"),
            "synthetic_rows": (self.synthetic_rows >= LEAST_ROWS, f"at least {LEAST_ROWS}"),
            "synthetic_seed": (self.synthetic_seed >= 0, "a number >= 0"),
            "workers": (self.workers is None or self.workers > 0, "a number > 0, or none"),
        }
        check_fields(self, "data.", checks)

    @property
    def hashed_sizes(self) -> tuple[int, ...] | None:
        """Sizes of the tables to hash into; None if categories are numbered instead."""
        if isinstance(self.table_sizes, str):
            return KAGGLE_TABLES if self.table_sizes == "kaggle" else None
        return self.table_sizes

    @property
    def number_count(self) -> int:
        """Numbers of a row."""
        return len(self.numbers) or INTEGERS

    @property
    def threads(self) -> int:
        """Threads that prepare the log."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.workers or min(cores, _MOST_THREADS)
