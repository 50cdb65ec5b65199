"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, content: str | bytes | Callable[[Path], object]) -> Path:
    """Write a file beside its place, flush it to the disk and rename it; returns `path`.

    content: text (UTF-8), bytes, or a function that writes the file it is given.
    Readers see the old file or the new one, never a part; after any error the old one is still there.
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
    """Flush a file or folder to the disk (Windows cannot open folders)."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
