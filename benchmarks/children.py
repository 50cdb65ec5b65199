"""Training runs in processes of their own, several at a time: for benchmarks whose figures are no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

Place = TypeVar("Place")


def run_children(commands: Mapping[Place, Sequence[str]], jobs: int) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Run Python commands, `jobs` at a time, which share the cores; yield each one's figures as it ends.

    The figures are the last line that it prints, as JSON. What a failed one said is printed, and the others go on.
    """
    with ThreadPoolExecutor(jobs) as pool:
        started = {pool.submit(_run, command, jobs): place for place, command in commands.items()}
        for future in as_completed(started):
            place, figures = started[future], future.result()
            if isinstance(figures, str):
                print(f"{place}: {figures}", file=sys.stderr)
            else:
                yield place, figures


def _run(command: Sequence[str], jobs: int) -> dict[str, Any] | str:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    child = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=environment)
    if child.returncode:
        return child.stderr.strip()[-500:]
    figures: dict[str, Any] = json.loads(child.stdout.strip().splitlines()[-1])
    return figures
