"""Child processes that are stopped in the middle of what they write, and campaigns that count what became of it.

Two ways to stop: before the n-th call of a function that opens, writes, renames or removes files, and at the n-th byte
of any file, also one that is written by other languages (the kernel's limit on the size of files).
"""

import builtins
import errno
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from comera.errors import ComeraError

How: TypeAlias = Literal["kill", "disk full"]

_FUNCTIONS: list[tuple[Any, str]] = [(builtins, "open"), (io, "open")]
_FUNCTIONS += [
    (os, name)
    for name in (
        "open",
        "write",
        "fsync",
        "truncate",
        "replace",
        "rename",
        "unlink",
        "remove",
        "rmdir",
        "mkdir",
        "chmod",
    )
]
_NEED_ROOM = {"open", "write", "fsync", "mkdir", "rename", "replace"}  # what a full disk refuses
REFUSED, OTHER_ERROR = 3, 4  # exit status: one of our errors or the system's; another one


def settle(record_property: Callable[[str, object], None], fault: str, tries: int, wrong: Sequence[str]) -> None:
    """End a campaign: note its figures for docs/faults.md, and fail if anything went wrong."""
    record_property("fault", (fault, tries, len(wrong)))
    assert not wrong, f"{len(wrong)} of {tries}: " + "; ".join(wrong[:5])


def operations(work: Callable[[], object]) -> int:
    """How many calls of file functions `work` makes."""
    read, write = os.pipe()
    status = _child(work, count=lambda n: os.write(write, b"%d" % n))
    os.close(write)
    counted = os.read(read, 20)
    os.close(read)
    assert status == 0, f"without a fault it ended with {status}"
    return int(counted)


def stopped_at_call(work: Callable[[], object], n: int, how: How) -> int:
    """Run `work` in a child whose n-th call of a file function, counted from 0, kills it or finds the disk full."""
    return _child(work, call=n, how=how)


def stopped_at_byte(work: Callable[[], object], n: int, how: How) -> int:
    """Run `work` in a child that no file may have more than n bytes of."""
    return _child(work, byte=n, how=how)


def _child(
    work: Callable[[], object],
    *,
    call: int | None = None,
    byte: int | None = None,
    how: How = "kill",
    count: Callable[[int], object] | None = None,
) -> int:
    """Exit status of a forked child: 0, REFUSED, OTHER_ERROR, or minus the number of a signal."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = OTHER_ERROR
    try:
        made = _watch(call, how)
        if byte is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL if how == "kill" else signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
        try:
            work()
            status = 0
        except (ComeraError, OSError):
            status = REFUSED
        if count is not None:
            count(made[0])
    except BaseException:
        os.write(2, traceback.format_exc()[-2000:].encode())
    finally:
        os._exit(status)


def _watch(call: int | None, how: How) -> list[int]:
    """Count calls from now on, and stop at number `call`."""
    made, inside = [0], [False]

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **options: Any) -> Any:
            if inside[0]:  # a function of this list that another one of it calls
                return function(*args, **options)
            number, made[0] = made[0], made[0] + 1
            if how == "kill" and number == call:
                os.kill(os.getpid(), signal.SIGKILL)
            # a full disk stays full
            if how == "disk full" and call is not None and number >= call and name in _NEED_ROOM and _writes(args):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            inside[0] = True
            try:
                return function(*args, **options)
            finally:
                inside[0] = False

        return watch

    for module, name in _FUNCTIONS:
        setattr(module, name, watched(name, getattr(module, name)))
    return made


def _writes(args: Sequence[Any]) -> bool:
    """Whether these arguments of `open`, in either form, ask to write; true for all other functions."""
    mode = args[1] if len(args) > 1 else None
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    if isinstance(mode, int) and isinstance(args[0], str | os.PathLike):
        return bool(mode & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
    return mode is not None or not isinstance(args[0], str | os.PathLike)
