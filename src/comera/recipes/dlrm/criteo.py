"""Criteo's click log, prepared once: bad rows out, integers to log(1 + x), categories to ids, memory-mapped.

    files (or a synthetic log) -> columns -> ids -> in order of time: six sevenths to train, then validation and test

The columns lie in a cache folder named by a digest of the files and the settings. A preparation that is stopped goes on
from where it was when it is called again. Memory does not grow with the number of rows: what it takes is some tens of
MB for each process and, when ids are numbered, the dictionaries of as many features (30 to 60 bytes a category).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from comera.errors import ConfigError, DataError
from comera.recipes.cache import cache_folder, open_or_make
from comera.recipes.dlrm.clicks import ClickLog
from comera.recipes.dlrm.criteo_batches import HASHED, MANIFEST, NUMBERED, PARTS, ClickBatch, ClickData, RowEncoder
from comera.recipes.dlrm.criteo_columns import (
    DENSE,
    FEATURES,
    LABELS,
    RAW,
    Columns,
    State,
    read_columns,
    too_many_bad,
)
from comera.recipes.dlrm.criteo_files import find_files, stamp
from comera.recipes.dlrm.criteo_ids import IDS, TABLE, VALUES, make_ids
from comera.recipes.dlrm.criteo_parse import CATEGORIES

__all__ = ["KAGGLE_TABLES", "ClickBatch", "ClickData", "CriteoConfig", "RowEncoder", "prepare"]

FORMAT = 2  # of the cache folder; raise it when what is stored or how it is made changes
SYNTHETIC = "synthetic"
HELD_OUT = 7  # the last seventh of the rows: the last day of the Kaggle data
LEAST_ROWS = 2 * HELD_OUT  # one for each part
PARSERS = 8  # processes by default, where there are more cores: one reader feeds no more

# fmt: off
KAGGLE_TABLES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)
# fmt: on


@dataclass(frozen=True)
class CriteoConfig:
    """Where the clicks come from and how their categories become rows of embedding tables."""

    path: str | None = None
    """Criteo's train.txt (Kaggle), a folder with it or with day_0, day_1, ..., any of them also as .gz; "synthetic" or
    left out: a synthetic click log with planted structure."""
    table_sizes: Literal["appearance", "kaggle"] | tuple[int, ...] = "appearance"
    """Rows of the embedding tables. "appearance": as many as there are categories, numbered in order of appearance; 26
    numbers: categories are hashed into tables of these sizes; "kaggle": into those of the full Kaggle data."""
    min_count: int = 1
    """Categories that occur less often share one row of their table; for table_sizes=appearance."""
    max_rows: int | None = None
    """Read only the first so many rows."""
    max_bad_rows: int = 1000
    """Bad rows (a wrong number of fields, a label other than 0 or 1, ...) to skip and count before it is an error."""
    shuffle: bool = True
    """Train on the rows in a random order, new in each epoch; otherwise in the order of time."""
    synthetic_rows: int = 200_000
    """Rows of the synthetic click log."""
    synthetic_seed: int = 0
    """Seed of the synthetic click log: of its planted structure and of its rows."""
    workers: int | None = None
    """Processes that parse; left out: one for each core, at most 8. The result does not depend on it."""
    cache: str | None = None
    """Folder for prepared data; left out: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        if not isinstance(self.table_sizes, str):
            object.__setattr__(self, "table_sizes", tuple(self.table_sizes))
        sizes = self.table_sizes
        named = sizes in ("appearance", "kaggle")
        given = not isinstance(sizes, str) and len(sizes) == CATEGORIES and all(0 < size < 2**31 for size in sizes)
        checks = {
            "table_sizes": (named or given, f'"appearance", "kaggle" or {CATEGORIES} numbers from 1 to 2**31 - 1'),
            "min_count": (
                self.min_count == 1 or (self.min_count > 1 and sizes == "appearance"),
                "a number above 0, and 1 unless table_sizes=appearance",
            ),
            "max_rows": (
                self.max_rows is None or self.max_rows >= LEAST_ROWS,
                f"at least {LEAST_ROWS} rows, for training, validation and test, or none",
            ),
            "max_bad_rows": (self.max_bad_rows >= 0, "0 or a number above"),
            "synthetic_rows": (self.synthetic_rows >= LEAST_ROWS, f"at least {LEAST_ROWS}"),
            "synthetic_seed": (self.synthetic_seed >= 0, "0 or a number above"),
            "workers": (self.workers is None or self.workers > 0, "a number above 0, or none"),
        }
        for name, (holds, expected) in checks.items():
            if not holds:
                raise ConfigError(f"data.{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def hashed_sizes(self) -> tuple[int, ...] | None:
        """Sizes of the tables to hash into; None numbers the categories."""
        if isinstance(self.table_sizes, str):
            return KAGGLE_TABLES if self.table_sizes == "kaggle" else None
        return self.table_sizes

    @property
    def processes(self) -> int:
        """Processes that parse."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.workers or min(cores, PARSERS)


def prepare(config: CriteoConfig, *, quiet: bool = False) -> ClickData:
    """Read the clicks that `config` names; a second call with the same files and settings opens what the first made.

    Of several processes one prepares while the others wait; one that is killed leaves nothing that looks complete, and
    the next call goes on from there.
    Raises DataError for files that are missing or unreadable, for more than max_bad_rows bad rows, and for fewer than
    14 good ones.
    """
    synthetic = config.path in (None, SYNTHETIC)
    files = [] if config.path is None or synthetic else find_files(config.path)
    source = [config.synthetic_rows, config.synthetic_seed] if synthetic else [stamp(file) for file in files]
    settings = [FORMAT, source, config.max_rows, config.hashed_sizes, config.min_count]
    digest = hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()

    def write(folder: Path) -> None:
        parts = folder.with_suffix(".parts")  # outlives this process, unlike `folder`
        try:
            with _Progress(quiet) as progress:
                manifest = {"format": FORMAT, "digest": digest, **_write(parts, files, config, progress)}
            for file in _files(config):
                (parts / file).rename(folder / file)
        except OSError as error:
            raise ConfigError(
                f"data.cache: expected a folder that can be written to, with room for 160 bytes a row, got "
                f"{folder.parent} ({error}): make room or set data.cache; what is prepared so far is kept"
            ) from error
        except DataError:
            shutil.rmtree(parts, ignore_errors=True)
            raise
        shutil.rmtree(parts, ignore_errors=True)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if not quiet:
            _report(manifest)

    folder = cache_folder(config.cache) / f"criteo-{digest}"
    data = open_or_make(folder, lambda folder: ClickData(folder, shuffle=config.shuffle), write)
    if sum(data.bad.values()) > config.max_bad_rows:
        too_many_bad(data.bad, next(iter(data.manifest["bad_rows"].values()))[0], config.max_bad_rows)
    return data


def _write(parts: Path, files: list[Path], config: CriteoConfig, progress: _Progress) -> dict[str, Any]:
    """Make the columns and their ids in `parts`; returns the manifest."""
    planted = None
    if files:
        progress.start("reading the click log", sum(file.stat().st_size for file in files))
        state = read_columns(
            files,
            parts,
            workers=config.processes,
            max_rows=config.max_rows,
            max_bad_rows=config.max_bad_rows,
            tick=progress.to,
        )
        if state.rows < LEAST_ROWS:
            raise DataError(
                f"expected at least {LEAST_ROWS} good rows, for training, validation and test, got {state.rows} in "
                f"{', '.join(map(str, files))} (bad rows: {state.bad or 'none'}): check data.path"
            )
    else:
        state, planted = _make_log(parts, config, progress)
    cuts = _cuts(state.rows)
    labels = np.memmap(parts / LABELS, np.uint8, mode="r")
    progress.start("categories to ids", CATEGORIES)
    return {
        "source": [str(file) for file in files] or SYNTHETIC,
        "rows": state.rows,
        "parts": cuts,
        "click_rate": {part: float(labels[first:end].mean()) for part, (first, end) in cuts.items()},
        "ids": NUMBERED if config.hashed_sizes is None else HASHED,
        "min_count": config.min_count,
        "table_sizes": _make_ids(parts, config, progress),
        "bad": state.bad,
        "bad_rows": state.shown,
        "planted": planted,
    }


def _make_log(parts: Path, config: CriteoConfig, progress: _Progress) -> tuple[State, dict[str, Any]]:
    """Columns of the synthetic log, and the log loss that its planted probabilities have, the least there is."""
    rows = min(config.synthetic_rows, config.max_rows or config.synthetic_rows)
    shutil.rmtree(parts, ignore_errors=True)  # quickly made: not resumed
    parts.mkdir()
    progress.start("making a click log", rows)
    losses, done = np.empty(rows, np.float32), 0
    with Columns(parts) as columns:
        for clicks in ClickLog(config.synthetic_seed).chunks(rows):
            columns.append(clicks.labels, clicks.dense(), clicks.values)
            losses[done : done + len(clicks.labels)] = clicks.losses()
            done += len(clicks.labels)
            progress.to(done, done)
    state = State(rows=rows, complete=True)
    state.save(parts)
    means = {part: float(losses[first:end].mean(dtype=np.float64)) for part, (first, end) in _cuts(rows).items()}
    return state, {"seed": config.synthetic_seed, "loss": means}


def _make_ids(parts: Path, config: CriteoConfig, progress: _Progress) -> list[int]:
    """Ids of all features, several at a time; returns the sizes of their tables."""
    sizes = config.hashed_sizes or (None,) * CATEGORIES

    def make(name: str, size: int | None) -> int:
        raw = parts / f"{name}.{RAW}"
        if not (parts / f"{name}.{IDS}").exists():
            made = make_ids(raw, parts, name, size=size, min_count=config.min_count)
        else:  # by an earlier call
            made = size or len(np.load(parts / f"{name}.{TABLE}", mmap_mode="r")) + 1
        raw.unlink(missing_ok=True)
        progress.add()
        return made

    with ThreadPoolExecutor(config.processes) as pool:
        return list(pool.map(make, FEATURES, sizes))


def _files(config: CriteoConfig) -> list[str]:
    """What a complete folder has, besides its manifest."""
    kinds = (IDS,) if config.hashed_sizes else (IDS, VALUES, TABLE)
    return [LABELS, DENSE, *(f"{name}.{kind}" for name in FEATURES for kind in kinds)]


def _cuts(rows: int) -> dict[str, tuple[int, int]]:
    """First row and end of each part, in time order."""
    held_out = rows // HELD_OUT
    bounds = (0, rows - held_out, rows - held_out + held_out // 2, rows)
    return dict(zip(PARTS, pairwise(bounds), strict=True))


def _report(manifest: dict[str, Any]) -> None:
    parts = ", ".join(f"{end - first:,} {part}" for part, (first, end) in manifest["parts"].items())
    sizes, bad = manifest["table_sizes"], manifest["bad"]
    print(f"clicks: {parts}; {sum(sizes):,} rows in {len(sizes)} tables", file=sys.stderr)
    if manifest["planted"]:
        least = ", ".join(f"{loss:.4f} {part}" for part, loss in manifest["planted"]["loss"].items())
        print(
            f"clicks: synthetic; the losses of the model that drew them, the least there are: {least}", file=sys.stderr
        )
    if bad:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
        print(f"clicks: skipped {sum(bad.values()):,} bad rows ({kinds}), such as", file=sys.stderr)
        for rows in manifest["bad_rows"].values():
            print(f"  {rows[0]}", file=sys.stderr)


class _Progress:
    """A bar on stderr, where that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        text = TextColumn("{task.fields[note]}")
        live = sys.stderr.isatty() and not quiet
        self._bar = Progress(*columns, text, console=Console(stderr=True), transient=True, disable=not live)

    def start(self, what: str, total: int) -> None:
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(what, total=total, note="")

    def to(self, done: int, rows: int) -> None:
        self._bar.update(self._task, completed=done, note=f"{rows:,} rows")

    def add(self) -> None:
        self._bar.advance(self._task)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
