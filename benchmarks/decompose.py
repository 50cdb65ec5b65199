"""A trained dense classifier, made smaller and fine-tuned: accuracy against size, by decomposition and by pruning.

The dense encoder of sst2.py, trained on SST-2 at its tuned rate, is made 2, 5 and 10 times smaller as a whole:

    btt         block tensor trains, an SVD of every block; the token embedding a TT-matrix
    tt          tensor trains of order 4 by TT-SVD; the token embedding alike
    low-rank    order 2: two factors by SVD, of the embedding, too
    magnitude   the smallest weights of all linear layers and the embedding are 0 and stay so (torch.nn.utils.prune).
                Only the others are counted, without their places; steps and dense products take as long as before.
    dense       not made smaller, for comparison

Each is fine-tuned for half of the steps that dense training took, at every rate; the best on the phrases that were
split off counts. Accuracy is read on GLUE's development set, before fine-tuning and after.

    python benchmarks/decompose.py train --data FOLDER --model FOLDER     the dense model, once
    python benchmarks/decompose.py cases --data FOLDER --model FOLDER
    options: --cases NAMES, --ratios RATIOS, --rates RATES, --seeds 1, --jobs N, --cache FOLDER, --again

Rows are written one by one to results/decompose.csv; runs that it holds are not repeated without --again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import sst2
from children import run_children
from common import about, measured, update
from torch import nn
from torch.nn.utils import prune

from comera.recipes.classify import recipe as classify
from comera.recipes.classify.data import prepare
from comera.recipes.classify.model import CompressConfig, outside
from comera.recipes.classify.recipe import ClassifyConfig, ClassifyTask
from comera.trainer.evaluation import evaluate
from comera.trainer.loop import fit
from comera.trainer.processes import open_accelerator

KEY = ("case", "ratio", "lr", "seed")
CASES = {
    "dense": None,
    "btt": CompressConfig(format="btt", embedding_order=3),
    "tt": CompressConfig(format="tt", order=4, embedding_order=3),
    "low-rank": CompressConfig(format="tt", order=2, embedding_order=2),
    "magnitude": None,
}
RATIOS = (2, 5, 10)
RATES = (1e-4, 3e-4, 1e-3)
EPOCHS = sst2.EPOCHS / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "cases", "one"))
    parser.add_argument("--data", type=Path, required=True, help="folder of sst2.py's three files")
    parser.add_argument("--model", type=Path, required=True, help="folder of the dense model")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, which share the cores")
    parser.add_argument("--cache", help="folder for prepared data")
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "train":
        train(options)
    elif options.part == "one":
        print(json.dumps(run(options, **json.loads(options.run))))
    else:
        for row in campaign(options):
            print(" ".join(f"{row[name]:>10}" for name in (*KEY, "before", "valid", "dev", "parameters")), flush=True)
            update("decompose", [row], KEY)


def train(options: argparse.Namespace) -> None:
    """Train the dense model and write it as transformers reads it."""
    name = f"dense-{sst2.WIDTH}"
    lr = sst2.best_rate(name, sst2.EPOCHS / sst2.TUNING)
    config = sst2.configuration(options, sst2.CASES[name], sst2.settings("dense", lr=lr, epochs=sst2.EPOCHS), test=True)
    with tempfile.TemporaryDirectory() as folder:
        classify.run(replace(config, out=folder))
        written = ["--to", "safetensors", "--dense", "--out", str(options.model)]
        (trained,) = Path(folder).rglob("config.yaml")
        subprocess.run([sys.executable, "-m", "comera", "export", str(trained.parent), *written], check=True)


def configuration(options: argparse.Namespace, case: str, ratio: float, lr: float, seed: int) -> ClassifyConfig:
    """Fine-tuning of the dense model, by the recipe."""
    settings = sst2.settings("comera" if CASES[case] else "dense", lr=lr, seed=seed, epochs=EPOCHS)
    config = sst2.configuration(options, sst2.CASES[f"dense-{sst2.WIDTH}"], settings, test=True)
    # sizes beside a checkpoint are those of the preset: they say nothing
    config = replace(config, model=replace(classify.MODELS["small"], checkpoint=str(options.model)))
    if compress := CASES[case]:
        return replace(config, method="comera", compress=replace(compress, ratio=ratio))
    return config


def run(options: argparse.Namespace, case: str, ratio: float, lr: float, seed: int) -> dict[str, Any]:
    """Make the model smaller and fine-tune it in this process, a fresh one; the figures."""
    config = configuration(options, case, ratio, lr, seed)
    data = prepare(config.data, config.model.source, quiet=True)
    task = ClassifyTask(config, data)
    if case == "magnitude":
        parameters = zero_smallest_(task.model, ratio)
    else:
        parameters = sum(p.numel() for p in task.model.parameters())
    before = accuracy(task, "test")
    task.part = "dev"
    with tempfile.TemporaryDirectory() as folder:
        summary = fit(task, config.train, Path(folder))
    return {
        "before": f"{before:.2f}",
        "valid": f"{100 * summary.metrics['accuracy']:.2f}",
        "dev": f"{accuracy(task, 'test'):.2f}",
        "parameters": parameters,
        "steps": summary.steps,
    }


def accuracy(task: ClassifyTask, part: Literal["dev", "test"]) -> float:
    """In per cent, on a part of the data."""
    task.part = part
    return 100 * evaluate(task, task.model, open_accelerator("cpu"))["accuracy"]


def zero_smallest_(model: nn.Module, ratio: float) -> int:
    """Prune a model to 1/ratio of its parameters by magnitude; returns how many are left."""
    kept = set(outside(model))  # type: ignore[arg-type]
    pruned = [
        (module, "weight")
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and name not in kept
    ]
    total = sum(p.numel() for p in model.parameters())
    excess = round(total - total / ratio)
    prune.global_unstructured(pruned, prune.L1Unstructured, amount=excess)
    return total - excess


def summary(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Each case at the rate that is best on the phrases that were split off, the mean over its seeds."""
    cases: dict[tuple[float, str], dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        cases.setdefault((float(row["ratio"]), row["case"]), {}).setdefault(row["lr"], []).append(row)
    lines = []
    for ratio, name in sorted(cases, key=lambda case: (case[0], list(CASES).index(case[1]))):
        rates = cases[ratio, name]
        best = max(rates.values(), key=lambda own: statistics.fmean(float(row["valid"]) for row in own))
        line = {
            "ratio": f"{ratio:g}",
            "case": name,
            "parameters": f"{int(best[0]['parameters']):,}",
            "lr": best[0]["lr"],
        }
        for figure in ("before", "dev", "valid"):
            line[figure] = f"{statistics.fmean(float(row[figure]) for row in best):.2f}"
        lines.append({**line, "seeds": str(len(best)), **{column: best[0][column] for column in about()}})
    return lines


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, each in a process of its own, `--jobs` of them at a time."""
    done = {tuple(row[name] for name in KEY) for row in measured("decompose")}
    commands = {}
    for case in options.cases:
        for ratio in [1] if case == "dense" else options.ratios:
            for lr in options.rates:
                for seed in range(options.seeds):
                    place = (case, f"{ratio:g}", f"{lr:g}", str(seed))
                    if place not in done or options.again:
                        of_run = {"case": case, "ratio": ratio, "lr": lr, "seed": seed}
                        given = ["--data", str(options.data), "--model", str(options.model)]
                        given += ["--cache", options.cache] if options.cache else []
                        commands[place] = [__file__, "one", *given, "--run", json.dumps(of_run)]
    for place, figures in run_children(commands, options.jobs):
        yield {**dict(zip(KEY, place, strict=True)), **figures, **about()}


if __name__ == "__main__":
    main()
