"""The trial of a library before a process loads it: the kernels beside torch on odd shapes, in another process.

A library whose instructions this processor lacks, or that was compiled wrongly, ends that process and not this one. It
takes as long as importing torch, once: that a library has passed is kept beside the compiled kernels, for this version
of comera, of torch and this kind of processor. Where that folder is of no use, every process tries the library anew.
"""

import hashlib
import logging
import signal
import subprocess
import sys
from pathlib import Path

import torch

from comera._version import __version__
from comera.files import replace_file
from comera.kernels.cpp import build, compiler

UNLOADABLE = 3
"""Exit status of a trial whose library could not be loaded."""

_TRY = "import sys; sys.path[:] = sys.argv[2:]; from comera.kernels.cpp import selftest; selftest.main(sys.argv[1])"
_PATIENCE = 300  # seconds that importing torch from a slow disk may take
_log = logging.getLogger(__name__)


def refusal(path: Path) -> str | None:
    """In one line why the library is not to be used; None if it passes. Raises OSError if it cannot be loaded."""
    passed = f"passed-{_digest(path)}"
    try:
        folder = build.cache_folder()
        if folder.exists():
            build.check_owner(folder)
            if (folder / passed).is_file():
                return None
    except OSError:
        pass
    reason = _try(path)
    if reason is None:
        try:
            folder = build.cache_folder()
            build.make_folder(folder)
            replace_file(folder / passed, "")
        except OSError as error:
            _log.warning(
                "every process will test the C++ kernels anew, since their cache folder cannot be used (%s): "
                "set XDG_CACHE_HOME to a folder that only you can write to",
                build.one_line(str(error)),
            )
    return reason


def _digest(path: Path) -> str:
    """Of all that a verdict depends on. Raises OSError if the library cannot be read."""
    content = hashlib.sha256(path.read_bytes()).hexdigest()
    return compiler.digest([content, __version__, torch.__version__, compiler.processor()])


def _try(path: Path) -> str | None:
    command = [sys.executable, "-I", "-c", _TRY, str(path), *sys.path]
    run = dict[str, object](capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_PATIENCE)
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, **run)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return f"the self-test of {path.name} did not end in {_PATIENCE} seconds"
    except OSError as error:
        return f"the self-test of {path.name} could not be started: {build.one_line(str(error))}"
    said = build.one_line((ended.stdout or ended.stderr).strip().rpartition("\n")[2])
    if ended.returncode == UNLOADABLE:
        raise OSError(said)
    if ended.returncode < 0:
        return f"{path.name} failed its self-test: {signal.Signals(-ended.returncode).name} ended it"
    return f"{path.name} failed its self-test: {said}" if ended.returncode else None
