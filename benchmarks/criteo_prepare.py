"""Preparing Criteo's click log: rows per second, and whether memory grows with the rows.

The rows of a file (default: the synthetic log) are repeated to a small and a large number of rows, plain and
compressed, and prepared with numbered categories. Memory: proportional set size of this process, sampled every 20 ms,
beyond what it had before. CPU time: of all its threads; a busy machine changes it less than the rows per second. Then
batches of 10,000 rows are read.

    python benchmarks/criteo_prepare.py [--path train.txt.gz] [--rows 500000 4000000]      two minutes, 2 GB of disk
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
from common import about, write

from comera.recipes.dlrm.criteo import ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo.synthetic import ClickLog

SYNTHETIC_ROWS = 250_000
BATCH, READS = 10_000, 50


class PeakMemory:
    """Peak bytes of this process, beyond those at the start."""

    def __enter__(self) -> PeakMemory:
        self.peak = 0
        self._process, self._done = psutil.Process(), threading.Event()
        self._before = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.peak = max(self.peak, self._now() - self._before)

    def _now(self) -> int:
        return int(self._process.memory_full_info().pss)


def repeated(source: Path, target: Path, rows: int) -> Path:
    """Repeat the rows of `source` until there are at least `rows`; compressed if the name of `target` ends in .gz."""
    opened = gzip.open if source.suffix == ".gz" else open
    with opened(source, "rb") as file:
        text = file.read()
    data = gzip.compress(text, 6) if target.suffix == ".gz" else text
    times = -(-rows // text.count(b"\n"))
    with open(target, "wb") as file:
        for _ in range(times):
            file.write(data)
    return target


def cpu_seconds() -> float:
    """CPU seconds of this process."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def median_ms(read: Callable[[int], object]) -> float:
    """Median milliseconds of READS calls of `read`."""
    times = []
    for index in range(READS):
        start = time.perf_counter()
        read(index)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="Criteo's file, plain or .gz (default: the synthetic log)")
    parser.add_argument("--rows", type=int, nargs="+", default=[500_000, 4_000_000])
    parser.add_argument("--workers", type=int, help="threads (default: one per core)")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = arguments.path or ClickLog().write(folder / "synthetic.txt", SYNTHETIC_ROWS)
        for rows in arguments.rows:
            for form in ("txt", "txt.gz"):
                path = repeated(source, folder / f"train.{form}", rows)
                config = CriteoConfig(path=str(path), cache=str(folder / "cache"), workers=arguments.workers)
                with PeakMemory() as memory:
                    start, cpu = time.perf_counter(), cpu_seconds()
                    data = prepare(config, quiet=True)
                    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
                data.train_batch(0, BATCH, 0)
                shuffled = median_ms(partial(data.train_batch, size=BATCH, seed=0))
                ordered = ClickData(data.folder, shuffle=False)
                in_order = median_ms(partial(ordered.train_batch, size=BATCH, seed=0))
                results.append(
                    {
                        "data": "criteo" if arguments.path else "synthetic",
                        "form": form,
                        "rows": len(data),
                        "megabytes": round(path.stat().st_size / 1e6),
                        "workers": config.threads,
                        "seconds": round(seconds, 2),
                        "rows_per_second": round(len(data) / seconds),
                        "cpu_us_per_row": round(1e6 * cpu / len(data), 2),
                        "peak_mb": round(memory.peak / 1e6),
                        "categories": sum(data.table_sizes),
                        "batch_shuffled_ms": round(shuffled, 2),
                        "batch_ordered_ms": round(in_order, 2),
                        **about(),
                    }
                )
                print({key: value for key, value in results[-1].items() if key not in about()})
                shutil.rmtree(data.folder)
                path.unlink()
    print(write("criteo_prepare", results))


if __name__ == "__main__":
    main()
