"""Prepared data that is made once: a folder that is complete whenever it is there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from comera.errors import ConfigError

T = TypeVar("T")


def cache_folder(cache: str | None) -> Path:
    """The folder that holds prepared data: `cache`, or left out $XDG_CACHE_HOME/comera, or ~/.cache/comera."""
    if cache:
        return Path(cache).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "comera"


def open_or_make(folder: Path, load: Callable[[Path], T], write: Callable[[Path], object]) -> T:
    """What `load` makes of `folder`, which `write` fills first when it is missing or damaged.

    Of several processes one writes while the others wait. It writes beside, flushes to the disk and renames, so that
    one that is killed leaves nothing that looks complete, and after any error nothing is left.
    Raises ConfigError for a cache that is no folder or cannot be written to, and what `write` raises.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock")).acquire()
    except OSError as error:
        raise ConfigError(
            f"data.cache: expected a folder that can be written to, got {folder.parent} ({error})"
        ) from error
    with lock:
        if folder.exists():
            try:
                return load(folder)
            except (OSError, ValueError, KeyError, TypeError):  # damaged: made anew
                shutil.rmtree(folder)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        partial.mkdir()
        try:
            write(partial)
            for path in partial.iterdir():
                with open(path, "r+b") as file:
                    os.fsync(file.fileno())
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return load(folder)
