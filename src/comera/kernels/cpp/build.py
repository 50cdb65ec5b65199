"""Compiles the kernels, once for each processor, compiler and version of their source, and loads them.

One compiler command, without torch's headers: it takes a few seconds and does not depend on torch's version. Libraries
are kept in $XDG_CACHE_HOME/comera/kernels (~/.cache/comera/kernels), each with its checksum as its last bytes. One that
is damaged, or that another user could have written, is compiled anew: it is code. Where the folder is of no use, the
kernels are compiled for this process only, in a folder that is removed once they are loaded.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from comera.files import flush, replace_file

SOURCES = Path(__file__).parent / "csrc"
# -fwrapv: bits of floats are shifted as signed integers; the last two let conversions and square roots be vectorized
FLAGS = (
    *("-std=c++17", "-O2", "-march=native", "-fopenmp", "-fwrapv", "-fno-math-errno", "-fno-trapping-math"),
    *("-shared", "-fPIC"),
)
_PATIENCE = 600  # seconds that another process may take to compile them
_log = logging.getLogger(__name__)
_one_thread = Lock()


def load() -> ctypes.CDLL | str:
    """The compiled library; in one line why there is none."""
    with _one_thread:
        return _load()


def version() -> str:
    """What stands for the source, compiler and processor of the loaded library; "" where there is none."""
    library = load()
    return "" if isinstance(library, str) else Path(library._name).stem


def cached(folder: Path, compiler: str) -> Path:
    """The library in the cache folder, compiled if there is none that can be trusted; one process compiles, the others
    wait. Raises OSError if the folder cannot be used, CalledProcessError if the compiler fails."""
    path = folder / _name(compiler)
    if folder.exists():
        _check_owner(folder)
        if _whole(path):
            return path
    from filelock import FileLock  # takes 30 ms, which only compiling needs

    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    with FileLock(folder / ".lock", timeout=_PATIENCE):  # its Timeout is an OSError
        if not _whole(path):
            for left in folder.glob(f".{path.name}.*.new"):  # by a killed process
                left.unlink()
            _log.warning("compiling comera's C++ kernels, once for this processor: about half a minute (%s)", path)
            replace_file(path, lambda beside: _write(compiler, beside, path.name))
            path.chmod(0o755)  # whatever the umask
            flush(folder)
    return path


def cache_folder() -> Path:
    """Where libraries are kept. Raises OSError if there is no such place."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:  # a relative one is to be ignored, says its specification: whoever fills the working folder is not this user
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "comera" / "kernels"
    except RuntimeError as error:
        raise OSError("there is no home folder") from error


@cache
def _load() -> ctypes.CDLL | str:
    try:
        compiler = _compiler()
        if compiler is None:
            return "no C++ compiler was found (CXX, c++, g++, clang++)"
        try:
            return ctypes.CDLL(str(cached(cache_folder(), compiler)))
        except OSError as error:
            _log.warning(
                "the C++ kernels are compiled for this process only, since their cache folder cannot be used (%s): "
                "set XDG_CACHE_HOME to a folder that only you can write to",
                _line(str(error)),
            )
        with tempfile.TemporaryDirectory(prefix="comera-") as folder:
            path = Path(folder) / _name(compiler)
            _compile(compiler, path)
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                return f"the compiled kernels could not be loaded: {_line(str(error))}"
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else f"status {error.returncode}")
        return f"{error.cmd[0]} could not compile them: {_line(why)}"
    except OSError as error:
        return f"they could not be compiled: {_line(str(error))}"


def _line(text: str) -> str:
    return " ".join(text.split())


def _write(compiler: str, path: Path, name: str) -> None:
    """Compile the library `name`, with its checksum."""
    _compile(compiler, path)
    with open(path, "r+b") as file:
        checksum = _checksum(name, file.read())
        file.write(checksum)


def _compile(compiler: str, path: Path) -> None:
    sources = sorted(str(source) for source in SOURCES.glob("*.cpp"))
    # torch's own OpenMP: a second one would compete for the same cores
    bundled = [str(found) for found in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*")][:1]
    _run([compiler, *FLAGS, *sources, "-o", str(path), "-Wl,--as-needed", *bundled])


def _run(command: list[str]) -> str:
    run = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", errors="replace")
    return run.stdout


def _checksum(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).digest()


def _whole(path: Path) -> bool:
    """Whether this is a library that nobody else could have written, as it was compiled."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        _check_owner(path)
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == _checksum(path.name, content[:-size])


def _check_owner(path: Path) -> None:
    """Raise PermissionError if another user than this one or root could have written to a file or folder."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}: chmod go-w")


def _compiler() -> str | None:
    names = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++"))
    found = (shutil.which(name, path=_search_path()) for name in names)
    return next((path for path in found if path and os.path.isabs(path)), None)


def _search_path() -> str:
    """PATH without folders relative to the working folder."""
    return os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))


def _name(compiler: str) -> str:
    """With a digest of everything that the library depends on, the processor included: -march=native."""
    parts = [compiler, _run([compiler, "--version"]), torch.__version__, *FLAGS, platform.machine(), _processor()]
    parts += [source.read_text("utf-8") for source in sorted(SOURCES.glob("*.[ch]*"))]
    return f"native-{hashlib.sha256(chr(0).join(parts).encode('utf-8', 'surrogateescape')).hexdigest()[:16]}.so"


def _processor() -> str:
    """What distinguishes kinds of processors: several machines may share a cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)})) or platform.processor()
