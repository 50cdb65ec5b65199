"""Compilation of the kernels, once for each processor, compiler and version of their source.

One command to a compiler, with no headers of torch: a few seconds, and independent of torch's version. The library is
kept in $XDG_CACHE_HOME/comera (~/.cache/comera), or in a folder of this process where that cannot be written to.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "csrc"
# -fwrapv: bits of floats are shifted as signed integers; the others let conversions and square roots be vectors
FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fopenmp", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
_log = logging.getLogger(__name__)


def unavailable_reason() -> str | None:
    """Why there are no native kernels here, in words; None where there are."""
    made = _made()
    return made if isinstance(made, str) else None


def library() -> ctypes.CDLL:
    """The compiled kernels; only where `unavailable_reason` is None."""
    made = _made()
    assert isinstance(made, ctypes.CDLL), made
    return made


@cache
def _made() -> ctypes.CDLL | str:
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found (CXX, c++, g++, clang++)"
    try:
        path = _folder() / f"native-{_digest(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return ctypes.CDLL(str(path))
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return f"{compiler} could not compile them: {next((line for line in lines if 'error' in line), lines[-1:])}"
    except OSError as error:
        return f"they could not be compiled or loaded: {error}"


def _compile(compiler: str, path: Path) -> None:
    _log.info("compiling the native kernels, once (%s)", path)
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    # the OpenMP of torch, not another one: two of them would wait for the same cores
    bundled = [str(found) for found in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")][:1]
    command = [compiler, *FLAGS, *sources, "-o", str(beside), "-Wl,--as-needed", *bundled]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    return next((found for found in map(shutil.which, names) if found), None)


def _digest(compiler: str) -> str:
    """Of all that the library follows from: -march=native makes one for this processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [compiler, version, torch.__version__, *FLAGS, platform.machine(), _processor()]
    parts += [source.read_text("utf-8") for source in sorted(SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What tells kinds of processors apart: a folder may be shared by several machines."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "comera"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="comera-"))
