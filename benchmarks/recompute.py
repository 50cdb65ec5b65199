"""Peak memory and time of a training step with low-rank recomputation: the six-encoder MNLI transformer.

The same batch and optimizer (AdamW) for all sides, float32. Time: steps of all sides alternate in one process. Memory:
the peak of one process per side that does nothing else; "added" is what model, gradients, optimizer and steps add to an
interpreter with all libraries loaded. Time ratios compare with the same side without recomputation, memory ratios with
dense.

`least_mb` is what no order of the same operations and no allocator can go below: parameters and moments, what the
forward kept and the backward still needs, and operands and results of one operation, where that is most. `kept_mb` is
what the forward keeps.

    python benchmarks/recompute.py [--batch 32] [--length 128] [--repeats 7] [--threads 2]      2 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch._dynamo  # optimizers and modes import it at first use: counted as part of the libraries
from common import about, in_turns, write
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from comera.fusion import fuse_
from comera.memory.estimate import MemoryMeter
from comera.memory.live import LiveMemory
from comera.memory.recompute import recompute_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.trainer.step import Loss, TrainStep

SIDES = ("dense", "fused", "fused, recompute")
MB = 2**20
MEMORY_GOAL, TIME_GOAL = 0.09, 1.08


@dataclass
class Step:
    """A step on one batch."""

    train: TrainStep
    batch: ExampleBatch

    def __call__(self) -> None:
        self.train([self.batch])


class Least(LiveMemory):
    """most: the bytes of `least_mb` beyond `known` tensors; kept: those of `kept_mb`, of a step that runs inside.

    Gradients of parameters that are there already are left out, so it is a little less than the least.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__(known)
        self.most = self.kept = 0
        self._kept: dict[int, ref[torch.UntypedStorage]] = {}

    def forward_done(self) -> None:
        """Call this between forward and backward."""
        self._kept, self.kept = dict(self._alive), self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if self._kept:
            storages = [t.untyped_storage() for t in tree_leaves((args, kwargs, made)) if isinstance(t, Tensor)]
            needed = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in self._ignored}
            for key, kept in self._kept.items():
                if self._alive.get(key) is kept and (storage := kept()) is not None:
                    needed[key] = storage.nbytes()
            self.most = max(self.most, sum(needed.values()))
        return made


def count_least(side: str, options: argparse.Namespace) -> dict[str, float]:
    """`least_mb` and `kept_mb` of a side."""
    counters: list[Least] = []

    def loss(model: nn.Module, batch: ExampleBatch) -> Tensor:
        found = example_loss(model, batch)
        for counter in counters:
            counter.forward_done()
        return found

    step = make_step(side, options.batch, options.length, loss)
    step()  # makes the moments
    states = step.train.optimizer.state.values()
    held = [*step.train.model.parameters(), *step.train.model.buffers(), *(t for s in states for t in s.values())]
    counters.append(Least(held))
    with counters[0]:
        step()
    before = sum(tensor.nbytes for tensor in held)
    return {"least_mb": (before + counters[0].most) / MB, "kept_mb": counters[0].kept / MB}


def make_step(side: str, batch_size: int, length: int, loss: Loss = example_loss) -> Step:
    """A step of one side, on its own model."""
    kind, _, recomputed = side.partition(", ")
    model, _ = untrained(preset("dense" if kind == "dense" else "comera", "mnli"), 30_522)
    if kind == "fused":
        fuse_(model)
    if recomputed:
        recompute_(model)
    torch.manual_seed(0)
    ids = torch.randint(1000, 30_000, (batch_size, length))
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    batch = ExampleBatch(ids, torch.zeros_like(ids), mask, ids[:, 0] % 3)
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    return Step(TrainStep(model.train(), loss, optimizer, max_grad_norm=1.0), batch)


def measure_memory(options: argparse.Namespace) -> None:
    """Print peak and added bytes of three steps of one side, in a process of its own."""
    torch.set_num_threads(options.threads)
    meter = MemoryMeter.start()
    step = make_step(options.memory, options.batch, options.length)
    for _ in range(3):
        step()
    print(json.dumps({"peak": meter.peak, "added": meter.added}))


def in_own_process(options: argparse.Namespace, side: str) -> dict[str, int]:
    """`measure_memory` in a fresh process."""
    command = [sys.executable, __file__, "--memory", side, "--batch", str(options.batch)]
    command += ["--length", str(options.length), "--threads", str(options.threads)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, int] = json.loads(printed.splitlines()[-1])
    return found


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
    with ThreadPoolExecutor(2) as two:  # nothing is timed meanwhile
        memory = dict(zip(SIDES, two.map(partial(in_own_process, options), SIDES), strict=True))
    least = {side: count_least(side, options) for side in SIDES}
    steps = {side: make_step(side, options.batch, options.length) for side in SIDES}
    seconds = in_turns(steps, options.repeats)
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
            "kept_mb": f"{least[side]['kept_mb']:.0f}",
            "least_mb": f"{least[side]['least_mb']:.0f}",
            "least_of_dense": f"{least[side]['least_mb'] * MB / memory['dense']['added']:.3f}",
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
