"""Prepared data, made once and reused: a cache folder that exists is complete; rows on their way there, and a progress
bar for the wait.

Each opening reads the data whole and compares checksums, several GB a second from memory, else as fast as the disk. Of
more than VERIFIED_BYTES only small files are compared, and a line says so. Damaged data is made anew, and so is data
without checksums, of before they were written.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock
from rich import progress as rich
from rich.console import Console

from comera.errors import ConfigError
from comera.files import SUMS, damage, typed_path, write_sums

RESUME = "resume.json"  # in a folder on its way: what is done of it, by which a killed preparation goes on
VERIFIED_BYTES = 64 * 2**30  # a minute from a fast disk
SMALL_BYTES = 64 * 2**20
GATHERED_ROWS = 256  # written at a time
_log = logging.getLogger(__name__)

T = TypeVar("T")


def cache_folder(cache: str | None) -> Path:
    """The folder for prepared data: `cache`, by default $XDG_CACHE_HOME/comera or ~/.cache/comera."""
    if cache is not None:
        return typed_path(cache, "data.cache")
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "comera"


def settings_digest(settings: list[object]) -> str:
    """A digest of JSON-ready settings, to name a cache folder after."""
    return hashlib.blake2b(json.dumps(settings).encode(), digest_size=12).hexdigest()


def open_or_make(folder: Path, load: Callable[[Path], T], write: Callable[[Path], object], needs: str = "room") -> T:
    """Return `load(folder)`; if the folder is missing or damaged, `write` makes it first. One process writes while the
    others wait. It writes to a folder beside, flushes to disk and renames, so a killed process leaves nothing that
    looks complete, and an error leaves nothing at all. One that was killed or interrupted, or that lacked room, and had
    written RESUME gets its folder again. needs: how much room, in words. Raises ConfigError for a cache that is not a
    writable folder, and whatever `write` raises. Errors of `load` pass through: the data is intact, but these settings
    cannot use it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock")).acquire()
    except OSError as error:
        raise ConfigError(f"data.cache: expected a writable folder, got {folder.parent} ({error})") from error
    with lock:
        if folder.exists():
            if (found := _damage(folder)) is None:
                return load(folder)
            _log.warning("prepared data in %s is damaged (%s): it is made anew", folder, found)
            shutil.rmtree(folder)
        partial = folder.with_name(f"{folder.name}.partial")
        if not (partial / RESUME).exists():
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir(exist_ok=True)
        try:
            write(partial)
            write_sums(partial)
            for path in partial.iterdir():
                with open(path, "r+b") as file:
                    os.fsync(file.fileno())
            partial.rename(folder)
        except BaseException as error:
            # An error without a name is of an open file, one with it may be of what is read.
            name = error.filename if isinstance(error, OSError) else None
            lacking = isinstance(error, OSError) and (name is None or folder.parent in Path(os.fsdecode(name)).parents)
            kept = (partial / RESUME).exists() and (lacking or not isinstance(error, Exception))
            if not kept:
                shutil.rmtree(partial, ignore_errors=True)
            if not lacking:
                raise
            raise ConfigError(
                f"data.cache: expected {needs} for the prepared data, got {folder.parent} ({error}): make room there, "
                f"or set data.cache to another folder{'; what is prepared so far is kept' if kept else ''}"
            ) from error
        return load(folder)


def gather(folder: Path, rows: Iterable[Mapping[str, Any]], kinds: Mapping[str, str]) -> Any:
    """Rows in an Arrow file, memory-mapped, as a `datasets.Dataset`: what is read once can be passed over again and
    again. kinds: the type of each column. folder: where the file lies, without a name, until nobody reads it."""
    import pyarrow as pa
    from datasets import Dataset

    file, left = folder / "rows.arrow", iter(rows)
    schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
        while chunk := list(islice(left, GATHERED_ROWS)):
            writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
    data = Dataset.from_file(str(file))
    file.unlink()
    return data


def _damage(folder: Path) -> str | None:
    """How prepared data differs from its checksums; None if it is intact, as far as its size lets it be read whole."""
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if not path.name.startswith(".")}
    whole = sum(sizes.values())
    if whole > VERIFIED_BYTES:
        _log.warning(
            "prepared data in %s: of its %.0f GB only files up to %.0f MB were compared with their checksums; "
            "to compare all, run xxh128sum -c %s there",
            *(folder, whole / 1e9, SMALL_BYTES / 1e6, SUMS),
        )
        sizes = {name: size for name, size in sizes.items() if size <= SMALL_BYTES}
    return damage(folder, sizes.keys() - {SUMS})


class Progress(ExitStack):
    """A context manager that shows a progress bar on stderr; silent if `quiet`, or if stderr is no terminal."""

    def __init__(self, quiet: bool) -> None:
        super().__init__()
        columns = (
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TimeRemainingColumn(),
            rich.TextColumn("{task.fields[note]}"),
        )
        live = sys.stderr.isatty() and not quiet
        bar = rich.Progress(*columns, console=Console(stderr=True), transient=True, disable=not live)
        self._bar = self.enter_context(bar)

    def start(self, what: str, total: int | None, unit: str = "") -> None:
        """Begin a new bar in place of the last one; total: None if unknown; unit: of the count in `to`."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task, self._unit = self._bar.add_task(what, total=total, note=""), unit

    def to(self, done: int, count: int | None = None) -> None:
        """Move the bar to `done` of the total; count: items processed, shown beside the bar."""
        self._bar.update(self._task, completed=done, note="" if count is None else f"{count:,} {self._unit}")

    def add(self, amount: int = 1) -> None:
        """Move the bar forward; any thread may call this."""
        self._bar.advance(self._task, amount)
