"""Finds a library of the kernels: the wheel's for this processor, else one that is compiled at first use.

A wheel for a platform holds the kernels in prebuilt/, compiled for several levels of its processors. Where it has none
that can be used (an installation from source, another kind of machine), the compiler that is there takes a few seconds,
once for each compiler, processor and version of the source. Those libraries are kept in
$XDG_CACHE_HOME/comera/kernels (~/.cache/comera/kernels).

Every library has its checksum as its last bytes. One in the cache that is damaged, or that another user could have
written, is compiled anew: it is code. Where the folder is of no use, the kernels are compiled for this process only, in
a folder that is removed once they are loaded. The wheel's are trusted as the Python files beside them are.
"""

import logging
import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from comera.files import flush, replace_file
from comera.kernels.cpp import compiler

PREBUILT = Path(__file__).parent / "prebuilt"
_PATIENCE = 600  # seconds that another process may take to compile them
_log = logging.getLogger(__name__)

T = TypeVar("T")


def choose(accept: Callable[[Path], T | str]) -> T | str:
    """What `accept` makes of the first library that it does not refuse; in one line why there is none.

    accept: takes the path of a library, which it need not find there later. Returns why it refuses the library, or
    raises OSError if that cannot be loaded from this folder.

    The one rule of which comes first: the wheel's, from the best level down, then the compiled one.
    """
    reasons: list[str] = []
    for found in _prebuilt():
        try:
            made = accept(found) if isinstance(found, Path) else found
        except OSError as error:
            made = f"the wheel's kernels could not be loaded: {one_line(str(error))}"
        if not isinstance(made, str):
            break
        reasons.append(made)
    else:
        made = _compiled(accept)
    if isinstance(made, str):
        return "; ".join([*reasons, made])
    if reasons:
        _log.warning("not the best of the wheel's C++ kernels are used: %s", "; ".join(reasons))
    return made


def cached(folder: Path, program: str) -> Path:
    """The library in the cache folder, compiled if there is none that can be trusted; one process compiles, the others
    wait. Raises OSError if the folder cannot be used, CalledProcessError if the compiler fails."""
    path = folder / _name(program)
    if folder.exists():
        check_owner(folder)
        if _trusted(path):
            return path
    from filelock import FileLock  # takes 30 ms, which only compiling needs

    make_folder(folder)
    with FileLock(folder / ".lock", timeout=_PATIENCE):  # its Timeout is an OSError
        if not _trusted(path):
            for left in folder.glob(f".{path.name}.*.new"):  # by a killed process
                left.unlink()
            _log.warning("compiling comera's C++ kernels, once for this processor: about half a minute (%s)", path)
            replace_file(path, lambda beside: _write(program, beside, path.name))
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


def make_folder(folder: Path) -> None:
    """Make the cache folder. Raises OSError if it cannot be used."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)


def check_owner(path: Path) -> None:
    """Raise PermissionError if another user than this one or root could have written to a file or folder."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others can write to {path}: chmod go-w")


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


def _prebuilt() -> Iterator[Path | str]:
    """The wheel's libraries for this processor, the best first; in the place of what is of no use, why."""
    if not PREBUILT.is_dir():
        return
    version = compiler.digest(compiler.source_texts())
    paths = [PREBUILT / compiler.prebuilt_name(level, version) for level in compiler.levels()]
    if not paths:
        yield f"the wheel has no kernels for this processor ({platform.machine()})"
    elif not any(path.exists() for path in paths):
        yield f"the kernels in {PREBUILT} are of another version of comera: install it anew"
    for path in filter(Path.exists, paths):
        try:
            yield path if compiler.is_whole(path) else f"{path} is damaged: install comera anew"
        except OSError as error:
            yield f"{path} cannot be read: {one_line(str(error))}"


def _compiled(accept: Callable[[Path], T | str]) -> T | str:
    try:
        program = compiler.find()
        if program is None:
            return "no C++ compiler was found (CXX, c++, g++, clang++)"
        try:
            return accept(cached(cache_folder(), program))
        except OSError as error:
            _log.warning(
                "the C++ kernels are compiled for this process only, since their cache folder cannot be used (%s): "
                "set XDG_CACHE_HOME to a folder that only you can write to",
                one_line(str(error)),
            )
        with tempfile.TemporaryDirectory(prefix="comera-") as folder:
            path = Path(folder) / _name(program)
            compiler.make(program, compiler.NATIVE, path)
            try:
                return accept(path)
            except OSError as error:
                return f"the compiled kernels could not be loaded: {one_line(str(error))}"
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()
        why = next((line for line in lines if "error" in line), lines[-1] if lines else f"status {error.returncode}")
        return f"{error.cmd[0]} could not compile them: {one_line(why)}"
    except OSError as error:
        return f"they could not be compiled: {one_line(str(error))}"


def _write(program: str, path: Path, name: str) -> None:
    compiler.make(program, compiler.NATIVE, path)
    compiler.seal(path, name)


def _trusted(path: Path) -> bool:
    """Whether this is a library that nobody else could have written, as it was compiled."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
        check_owner(path)
        return compiler.is_whole(path)
    except OSError:
        return False


def _name(program: str) -> str:
    """With a digest of everything that the library depends on, the processor included."""
    machine = [program, compiler.about(program), platform.machine(), compiler.processor()]
    return f"{compiler.NATIVE}-{compiler.digest([*machine, *compiler.source_texts()])}.so"
