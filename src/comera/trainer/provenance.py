"""Where a run comes from: provenance.json in its folder, an entry for each time that it was started or resumed."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from comera._version import __version__
from comera.files import replace_file
from comera.kernels.select import kernels_in_use

PROVENANCE = "provenance.json"


def note(folder: Path, device: torch.device, **more: Any) -> None:
    """Add an entry for this process to `folder`/provenance.json. more: further JSON-ready values.

    A file that is not readable as such is replaced: what a run learns does not depend on it.
    """
    path = folder / PROVENANCE
    try:
        entries = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        entries = []
    entries = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    replace_file(path, json.dumps([*entries, {**_process(device), **more}], indent=1) + "\n")


def _process(device: torch.device) -> Mapping[str, Any]:
    """Date, command, machine, versions and commit."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "folder": os.getcwd(),
        "commit": _commit(),
        "machine": ", ".join(filter(None, [gpu, _processor(), f"{os.cpu_count()} cores", platform.system()])),
        "threads": torch.get_num_threads(),
        "comera": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernels": kernels_in_use(device),
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.processor() or platform.machine()])[0]


def _commit() -> str | None:
    """Commit of the working folder, "-dirty" with changes; None outside of a repository, or without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
