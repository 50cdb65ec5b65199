"""One training step of the six-encoder transformer: CoMERA against what one would pick instead.

The model of docs/method.md §10 (stock BERT of transformers, SDPA, dropout 0.1, random ids), float32, with `fuse_`,
which serves what surrounds the layers of any method: attention, dropout, residual norms, activations.

    dense     AdamW                                      comera    tensorize_, AdamW
    galore    galore-torch, its published settings       lte       32 heads of rank 32, merged every 10 steps
    cola      bottlenecks of a quarter of the width      tensorly  TT layers of tensorly-torch, modes and ranks of ours

tensorly multiplies with one torch.einsum, which finds a good order through opt_einsum; "tensorly, plain" runs without.

"graph": forward and backward recorded once and replayed without their Python (mode graph of the trainer), which serves
every method. With 32 samples all run eager: recording LTE and tensorly takes minutes, and ratios of recorded steps are
about the same (`--case "batch 32" --side "lte, graph" "tensorly, graph" --fast`).

Time: all sides of a case alternate in one process; medians. With one sample, where steps are short, each visit is three
steps, and the first is not counted. What a method does only every n steps (GaLore's singular value decompositions every
200, LTE's merge every 10) is timed in a step of its own and counted by its share: ((n - 1) · plain + with) / n.

Memory: one process per side. Base: its resident memory after the libraries are imported and a tiny model has been
trained with them. Then the model is made, and freed memory is returned. The result is the peak of three steps (two at
batch 32, six from recordings) above the base: weights, gradients, optimizer state, activations, buffers. glibc is told
to return freed memory at once, for every side: otherwise what it keeps depends on its thresholds more than on the
method. "comera, recompute" is comera with `recompute_`; tensorly's steps take too long to measure. Ratios are a side's
figure over that of comera in the same mode.

    python benchmarks/peers.py [--case "batch 1" ...] [--side galore ...] [--fast]      4 minutes
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch._dynamo  # optimizers import it at first use: counted as part of the libraries
from common import FIRST, about, in_turns, record, update

from comera.baselines import Applied
from comera.fusion import fuse_
from comera.memory.estimate import MemoryMeter, reset_peak
from comera.memory.recompute import recompute_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.trainer.step import TrainStep

LENGTH, VOCABULARY = 128, 30_522
Goals = dict[str, tuple[float | None, float | None]]
OURS: Goals = {"comera": (None, None), "comera, recompute": (None, None)}
UNMEASURED = ("tensorly", "galore, graph")  # whose memory takes too long to measure, or needs no figure
SLOW = ("lte", "tensorly", "tensorly, plain")  # at batch 32 they warm up on two samples
# case: samples, timed steps, sides with their goals: their step time and their memory, over ours
CASES: dict[str, tuple[int, int, Goals]] = {
    "batch 1": (
        1,
        6,
        {
            **OURS,
            "comera, graph": (None, None),
            "dense": (5, None),
            "cola": (None, None),
            "galore": (None, 20),
            "galore, graph": (10, None),
        },
    ),
    "batch 32": (
        32,
        5,
        {**OURS, "dense": (5, 3), "cola": (None, None), "lte": (9, 12), "tensorly": (11, None)},
    ),
}
MB = 2**20
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Side:
    """A method's training step on its own model.

    take: one step. work: a step that includes what the method does only every `period` steps.
    """

    def __init__(self, name: str, samples: int, *, tiny: bool = False) -> None:
        torch.manual_seed(0)
        method, *variants = name.split(", ")
        config = preset(method, "mnli")  # type: ignore[arg-type]
        if tiny:
            config = replace(config, model=replace(config.model, hidden=96, layers=1, ffn=192))
        model, applied = untrained(config, VOCABULARY)
        ids = torch.randint(1000, 30_000, (samples, LENGTH), generator=torch.Generator().manual_seed(0))
        mask = torch.ones(ids.shape, dtype=torch.bool)
        self.batch = ExampleBatch(ids, torch.zeros_like(ids), mask, ids[:, 0] % 3)
        fuse_(model)
        if "recompute" in variants:
            recompute_(model)
        self.applied = applied if isinstance(applied, Applied) else None
        if self.applied:
            self.optimizer = self.applied.optimizer(replace(config.train, lr=1e-4))
        else:
            self.optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
        mode: Literal["eager", "graph"] = "graph" if "graph" in variants else "eager"
        self.step = TrainStep(model.train(), example_loss, self.optimizer, max_grad_norm=1.0, mode=mode)
        self.einsum = "plain" not in variants
        settings = config.baselines
        self.period = {"galore": settings.galore.update_proj_gap, "lte": settings.lte.merge_every}.get(method, 1)

    def warm_up(self) -> None:
        """A step on two samples at most."""
        self.step([ExampleBatch(*(tensor[:2] for tensor in self.batch))])

    def take(self) -> None:
        torch.backends.opt_einsum.enabled = self.einsum  # type: ignore[assignment]
        self.step([self.batch])

    def work(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"] if "update_proj_gap" in group else ():
                self.optimizer.state[parameter]["step"] = self.period  # a multiple: new projections are due
        self.take()
        if self.applied:
            self.applied.after_step(self.period)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    sides = list(dict.fromkeys(side for _, _, goals in CASES.values() for side in (*goals, "tensorly, plain")))
    sides += [f"{side}, graph" for side in sides if "graph" not in side and f"{side}, graph" not in sides]
    parser.add_argument("--side", nargs="+", choices=sides, help="to compare with comera (default: those of the case)")
    parser.add_argument("--fast", action="store_true", help="one timed step per side, no memory, no file")
    parser.add_argument("--memory", nargs=2, metavar=("SIDE", "SAMPLES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        print(json.dumps({"added": measure_memory(options.memory[0], int(options.memory[1]))}))
        return
    for case in options.case:
        samples, repeats, goals = CASES[case]
        others = options.side or list(goals)
        ours = ("comera", "comera, graph") if any("graph" in side for side in others) else ("comera",)
        wanted = (*ours, *others)
        chosen = {side: goals.get(side, (None, None)) for side in dict.fromkeys(wanted)}
        measured = [side for side in chosen if not options.fast and not side.startswith(UNMEASURED)]
        with ThreadPoolExecutor(2) as two:  # nothing is timed meanwhile
            memory = dict(zip(measured, two.map(partial(in_own_process, samples=samples), measured), strict=True))
        for row in compare(case, samples, chosen, memory, repeats=1 if options.fast else repeats):
            print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
            if not options.fast:
                update("peers", [row | about()], key=("case", "side"))


def in_own_process(side: str, samples: int) -> int:
    """`measure_memory` in a fresh process."""
    command = [sys.executable, __file__, "--memory", side, str(samples)]
    environment = os.environ | GIVE_BACK
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    added: int = json.loads(printed.splitlines()[-1])["added"]
    return added


def measure_memory(name: str, samples: int) -> int:
    """Peak bytes of the first steps above the base of interpreter and libraries."""
    tiny = Side(name, 1, tiny=True)
    for _ in range(FIRST if "graph" in name else 2):
        tiny.take()
    del tiny
    give_back()
    meter = MemoryMeter.start()
    side = Side(name, samples)
    give_back()
    reset_peak()
    for _ in range(FIRST if "graph" in name else 3 if samples == 1 else 2):
        side.take()
    return meter.added


def give_back() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def compare(case: str, samples: int, goals: Goals, memory: dict[str, int], repeats: int) -> Iterator[dict[str, Any]]:
    """Time all sides in turns; memory: bytes of the sides that were measured."""
    sides = {name: Side(name, samples) for name in goals}
    for name, side in sides.items():
        if name in SLOW and samples > 1:
            side.warm_up()
            continue
        if "graph" in name:
            record(side.take, side.step)
        else:
            side.take()
    runs: dict[str, Callable[[], object]] = {name: side.take for name, side in sides.items()}
    visit = 3 if samples == 1 else 1
    seconds = {
        name: statistics.median(times) for name, times in in_turns(runs, repeats, warm_ups=0, visit=visit).items()
    }
    extra: dict[str, float] = {}  # seconds a step, in all modes, of what a method does only every `period` steps
    for name, side in sides.items():
        method = name.partition(", ")[0]
        if side.period > 1 and method not in extra:
            (times,) = in_turns({name: side.work}, 1, warm_ups=0).values()
            extra[method] = (times[0] - seconds[name]) / side.period
        seconds[name] += extra.get(method, 0.0)
    for name, (time_goal, memory_goal) in goals.items():
        ours = "comera, graph" if "graph" in name else "comera"
        yield {
            "case": case,
            "side": name,
            "step_ms": f"{seconds[name] * 1e3:.1f}",
            "times_comera": f"{seconds[name] / seconds[ours]:.2f}",
            "time_goal": time_goal or "",
            "memory_mb": f"{memory[name] / MB:.1f}" if name in memory else "",
            "memory_times_comera": f"{memory[name] / memory[ours]:.2f}" if name in memory else "",
            "memory_goal": memory_goal or "",
            "repeats": repeats,
        }


if __name__ == "__main__":
    main()
