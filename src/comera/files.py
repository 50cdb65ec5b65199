"""Files replaced as a whole, checksums that show whether a folder's files are intact, and paths as users type them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

import xxhash

from comera.errors import ConfigError

NO_ROOM = (ENOSPC, EDQUOT, EFBIG)  # errors of a disk that is full, or of what a user may put on it
SUMS = "XXH128SUMS"  # in the format of the program xxh128sum, as SHA256SUMS is in that of sha256sum
_SUM = re.compile(r"([0-9a-f]{32})  ([^/\n]+)")


def typed_path(text: str, name: str) -> Path:
    """A path with ~ expanded. name: of the option. Raises ConfigError for one that cannot be."""
    try:
        if not text.strip():
            raise ValueError("it is empty")
        text.encode()  # safetensors and YAML take no other paths
        path = Path(text).expanduser()
        path.resolve()
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"{name}: expected a path, got {text!r} ({error})") from None
    return path


def replace_file(path: Path, content: str | bytes | Callable[[Path], object]) -> Path:
    """Write a temporary file in the same folder, flush it to disk and rename it to `path`; returns `path`.

    Readers see the old file or the new one, never a mixture. After an error the old file is unchanged. The file gets
    the permissions that the user's umask gives new files, whatever wrote it.
    content: text (written as UTF-8), bytes, or a function that writes to the path it is given.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.touch()
        mode = beside.stat().st_mode
        if isinstance(content, str | bytes):
            beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        else:
            content(beside)
        beside.chmod(mode)
        with open(beside, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def replace_folder(beside: Path, path: Path) -> None:
    """Put the folder `beside` in the place of the folder `path`, if there is one, and delete that.

    Where the system can exchange both names at once, `path` is a whole folder at every moment, the old one or the new
    one; elsewhere (not Linux, some network file systems) it is missing between two renames. A process that is killed
    leaves the old one under the name of `beside` or, after two renames, under that name with ".old".
    """
    old = beside
    if not path.exists():
        beside.rename(path)
    elif not _exchange(beside, path):
        old = path.rename(beside.with_name(f"{beside.name}.old"))
        beside.rename(path)
    flush(path.parent)
    if old.exists():
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Give each of two folders the name of the other at once; False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    names = (os.fsencode(path.absolute()) for path in (one, other))
    return rename is not None and not rename(here, next(names), here, next(names), exchange)


def flush(path: Path) -> None:
    """Flush a file or a folder to disk (Windows cannot open folders)."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_sums(folder: Path) -> None:
    """Write XXH128SUMS: the checksums of all files in a folder. `xxh128sum -c XXH128SUMS` checks them, too."""
    sums = {path.name: _sum(path) for path in sorted(folder.iterdir()) if path.name != SUMS}
    replace_file(folder / SUMS, _lines(sums))


def damage(folder: Path, names: Collection[str]) -> str | None:
    """How a folder differs from what `write_sums` found there, in a few words; None if it is intact.

    Reads the files `names` whole; of the others that have a checksum it only asks whether they are there. Damaged
    checksums count as damage, too, and so does a file of `names` without one.
    """
    try:
        text = (folder / SUMS).read_bytes().decode("utf-8")
    except FileNotFoundError:
        return f"it has no {SUMS}"
    except (OSError, ValueError) as error:
        return f"{SUMS} is unreadable: {error}"
    sums = {line[2]: line[1] for line in map(_SUM.fullmatch, text.splitlines()) if line}
    if text != _lines(sums):
        return f"{SUMS} is damaged"
    for name in sorted({*names, *sums}):
        if name not in sums:
            return f"{SUMS} lacks {name}"
        if not (folder / name).exists():
            return f"it has no {name}"
        try:
            if name in names and _sum(folder / name) != sums[name]:
                return f"{name} differs from its checksum"
        except OSError as error:
            return f"{name} is unreadable: {error}"
    return None


def _lines(sums: Mapping[str, str]) -> str:
    return "".join(f"{value}  {name}\n" for name, value in sums.items())


def _sum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
