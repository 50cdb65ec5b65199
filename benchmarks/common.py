"""What every row of a results file states besides its figures, and how rows are written."""

from __future__ import annotations

import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from comera.kernels import float32_products

RESULTS = Path(__file__).parent / "results"
FIRST = 6  # steps of mode graph: from the fifth on a recording is only replayed
if not torch.cuda.is_available():
    float32_products.use_fastest("cpu")  # as trainer.fit does, and for all sides: the best that a user can choose


def about() -> dict[str, str]:
    """Machine, threads, versions and commit of this run."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = ", ".join([(names or [platform.machine()])[0], torch.backends.cpu.get_cpu_capability()])
    if float32_products.by_onednn():
        processor += ", oneDNN"  # not MKL, in this processor's cases the slower one
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("describe", "--always") + ("-dirty" if changes() else "") or "unknown",
    }


def changes() -> str:
    """Uncommitted changes to what is measured; results of other scripts, and the page made of them, are none."""
    others = (":(top,exclude)benchmarks/results", ":(top,exclude)docs/benchmarks.*")
    return _git("status", "--porcelain", "--", ":/", *others)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def measured(name: str) -> list[dict[str, str]]:
    """The rows of results/NAME.csv, none without the file."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write `rows`, all with the same keys, to results/NAME.csv in place of what it held; return its path.

    Results belong to a commit: with uncommitted changes nothing is written, and that is said.
    """
    if found := changes():
        print(f"results/{name}.csv stays as it was: commit these changes first\n{found}", file=sys.stderr)
        return RESULTS / f"{name}.csv"
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def update(name: str, rows: Sequence[Mapping[str, Any]], key: Sequence[str]) -> Path:
    """Put `rows` into results/NAME.csv, replacing those with the same values in the columns `key`; return its path.

    A script can thus write as it measures, or measure only some of its cases. Rows with other columns are dropped.
    """
    old = [row for row in measured(name) if list(row) == list(rows[0])]
    kept: dict[tuple[str, ...], Mapping[str, Any]] = {tuple(row[column] for column in key): row for row in old}
    kept |= {tuple(str(row[column]) for column in key): row for row in rows}
    return write(name, list(kept.values()))


def step_times(cases: Iterable[str], step_time: Callable[[str], float], rounds: int = 5) -> dict[str, dict[str, str]]:
    """`step_ms` of each case, the least of its short runs, the cases in turns, and the `spread` of these.

    The least, since other programs can only add to it; the spread says how much they did. step_time: seconds of a step
    in a short run of a case.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, own in seconds.items():
            own.append(step_time(name))
    for name, own in seconds.items():
        print(name, *(f"{second * 1e3:.4g}" for second in own), flush=True)
    return {
        name: {"step_ms": f"{min(own) * 1e3:.4g}", "spread": f"{statistics.median(own) / min(own) - 1:.2f}"}
        for name, own in seconds.items()
    }


def record(take: Callable[[], object], step: Any) -> None:
    """Take steps, by a TrainStep, until their recording is only replayed. Raises RuntimeError if they have none."""
    for _ in range(FIRST):
        take()
    if step.mode != "graph":
        raise RuntimeError(f"expected steps from recordings, got mode {step.mode}")


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    repeats: int,
    *,
    warm_ups: int = 2,
    visit: int = 1,
    wait: Callable[[], object] = int,
) -> dict[str, list[float]]:
    """Seconds of each side's calls, in turns; the first calls make plans, state and memory and are not counted.

    visit: consecutive calls of a side. If there are several, the first is not counted: it finds the caches full of
        another side's data, which never happens in training, where step follows step.
    wait: called before the clock is read; synchronizes a device that works asynchronously.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + warm_ups):
        for name, run in sides.items():
            for call in range(visit):
                wait()
                started = time.perf_counter()
                run()
                wait()
                if repeat >= warm_ups and (call or visit == 1):
                    seconds[name].append(time.perf_counter() - started)
    return seconds
