"""Prepares the click log once: drops bad rows, log-transforms integers, maps categories to ids, memory-maps it all.

    files (or a synthetic log) -> columns -> ids -> in time order: six sevenths for training, then validation and test

The columns lie in a cache folder named by a digest of the files and the settings. A stopped preparation continues where
it was when called again. Memory does not grow with the number of rows: each thread needs some tens of MB, and numbering
the ids adds the dictionaries of as many features as there are threads (30 to 60 bytes per category)."""

import json
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from comera.errors import DataError
from comera.recipes.data.cache import RESUME, Progress, cache_folder, open_or_make, settings_digest
from comera.recipes.dlrm.criteo.batches import HASHED, MANIFEST, NUMBERED, PARTS, ClickData
from comera.recipes.dlrm.criteo.columns import (
    IDS,
    LABELS,
    RAW,
    TABLE,
    Columns,
    State,
    features,
    make_ids,
    read_columns,
    too_many_bad,
)
from comera.recipes.dlrm.criteo.config import HELD_OUT, LEAST_ROWS, SYNTHETIC, CriteoConfig
from comera.recipes.dlrm.criteo.rows import CriteoRows, RowFormat, find_files, is_table, open_table, stamp
from comera.recipes.dlrm.criteo.synthetic import ClickLog

_FORMAT = 3  # of the cache folder; raise it when its contents, or how they are made, change


def prepare(config: CriteoConfig, *, quiet: bool = False) -> ClickData:
    """Read the clicks that `config` names; a second call with the same files and settings opens what the first made.
    One process prepares while the others wait; a killed one leaves nothing that looks complete, and the next call
    continues where it was. Raises DataError for missing or unreadable files, for more than max_bad_rows bad rows, and
    for fewer than 14 good ones."""
    synthetic = config.path in (None, SYNTHETIC)
    files = [] if config.path is None or synthetic else find_files(config.path)
    source = [config.synthetic_rows, config.synthetic_seed] if synthetic else [stamp(file) for file in files]
    rows_of: RowFormat = CriteoRows()
    settings: list[object] = [_FORMAT, source, config.max_rows, config.hashed_sizes, config.min_count]
    if is_table(files, config):
        rows_of = open_table(files[0], config)
        settings += [config.label, config.numbers, config.categories]
    digest = settings_digest(settings)

    def write(folder: Path) -> None:
        with Progress(quiet) as progress:
            manifest = {"format": _FORMAT, "digest": digest, **_write(folder, files, config, rows_of, progress)}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        (folder / RESUME).unlink()
        if not quiet:
            _report(manifest)

    folder = cache_folder(config.cache) / f"criteo-{digest}"
    needs = "a writable folder with room for 160 bytes a row"
    data = open_or_make(folder, lambda folder: ClickData(folder, shuffle=config.shuffle), write, needs)
    if sum(data.bad.values()) > config.max_bad_rows:
        raise too_many_bad(data.bad, next(iter(data.manifest["bad_rows"].values()))[0], config.max_bad_rows)
    return data


def _write(
    parts: Path, files: list[Path], config: CriteoConfig, rows_of: RowFormat, progress: Progress
) -> dict[str, Any]:
    planted = None
    if files:
        state = read_columns(files, parts, config, rows_of, progress)
        if state.rows < LEAST_ROWS:
            raise DataError(
                f"expected at least {LEAST_ROWS} good rows, for training, validation and test, got {state.rows} in "
                f"{', '.join(map(str, files))} (bad rows: {state.bad or 'none'}): check data.path"
            )
    else:
        state, planted = _make_log(parts, config, progress)
    cuts = _cuts(state.rows)
    labels = np.memmap(parts / LABELS, np.uint8, mode="r")
    names = features(len(rows_of.categories))
    progress.start("categories to ids", len(names))
    return {
        "source": [str(file) for file in files] or SYNTHETIC,
        "rows": state.rows,
        "parts": cuts,
        "click_rate": {part: float(labels[first:end].mean()) for part, (first, end) in cuts.items()},
        "ids": NUMBERED if config.hashed_sizes is None else HASHED,
        "min_count": config.min_count,
        "numbers": len(rows_of.numbers),
        "table_sizes": _make_ids(parts, names, config, cuts["train"][1], progress),
        "bad": state.bad,
        "bad_rows": state.shown,
        "planted": planted,
    }


def _make_log(parts: Path, config: CriteoConfig, progress: Progress) -> tuple[State, dict[str, Any]]:
    """Columns of the synthetic log, and the log loss of its planted probabilities: the lowest possible."""
    rows = min(config.synthetic_rows, config.max_rows or config.synthetic_rows)
    shutil.rmtree(parts)  # quick to make: not resumed
    parts.mkdir()
    progress.start("generating a click log", rows, "rows")
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


def _make_ids(parts: Path, names: Sequence[str], config: CriteoConfig, training: int, progress: Progress) -> list[int]:
    """Ids of all features, several features at a time; returns their table sizes. training: rows to count in."""
    sizes = config.hashed_sizes or (None,) * len(names)
    earlier = {  # made by an earlier call; read before the threads begin: see `Lookup.load`
        name: size or len(np.load(parts / f"{name}.{TABLE}", mmap_mode="r")) + 1
        for name, size in zip(names, sizes, strict=True)
        if (parts / f"{name}.{IDS}").exists()
    }

    def make(name: str, size: int | None) -> int:
        raw, made = parts / f"{name}.{RAW}", earlier.get(name)
        if made is None:
            made = make_ids(raw, parts, name, size=size, min_count=config.min_count, training=training)
        raw.unlink(missing_ok=True)
        progress.add()
        return made

    with ThreadPoolExecutor(config.threads) as pool:
        return list(pool.map(make, names, sizes))


def _cuts(rows: int) -> dict[str, tuple[int, int]]:
    """First row and end of each part, in time order."""
    held_out = rows // HELD_OUT
    bounds = (0, rows - held_out, rows - held_out + held_out // 2, rows)
    return dict(zip(PARTS, pairwise(bounds), strict=True))


def _report(manifest: dict[str, Any]) -> None:
    parts = ", ".join(f"{end - first:,} {part}" for part, (first, end) in manifest["parts"].items())
    sizes, bad = manifest["table_sizes"], manifest["bad"]
    lines = [f"clicks: {parts}; {sum(sizes):,} rows in {len(sizes)} tables"]
    if manifest["planted"]:
        least = ", ".join(f"{loss:.4f} {part}" for part, loss in manifest["planted"]["loss"].items())
        lines.append(f"clicks: synthetic; lowest possible losses, those of the planted model: {least}")
    if bad:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in bad.items())
        lines.append(f"clicks: skipped {sum(bad.values()):,} bad rows ({kinds}), such as")
        lines += [f"  {rows[0]}" for rows in manifest["bad_rows"].values()]
    print("\n".join(lines), file=sys.stderr)
