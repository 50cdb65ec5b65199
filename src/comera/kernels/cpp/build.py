"""Compiles the kernels, once for each processor, compiler and version of their source.

One compiler command, without torch's headers: it takes a few seconds and does not depend on torch's version. The
library is kept in $XDG_CACHE_HOME/comera (~/.cache/comera), or in a folder of this process where that is not writable.
"""

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
# -fwrapv: bits of floats are shifted as signed integers; the last two let conversions and square roots be vectorized
FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fopenmp", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
_log = logging.getLogger(__name__)


@cache
def compiled() -> Path | str:
    """The compiled library, or why there is none."""
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler was found (CXX, c++, g++, clang++)"
    try:
        path = _folder() / f"native-{_digest(compiler)}.so"
        if not path.exists():
            _compile(compiler, path)
        return path
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        return f"{compiler} could not compile them: {next((line for line in lines if 'error' in line), lines[-1:])}"
    except OSError as error:
        return f"they could not be compiled: {error}"


def _compile(compiler: str, path: Path) -> None:
    _log.info("compiling the C++ kernels, once (%s)", path)
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    # torch's own OpenMP: a second one would compete for the same cores
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
    """Of everything that the library depends on, the processor included: -march=native."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    parts = [compiler, version, torch.__version__, *FLAGS, platform.machine(), _processor()]
    parts += [source.read_text("utf-8") for source in sorted(SOURCES.glob("*.[ch]*"))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """What distinguishes kinds of processors: several machines may share a cache folder."""
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
