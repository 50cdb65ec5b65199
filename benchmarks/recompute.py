"""Peak memory and time of a training step with low-rank recomputation: the six-encoder MNLI transformer.

The same batch and optimizer (AdamW) for all sides, float32. Time: steps of all sides alternate in one process. Memory:
the peak of one process per side that does nothing else; "added" is what model, gradients, optimizer and steps add to an
interpreter with all libraries loaded. Time ratios compare with the same side without recomputation, memory ratios with
dense.

    python benchmarks/recompute.py [--batch 32] [--length 128] [--repeats 7] [--threads 2]      2 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch._dynamo  # optimizers and modes import it at first use: counted as part of the libraries
from common import about, write

from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.classify.task import example_loss
from comera.recipes.examples import ExampleBatch
from comera.recipes.mnli.recipe import build_model, preset
from comera.recompute.blocks import recompute_
from comera.trainer.memory import MemoryMeter
from comera.trainer.step import TrainStep

SIDES = ("dense", "fused", "fused, recompute")
MB = 2**20
MEMORY_GOAL, TIME_GOAL = 0.09, 1.08


def make_step(side: str, batch_size: int, length: int) -> Callable[[], object]:
    """A step of one side, on its own model."""
    kind, _, recomputed = side.partition(", ")
    model, _ = build_model(preset("dense" if kind == "dense" else "comera", "tuned"), 30_522)
    if kind == "fused":
        fuse_(model)
    if recomputed:
        recompute_(model)
    torch.manual_seed(0)
    ids = torch.randint(1000, 30_000, (batch_size, length))
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    batch = ExampleBatch(ids, torch.zeros_like(ids), mask, ids[:, 0] % 3)
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    step = TrainStep(model.train(), example_loss, optimizer, max_grad_norm=1.0)
    return lambda: step([batch])


def measure_memory(options: argparse.Namespace) -> None:
    """Print peak and added bytes of three steps of one side, in a process of its own."""
    torch.set_num_threads(options.threads)
    meter = MemoryMeter.start()
    step = make_step(options.memory, options.batch, options.length)
    for _ in range(3):
        step()
    print(json.dumps({"peak": meter.peak, "added": meter.added}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--memory", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        measure_memory(options)
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    """Measure all sides and write the rows."""
    torch.set_num_threads(options.threads)
    memory = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--memory", side, "--batch", str(options.batch)]
        command += ["--length", str(options.length), "--threads", str(options.threads)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        memory[side] = json.loads(printed.splitlines()[-1])
    steps = {side: make_step(side, options.batch, options.length) for side in SIDES}
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats + 2):
        for side, step in steps.items():
            started = time.perf_counter()
            step()
            if repeat >= 2:  # the first steps make plans, state and memory
                seconds[side].append(time.perf_counter() - started)
    rows = []
    for side, times in seconds.items():
        p20, _, _, p80 = statistics.quantiles(times, n=5)
        kind, _, recomputed = side.partition(", ")
        row = {
            "side": side,
            "shape": f"{options.batch} x {options.length}",
            "peak_mb": f"{memory[side]['peak'] / MB:.0f}",
            "added_mb": f"{memory[side]['added'] / MB:.0f}",
            "added_of_dense": f"{memory[side]['added'] / memory['dense']['added']:.3f}",
            "goal_of_dense": f"{MEMORY_GOAL:.3f}" if recomputed else "",
            "p20_ms": f"{p20 * 1e3:.1f}",
            "p50_ms": f"{statistics.median(times) * 1e3:.1f}",
            "p80_ms": f"{p80 * 1e3:.1f}",
            "time_of_plain": f"{statistics.median(times) / statistics.median(seconds[kind]):.3f}",
            "goal_of_plain": f"{TIME_GOAL:.2f}" if recomputed else "",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
    write("recompute", rows)


if __name__ == "__main__":
    main()
