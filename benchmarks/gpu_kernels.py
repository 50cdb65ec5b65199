"""The Triton kernels against torch's own products on a GPU: the cases of `comera calibrate`, as results.

Rows are written as they come; cases that do not fit into `--seconds` are skipped.

    python benchmarks/gpu_kernels.py [--seconds 60] [--dry]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from common import about, in_turns, update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--dry", action="store_true", help="tiny cases in Triton's CPU interpreter; writes nothing")
    options = parser.parse_args()
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    elif not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, torch sees none: --dry runs tiny cases on the CPU")
    from comera.cli.calibrate import cases  # which imports the kernels

    started = time.perf_counter()
    for kernel, dtype, case, ours, torchs in cases("cpu" if options.dry else "cuda", tiny=options.dry):
        if time.perf_counter() - started > options.seconds:
            print(f"out of time: skipping {kernel}, {dtype}, {case} and the rest")
            break
        wait: Callable[[], object] = int if options.dry else torch.cuda.synchronize
        seconds = in_turns({"ours": ours, "torch": torchs}, 2 if options.dry else 50, warm_ups=3, wait=wait)
        ms = {side: statistics.median(times) * 1e3 for side, times in seconds.items()}
        row = {
            "kernel": kernel,
            "dtype": dtype,
            "case": case,
            "ours_ms": f"{ms['ours']:.4f}",
            "torch_ms": f"{ms['torch']:.4f}",
            "times_torch": f"{ms['torch'] / ms['ours']:.2f}",
        }
        print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
        if not options.dry:
            update("gpu_kernels", [row | about()], key=("kernel", "dtype", "case"))


if __name__ == "__main__":
    main()
