"""What a cut does to a step: the six-encoder MNLI transformer before and after rounding to a fraction of its size.

The same batch (32 pairs of 48 tokens, about the length of MNLI's pairs) and optimizer, float32, forward and backward
from recordings (mode graph of the trainer). Steps of the two models alternate in one process, and the ratio is that of
the medians.

    python benchmarks/shrunk_step.py [--target 0.2] [--batch 32] [--length 48] [--repeats 15]      2 minutes
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from common import about, in_turns, record, write
from torch import nn

import comera
from comera.fusion import fuse_
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.recipes.classify.recipe import preset, untrained
from comera.recipes.classify.task import example_loss
from comera.recipes.data.prepared import ExampleBatch
from comera.trainer.step import TrainStep

SETTINGS = ((1, 0.1), (8, 0.1), (1, 0.0))  # multiple of the ranks, dropout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for multiple, dropout in SETTINGS:
        for row in measure(options, multiple, dropout):
            rows.append({**row, **about()})
            print(" ".join(map(str, row.values())), flush=True)
    write("shrunk_step", rows)


def make_steps(
    shape: tuple[int, int], target: float, multiple: int, dropout: float, mode: Literal["eager", "graph"]
) -> tuple[dict[str, Callable[[], object]], dict[str, nn.Module]]:
    """A step of each model on one batch of this shape, before and after the cut, and the models."""
    torch.manual_seed(0)
    config = preset(preset="mnli")
    full, _ = untrained(replace(config, model=replace(config.model, dropout=dropout)), 30_522)
    models: dict[str, nn.Module] = {"before": full, "after": copy.deepcopy(full)}
    comera.round_(models["after"], target, multiple=multiple)
    ids = torch.randint(1000, 30_000, shape)
    batch = ExampleBatch(ids, torch.zeros_like(ids), torch.ones(shape, dtype=torch.bool), ids[:, 0] % 3)
    steps: dict[str, Callable[[], object]] = {}
    for name, model in models.items():
        fuse_(model)
        optimizer = AdamW(param_groups(model, lr=1e-4), fused=True)
        step = TrainStep(model.train(), example_loss, optimizer, max_grad_norm=1.0, mode=mode)
        steps[name] = partial(step, [batch])
        if mode == "graph":
            record(steps[name], step)
    return steps, models


def measure(options: argparse.Namespace, multiple: int, dropout: float) -> list[dict[str, object]]:
    """Time both models in turns."""
    steps, models = make_steps((options.batch, options.length), options.target, multiple, dropout, "graph")
    seconds = in_turns(steps, options.repeats)
    rows = []
    for name, values in seconds.items():
        p20, _, _, p80 = statistics.quantiles(values, n=5)
        rows.append(
            {
                "model": f"{name} the cut to {options.target:g}",
                "shape": f"{options.batch} x {options.length}",
                "multiple": multiple,
                "dropout": dropout,
                "tensorized": comera.model_size(models[name]).tensorized,
                "p20_ms": f"{p20 * 1e3:.1f}",
                "p50_ms": f"{statistics.median(values) * 1e3:.1f}",
                "p80_ms": f"{p80 * 1e3:.1f}",
                "speed": f"{statistics.median(seconds['before']) / statistics.median(values):.3f}",
            }
        )
    return rows


if __name__ == "__main__":
    main()
