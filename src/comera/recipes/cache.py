"""Prepared data, made once and reused: a cache folder that exists is complete.

Each opening reads the data whole and compares checksums, several GB a second from memory, else as fast as the disk. Of
more than VERIFIED_BYTES only small files are compared, and a line says so. Damaged data is made anew, and so is data
without checksums, of before they were written.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from comera.errors import ConfigError
from comera.files import SUMS, damage, write_sums
from comera.recipes.paths import typed_path

VERIFIED_BYTES = 64 * 2**30  # a minute from a fast disk
SMALL_BYTES = 64 * 2**20
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


def open_or_make(folder: Path, load: Callable[[Path], T], write: Callable[[Path], object]) -> T:
    """Return `load(folder)`; if the folder is missing or damaged, `write` makes it first. One process writes while the
    others wait. It writes to a folder beside, flushes to disk and renames, so a killed process leaves nothing that
    looks complete, and an error leaves nothing at all. Raises ConfigError for a cache that is not a writable folder,
    and whatever `write` raises. Errors of `load` pass through: the data is intact, but these settings cannot use it."""
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
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
        partial.mkdir()
        try:
            write(partial)
            write_sums(partial)
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
