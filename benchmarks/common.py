"""What every row of a results file names besides its figures, and how rows are written."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def about() -> dict[str, str]:
    """Machine, threads, versions and commit of this run."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else (names or [platform.machine()])[0]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": device,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit or "unknown",
    }


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Replace results/NAME.csv by `rows`, all with the same keys; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path
