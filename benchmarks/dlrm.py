"""DLRM with compressed tables against the dense baseline, at the table sizes of the full Kaggle data.

size      parameters of the model and of its tables at each width, counted without allocating them.
memory    what a model, its gradients, the optimizer and a few steps add to an interpreter with its libraries: the peak
          of a fresh process per side. Dense at the largest width does not fit and is estimated.
quality   held-out normalized cross-entropy on the last seventh of the rows, validation and test together, after one
          pass over the others; with a late stage, and over several seeds.
speed     training samples per second; steps of the sides alternate in one process. Ours run from recordings, as
          `--train.mode graph` has them, and eager; sparse gradients of dense tables cannot be recorded. `without
          tables`: the dense model with one row in each table, recorded, all of whose time our side has, too.

    python benchmarks/dlrm.py [--part size memory speed quality] [--path train.txt.gz]

Without --path, clicks are synthetic and the quality figures mean nothing. Dense at D = 16 takes 4 to 9 GB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo  # optimizers import it at first use: counted as part of the libraries
from common import FIRST, about, in_turns, record, update

from comera.baselines import Method
from comera.memory.estimate import MemoryMeter
from comera.nn.size import model_size
from comera.optim.names import OptimizerName
from comera.pretrained import load_pretrained
from comera.recipes.base import runs
from comera.recipes.dlrm import recipe as dlrm
from comera.recipes.dlrm.click_metrics import click_metrics
from comera.recipes.dlrm.criteo import KAGGLE_TABLES, ClickData, prepare
from comera.recipes.dlrm.model import DLRMConfig
from comera.recipes.dlrm.recipe import DLRMTask, DLRMTaskConfig, build_model, click_loss
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.optimizer import named_optimizer
from comera.trainer.step import TrainStep

PARTS = ("size", "memory", "speed", "quality")
DIMS = (16, 128)
KEY = ("part", "figure", "method", "optimizer", "dim", "seed")
GB, MB = 10**9, 10**6
STEPS = FIRST + 2
EAGER = "comera, eager"
METHOD_OF: dict[str, Method] = {"dense": "dense", "comera": "comera", EAGER: "comera", "hashing": "hashing"}  # by side
MODES: dict[str, Literal["eager", "graph"]] = {"comera": "graph"}  # of a side that does not run eager
WITHOUT = "without tables"

Row = dict[str, Any]


def row(part: str, figure: str, value: float, method: str, dim: int, **others: Any) -> Row:
    """A figure; goal: what it should reach, note: how it was obtained."""
    named = {"part": part, "figure": figure, "method": method, "optimizer": "", "dim": dim, "seed": ""}
    return {**named, "value": f"{value:.5g}", "goal": "", "note": "", **others}


def configuration(options: argparse.Namespace, method: Method, dim: int, optimizer: OptimizerName) -> DLRMTaskConfig:
    """The preset "kaggle" for this side."""
    config = dlrm.preset(method, "kaggle")
    data = replace(config.data, path=options.path, cache=options.cache)
    train = replace(config.train, device="cpu", progress=False, batch_size=options.batch, optimizer=optimizer)
    return replace(config, data=data, model=DLRMConfig(dim=dim), train=train)


def size(options: argparse.Namespace) -> Iterator[Row]:
    """Parameters stored, and how many times fewer than dense."""
    for dim in DIMS:
        with torch.device("meta"):
            model, report = build_model(configuration(options, "comera", dim, "adamw"), KAGGLE_TABLES)
        assert report is not None
        stored, dense = sum(p.numel() for p in model.tables.parameters()), dim * sum(KAGGLE_TABLES)
        whole = model_size(model, dense_total=report.dense_total)
        yield row("size", "model GB", 4 * report.dense_total / GB, "dense", dim)
        yield row("size", "model GB", 4 * whole.total / GB, "comera", dim)
        yield row("size", "model, times smaller", whole.ratio, "comera", dim, goal=">= 150")
        yield row("size", "tables, times smaller", dense / stored, "comera", dim, goal=">= 200")


def make_step(
    options: argparse.Namespace,
    method: Method,
    dim: int,
    optimizer: OptimizerName,
    data: ClickData,
    mode: Literal["eager", "graph"] = "eager",
    sizes: Sequence[int] = KAGGLE_TABLES,
) -> tuple[TrainStep, Callable[[], object]]:
    """A training step of one side, and what takes it on the next batch each time. sizes: rows of the tables."""
    config = configuration(options, method, dim, optimizer)
    model, _ = build_model(config, sizes)
    step = TrainStep(model, click_loss, named_optimizer(model, config.train), mode=mode)
    batches = (data.train_batch(index, options.batch, 0) for index in range(10**9))
    if sizes != KAGGLE_TABLES:
        batches = (batch._replace(ids=torch.remainder(batch.ids, torch.tensor(sizes))) for batch in batches)
    return step, lambda: step([next(batches)])


def added(options: argparse.Namespace) -> None:
    """Print the bytes that one side adds to this process, a fresh one."""
    side, optimizer, dim = options.added
    method = METHOD_OF.get(side, side)
    data = prepare(configuration(options, method, int(dim), optimizer).data, quiet=True)
    data.train_batch(0, options.batch, 0)  # maps its columns, which are not part of training
    meter = MemoryMeter.start()
    _, take = make_step(options, method, int(dim), optimizer, data, MODES.get(side, "eager"))
    for _ in range(STEPS):
        take()
    print(json.dumps({"added": meter.added}))


def memory(options: argparse.Namespace) -> Iterator[Row]:
    """Peak training memory beyond the interpreter's, with the same optimizer on both sides."""
    for optimizer in ("adagrad", "adamw"):
        for dim in DIMS:
            estimated: dict[str, Any] = dlrm.estimate(configuration(options, "dense", dim, optimizer))
            estimated[EAGER] = estimated["comera"]
            found: dict[str, float] = {}
            for side, estimate in estimated.items():  # of all methods that can make tables so small
                if side == "dense" and dim > 16:
                    found[side], note = estimate.total, "estimated: it does not fit"
                else:
                    command = [sys.executable, __file__, "--added", side, optimizer, str(dim)]
                    command += ["--batch", str(options.batch), "--threads", str(options.threads)]
                    command += [
                        f"--{name}={getattr(options, name)}" for name in ("path", "cache") if getattr(options, name)
                    ]
                    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    found[side] = json.loads(printed.splitlines()[-1])["added"]
                    note = f"measured; estimated {estimate.total / MB:.0f} MB"
                goal = "< 2000" if (side, dim) == ("comera", 128) else ""
                yield row("memory", "peak MB", found[side] / MB, side, dim, optimizer=optimizer, goal=goal, note=note)
            for side, goal in (("comera", ">= 10"), (EAGER, "")):
                ratio = found["dense"] / found[side]
                yield row("memory", "peak, times lower", ratio, side, dim, optimizer=optimizer, goal=goal)


def held_out(config: DLRMTaskConfig, folder: Path) -> tuple[dict[str, float], int]:
    """AUC and normalized cross-entropy of a finished run over the whole last seventh, and its model's parameters."""
    data = prepare(config.data, quiet=True)
    model = load_pretrained(DLRMTask(config, data).model, find_checkpoint(folder)).eval()
    rows = []
    with torch.no_grad():
        for part in ("validation", "test"):
            rows += [torch.stack([model(b.dense, b.ids), b.labels], 1) for b in data.batches(part, 4096)]
    return click_metrics(*torch.cat(rows).unbind(1)), sum(p.numel() for p in model.parameters())


def quality(options: argparse.Namespace) -> Iterator[Row]:
    """As `comera train dlrm` trains them: the dense baseline, and ours with the presets sample and kaggle; same rows.

    The dense baseline has one row per category. In tables of the full sizes hardly two of the sample's categories would
    share a row anyway, and AdamW, with which it learns best, would take seconds per step over 34 million rows.
    """
    sides: tuple[tuple[Method, dlrm.Preset], ...] = (("dense", "sample"), ("comera", "sample"), ("comera", "kaggle"))
    scores: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for method, preset in sides:
            config = dlrm.preset(method, preset)
            train = replace(config.train, seed=seed, save_every=0, eval_every=0, device="cpu", progress=False)
            data = replace(config.data, path=options.path, cache=options.cache)
            with tempfile.TemporaryDirectory() as folder:
                config = replace(config, data=data, train=train, out=folder)
                dlrm.run(config)
                for stage, run in runs(config).items():
                    name = stage if method == "dense" else f"{stage}, {preset}"
                    figures, parameters = held_out(config, run)
                    scores.setdefault(name, []).append(figures["nce"])
                    for figure, value in figures.items():
                        given: dict[str, Any] = {"optimizer": config.train.optimizer, "seed": seed}
                        given["note"] = f"{parameters:,} parameters"
                        yield row("quality", figure, value, name, 16, **given)
    for name, values in scores.items():
        changes = [100 * (nce / dense - 1) for nce, dense in zip(values, scores["dense"], strict=True)]
        error = statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else float("nan")
        goal, note = "<= 0.5" if "late" in name else "", f"{len(changes)} seeds, standard error {error:.2g}"
        mean = statistics.mean(changes)
        yield row("quality", "nce above dense, %", mean, name, 16, seed="mean", goal=goal, note=note)


def speed(options: argparse.Namespace) -> Iterator[Row]:
    """Samples per second: dense with Adagrad on sparse gradients, its only fast way, against ours with Adagrad and
    AdamW; then dense with AdamW and its dense gradients. Hashed tables of as many bytes as ours, with Adagrad."""
    rounds: tuple[tuple[OptimizerName, tuple[OptimizerName, ...]], ...] = (
        ("adagrad", ("adagrad", "adamw")),
        ("adamw", ("adamw",)),
    )
    for of_dense, optimizers in rounds:
        data = prepare(configuration(options, "dense", 16, of_dense).data, quiet=True)
        sides = [("dense", of_dense), *((side, each) for each in optimizers for side in ("comera", EAGER))]
        sides += [("hashing", "adagrad")] if of_dense == "adagrad" else []
        steps: dict[str, Callable[[], object]] = {}
        for side, optimizer in sides:
            method, mode = METHOD_OF[side], MODES.get(side, "eager")
            step, steps[f"{side} {optimizer}"] = make_step(options, method, 16, optimizer, data, mode)
            if mode == "graph":
                record(steps[f"{side} {optimizer}"], step)
        step, steps[WITHOUT] = make_step(options, "dense", 16, of_dense, data, "graph", [1] * len(KAGGLE_TABLES))
        record(steps[WITHOUT], step)
        seconds = {name: statistics.median(times) for name, times in in_turns(steps, options.repeats, visit=3).items()}
        del steps, step
        against, dense = f"against dense {of_dense}", seconds[f"dense {of_dense}"]
        times_faster = f"times faster than dense {of_dense}"
        yield row("speed", times_faster, dense / seconds[WITHOUT], WITHOUT, 16, note=against)
        for side, optimizer in sides:
            given = {"optimizer": optimizer, "note": against}
            median = seconds[f"{side} {optimizer}"]
            yield row("speed", "samples per second", options.batch / median, side, 16, **given)
            if side != "dense":
                goal = "" if side != "comera" else ">= 1.3" if of_dense == "adagrad" else ">= 1"
                yield row("speed", times_faster, dense / median, side, 16, **given, goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--path", help="Criteo's train.txt, plain or .gz (default: a synthetic click log)")
    parser.add_argument("--cache", help="folder for prepared data")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seeds", type=int, default=10, help="seeds for the part quality")
    parser.add_argument("--repeats", type=int, default=9, help="steps per side for the part speed")
    parser.add_argument("--added", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.added:
        added(options)
        return
    parts = {"size": size, "memory": memory, "quality": quality, "speed": speed}
    source = {"data": "criteo" if options.path else "synthetic", "batch": options.batch}
    for part in options.part:
        for found in parts[part](options):
            print(" ".join(f"{value!s:<12}" for value in found.values()), flush=True)
            update("dlrm", [{**found, **source, **about()}], KEY)


if __name__ == "__main__":
    main()
