"""Prepared data, made once and reused: a cache folder that exists is complete."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from comera.errors import ConfigError, DataError
from comera.recipes.paths import typed_path

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


def open_or_make(folder: Path, load: Callable[[Path], T], write: Callable[[Path], object]) -> T:
    """Return `load(folder)`; if the folder is missing or damaged, `write` makes it first. One process writes while the
    others wait. It writes to a folder beside, flushes to disk and renames, so a killed process leaves nothing that
    looks complete, and an error leaves nothing at all. Raises ConfigError for a cache that is not a writable folder,
    and whatever `write` raises. A DataError of `load` passes through: the folder is sound, but these settings cannot
    use it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f"{folder.name}.lock")).acquire()
    except OSError as error:
        raise ConfigError(f"data.cache: expected a writable folder, got {folder.parent} ({error})") from error
    with lock:
        if folder.exists():
            try:
                return load(folder)
            except DataError:
                raise
            except (OSError, ValueError, KeyError, TypeError):  # damaged: made anew
                shutil.rmtree(folder)
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        try:
            write(partial)
            for path in partial.iterdir():
                with open(path, "r+b") as file:
                    os.fsync(file.fileno())
            partial.rename(folder)
        except OSError as error:
            # An error without a name is of an open file, one with it may be of what is read.
            if error.filename is not None and folder.parent not in Path(os.fsdecode(error.filename)).parents:
                raise
            raise ConfigError(
                f"data.cache: expected room for the prepared data, got {folder.parent} ({error.strerror or error}): "
                "make room there, or give another folder"
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return load(folder)
