"""One training step of whole models: dense, compressed, compressed and fused.

The six-encoder MNLI transformer, and a Llama-style model (12 blocks, 768 wide, 8,192 tokens) with block tensor trains,
the recipe's default. The recipes' models, the same batch and optimizer for all sides (`comera.optim.adamw.AdamW`, as
fast on dense weights as torch's fused one); compressed ones adapt their ranks; dense has the same fused kernels as the
last side. Steps of the sides alternate in one process, and ratios are those of the medians. With one sample, where
steps are short, each visit is four steps, and the first is not counted. Each case runs in its own process, because
memory left behind by other models slows short steps down. `--compile` adds dense and compressed under torch.compile,
which leaves fused blocks out (minutes of compilation on a CPU). Without bf16 arithmetic a dense bf16 step takes half a
minute with one sample, so its first step is the one timed, and none is timed with 32; "fused, bf16" compares with dense
in float32 there.

"graph": forward and backward are recorded once and replayed without their Python (mode graph of the trainer), dense's,
too: its gradients then keep their memory, which each eager step maps anew. Ratios are to the fastest dense side.

    python benchmarks/step.py [--cases NAME ...] [--repeats 5] [--compile]      5 minutes
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from common import about, in_turns, record, update
from torch import nn

from comera.baselines import Method
from comera.fusion import fuse_
from comera.memory.recompute import recompute_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.rank import RankController
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.lm import recipe as lm
from comera.recipes.lm.data import Batch
from comera.recipes.lm.model import ModelConfig
from comera.trainer.step import TrainStep

# name: batch, length, dropout, precision, goal for the ratio dense / fused
CASES = {
    "batch 32": (32, 128, 0.1, "fp32", 10.0),
    "batch 32, no dropout": (32, 128, 0.0, "fp32", None),
    "batch 1": (1, 128, 0.1, "fp32", 9.0),
    "batch 1, bf16": (1, 128, 0.1, "bf16", 2.0),
    "Llama-style, 4 × 256": (4, 256, 0.0, "fp32", 5.0),
}
LLAMA = "Llama-style, 4 × 256"
SIDES = ("dense", "compressed", "fused")
RECORDED = ("dense, graph", "fused, graph")
COMPILED = ("dense, compiled", "compressed, compiled")


def make_batch(name: str) -> ExampleBatch | Batch:
    """Random tokens, and what is to be learned of them, of one case."""
    batch_size, length, *_ = CASES[name]
    words = 8192 if name == LLAMA else 30_000
    ids = torch.randint(1000, words, (batch_size, length), generator=torch.Generator().manual_seed(0))
    if name == LLAMA:
        return Batch(ids, ids.roll(-1, 1), torch.full((batch_size,), length))
    mask = torch.ones(batch_size, length, dtype=torch.bool)
    return ExampleBatch(ids, torch.zeros_like(ids), mask, ids[:, 0] % 3)


def make_step(side: str, batch: ExampleBatch | Batch, dropout: float, precision: str) -> Callable[[], object]:
    """A step of one side, on its own model."""
    torch.manual_seed(0)
    kind, *ways = side.split(", ")
    method: Method = "dense" if kind == "dense" else "comera"
    model: nn.Module
    loss: Callable[[Any, Any], torch.Tensor]
    if isinstance(batch, ExampleBatch):
        config = preset(method, "mnli")
        model, _ = untrained(replace(config, model=replace(config.model, dropout=dropout)), 30_522)
        loss = example_loss
    else:
        sizes = ModelConfig(hidden=768, layers=12, heads=12, dropout=dropout)
        model, _ = lm.build_model(replace(lm.preset(method, "base"), model=sizes), 8192)
        loss = lm.next_token_loss
    if kind != "compressed" and "compiled" not in ways:  # torch.compile leaves out what fuse_ puts in
        fuse_(model, keep_logits=isinstance(batch, ExampleBatch))
    if "recompute" in ways:
        recompute_(model)
    optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
    ranks = RankController(model).attach(optimizer) if method == "comera" else None
    modes: dict[str, Literal["compile", "graph"]] = {"compiled": "compile", "graph": "graph"}
    mode: Literal["eager", "compile", "graph"] = next((modes[way] for way in ways if way in modes), "eager")
    precision = "bf16" if "bf16" in ways else precision
    step = TrainStep(
        model.train(), loss, optimizer, max_grad_norm=1.0, precision=precision, mode=mode, controller=ranks
    )
    take = partial(step, [batch])
    if mode == "graph":
        record(take, step)
    return take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if len(options.cases) > 1:
        others = ["--repeats", str(options.repeats), *(["--compile"] if options.compile else [])]
        for name in options.cases:
            subprocess.run([sys.executable, __file__, "--cases", name, *others], check=True)
        return
    (name,) = options.cases
    batch_size, _, dropout, precision, goal = CASES[name]
    batch = make_batch(name)
    sides: tuple[str, ...] = (*SIDES, *RECORDED, *(COMPILED if options.compile else ()))
    if precision == "bf16":
        sides = tuple(side for side in sides if side != "dense, graph")
    if name == "batch 32":
        sides += ("fused, bf16",)
    steps = {side: make_step(side, batch, dropout, precision) for side in sides}
    seconds = {}
    if precision == "bf16":
        seconds = in_turns({side: steps.pop(side) for side in sides if side.startswith("dense")}, 1, warm_ups=0)
    visit = 4 if batch_size == 1 else 1
    seconds |= in_turns(steps, options.repeats * (2 if visit > 1 else 1), warm_ups=1, visit=visit)
    rows = []
    dense = min(statistics.median(times) for side, times in seconds.items() if side.startswith("dense"))
    for side, times in seconds.items():
        p20, _, _, p80 = statistics.quantiles(times, n=5) if len(times) > 1 else times * 4
        row = {
            "case": name,
            "side": side,
            "p20_ms": f"{p20 * 1e3:.1f}",
            "p50_ms": f"{statistics.median(times) * 1e3:.1f}",
            "p80_ms": f"{p80 * 1e3:.1f}",
            "times_dense": f"{dense / statistics.median(times):.2f}",
            "goal": goal if side == "fused, graph" and goal else "",
        }
        rows.append({**row, **about()})
        print(" ".join(f"{value!s:>12}" for value in row.values()), flush=True)
    update("step", rows, key=("case", "side"))


if __name__ == "__main__":
    main()
