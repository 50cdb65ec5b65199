"""A run folder belongs to one run at a time: two would delete each other's checkpoints."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from comera.errors import ConfigError

_LOCK = ".lock"  # in the run folder, with the name of its holder, while the run goes on


@contextmanager
def hold(folder: Path, accelerator: Accelerator) -> Iterator[None]:
    """Hold a run folder, which is made if there is none, for all processes of this run; an empty one is removed again.

    Ends with the process, however that ends. Raises ConfigError, in every process, for a folder that another run holds
    or that cannot be made.
    """
    held = _hold(folder)
    refused: ConfigError | None = None
    if accelerator.is_main_process:
        try:
            held.__enter__()
        except ConfigError as error:
            refused = error
    (refused,) = broadcast_object_list([refused])
    if refused is not None:
        raise refused
    try:
        yield
    finally:
        if accelerator.is_main_process:
            held.__exit__(None, None, None)


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a run folder that `hold` would refuse: before data are prepared for it. Leaves nothing."""
    with _hold(folder):
        pass


@contextmanager
def _hold(folder: Path) -> Iterator[None]:
    file = folder / _LOCK
    made: list[Path] = []
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(file)
        lock.acquire(blocking=False)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}")
    except Timeout:
        raise ConfigError(
            f"expected a folder that no other run writes to, got {folder}, in use by {_holder(file)}: wait until it "
            "has ended, or give another folder"
        ) from None
    except (OSError, ValueError) as error:
        _remove_empty(made)
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"expected a folder for the run that can be made and written to, got {str(folder)!r} ({reason}): give "
            "another place"
        ) from error
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: whoever waits for this very file finds it gone
        lock.release()
        _remove_empty(made)


def _holder(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace") or "another process"
    except OSError:
        return "another process"


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError, ValueError):
            folder.rmdir()
