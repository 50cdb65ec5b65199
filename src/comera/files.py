"""Atomic replacement of files."""

from __future__ import annotations

import os
from collections.abc import Callable
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

NO_ROOM = (ENOSPC, EDQUOT, EFBIG)  # errors of a disk that is full, or of what a user may put on it


def replace_file(path: Path, content: str | bytes | Callable[[Path], object]) -> Path:
    """Write a temporary file in the same folder, flush it to disk and rename it to `path`; returns `path`.

    Readers see the old file or the new one, never a mixture. After an error the old file is unchanged.
    content: text (written as UTF-8), bytes, or a function that writes to the path it is given.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        if isinstance(content, str | bytes):
            beside.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        else:
            content(beside)
        with open(beside, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def flush(path: Path) -> None:
    """Flush a file or a folder to disk (Windows cannot open folders)."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
