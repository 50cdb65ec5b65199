"""The MNLI protocol on a GPU with the published preset: early stage, late stages and dense baseline, within seconds.

Data: `--data`, or the variable COMERA_MNLI; nothing is downloaded. Steps are timed first. The epochs of each stage are
then chosen to fit all runs into `--seconds`, in the recipe's proportion (6 early : 2 late) and never more than that; in
any case each run ends at its share of the seconds. Steps run as CUDA graphs.

    python benchmarks/gpu_mnli.py --data FOLDER [--vocab FILE] [--seconds 120] [--precision bf16] [--dry]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import about, update

from comera.baselines import Method
from comera.recipes.base import runs
from comera.recipes.classify import mnli
from comera.recipes.classify.data import prepare
from comera.recipes.classify.model import EncoderConfig
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary

METHODS: tuple[Method, ...] = ("dense", "comera")
EARLY, LATE = 6.0, 2.0  # epochs of the recipe
PROBE = 60  # timed steps, captures included
TINY = EncoderConfig(hidden=32, layers=1, heads=2, ffn=64, dropout=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("COMERA_MNLI"), help="folder of the pairs")
    parser.add_argument("--vocab", help="vocab.txt (default: where the recipe looks for it)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, over all runs")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--targets", type=float, nargs="+", default=[0.2])
    parser.add_argument("--dry", action="store_true", help="a tiny model and few pairs on the CPU; writes nothing")
    options = parser.parse_args()
    if not options.data:
        raise SystemExit("expected a folder of MNLI's pairs: give --data, or set COMERA_MNLI")
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, torch sees none: --dry runs a tiny model on the CPU")
    torch.set_float32_matmul_precision("high")
    folder = Path(tempfile.mkdtemp(prefix="comera-mnli-"))
    try:
        for method in METHODS:
            for row in measure(method, options, folder):
                print(" ".join(f"{value!s:>10}" for value in row.values()), flush=True)
                if not options.dry:
                    update("gpu_mnli", [row | about()], key=("precision", "run"))
    finally:
        shutil.rmtree(folder)


def measure(method: Method, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Train one method; yield how each of its runs ended."""
    config = configure(method, options, folder)
    step, epoch = seconds_a_step(config, folder / f"probe-{method}")
    stages = 1 + len(options.targets) * LATE / EARLY  # early stages; dense: the early stage and one late one
    length = stages if method == "comera" else 1 + LATE / EARLY
    share = options.seconds / len(METHODS)
    early = min(EARLY, share / length / (step * epoch))
    train = replace(config.train, epochs=early, max_seconds=share)
    config = replace(config, train=train, late_epochs=early * LATE / EARLY, out=str(folder / method))
    started = time.perf_counter()
    mnli.run(config)
    wall = time.perf_counter() - started
    for name, path in runs(config).items():
        summary = Summary.read(path / "summary.json")
        if summary is None:
            continue
        yield {
            "run": name,
            "precision": options.precision,
            "mode": summary.mode,
            "epochs": f"{summary.steps / epoch:.2f}",
            "steps": summary.steps,
            "stopped": summary.stopped,
            "train_s": f"{summary.time:.1f}",
            "step_ms": f"{summary.step_time * 1e3:.2f}",
            "accuracy": f"{100 * summary.metrics.get('accuracy', float('nan')):.2f}",
            "numbers": summary.parameters,
            "tensorized_ratio": f"{summary.tensorized_ratio or 1:.1f}",
            "peak_mb": f"{summary.peak_memory / 2**20:.0f}",
            "method_wall_s": f"{wall:.1f}",
        }


def configure(method: Method, options: argparse.Namespace, folder: Path) -> ClassifyConfig:
    """The published preset with this data."""
    config = mnli.preset(method, "mnli-published")
    data = replace(config.data, path=options.data, tokenizer=options.vocab, cache=str(folder / "cache"))
    train = replace(config.train, precision=options.precision, mode="graph", progress=False, log_every=50, eval_every=0)
    if options.dry:
        data = replace(data, max_examples=256, max_length=32)
        train = replace(train, device="cpu", batch_size=32, mode="eager", eval_batches=2, precision="fp32")
    config = replace(config, data=data, train=train, late_targets=tuple(options.targets))
    return replace(config, model=TINY) if options.dry else config


def seconds_a_step(config: ClassifyConfig, out: Path) -> tuple[float, int]:
    """Seconds of a step in a short run, captures included, and steps per epoch."""
    data = prepare(config.data)
    epoch = data.steps_per_epoch(config.train.batch_size)
    task = ClassifyTask(config, data)
    train = replace(config.train, epochs=None, steps=min(PROBE, epoch), eval_batches=1)
    summary = fit(task, train, out)
    return summary.time / summary.steps, epoch


if __name__ == "__main__":
    main()
