"""MNLI from scratch on every pair there is: accuracy over training time, compressed and narrow dense.

The recipe `comera train mnli --preset short` on all training pairs: six encoders, 16 pairs a step. The compressed model
goes through two passes and then, for each target, a late stage of 0.75 passes from there; narrow dense, the widest that
needs no more FLOPs a step, takes 3.5 passes, as long as ours to one target. Its rate, 1e-4, is the better one of two
(docs/log.md). Held out: all matched development pairs, after each pass and at the end of each stage.

    python benchmarks/mnli.py runs --path FOLDER --runs FOLDER [--cases comera narrow] [--seeds 1]      1.5 hours a run
    python benchmarks/mnli.py figure                                                          docs/mnli.png

A run is kept in --runs, as `comera train mnli` leaves it: one that was stopped goes on from its last checkpoint, of a
finished one the figures are read again. With OMP_NUM_THREADS=1 and one case in each of two terminals, as measured, each
run has a core of its own. `minute` counts training from the beginning of the early stage, without evaluations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import about, measured, update

from comera.recipes.mnli import recipe as mnli
from comera.report.run import read_run

NAME = "mnli"
KEY = ("case", "seed", "stage")
CASES = ("comera", "narrow")
TARGETS = (0.2, 0.5, 0.8)  # the smallest first: a run that is stopped early has it
ALL = 41_379  # training pairs of the sample; more are not read
FIGURE = Path(__file__).parents[1] / "docs" / "mnli.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("runs", "figure"))
    parser.add_argument("--path", help="folder with MNLI's files")
    parser.add_argument("--runs", help="folder of the runs")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--cache", help="folder for prepared data")
    options = parser.parse_args()
    if options.part == "figure":
        draw()
        return
    if not options.path or not options.runs:
        parser.error("runs needs --path and --runs")
    for seed in options.seeds:
        for case in options.cases:
            rows = list(run(configuration(options, case, seed), case, seed))
            for row in rows:
                print(" ".join(f"{value!s:>9}" for value in list(row.values())[:8]), flush=True)
            update(NAME, [{**row, **about()} for row in rows], KEY)


def configuration(options: argparse.Namespace, case: str, seed: int) -> mnli.MNLIConfig:
    """The preset, on all pairs."""
    config = mnli.preset("comera" if case == "comera" else "narrow", "short")
    data = replace(config.data, path=options.path, max_examples=ALL, cache=options.cache)
    passes: dict[str, Any] = {"epochs": 2.0} if case == "comera" else {"epochs": 2.75, "lr": 1e-4}
    return replace(
        config,
        data=data,
        late_targets=TARGETS,
        late_epochs=0.75,
        train=replace(config.train, seed=seed, **passes),
        out=str(Path(options.runs) / f"{case}-{seed}"),
    )


def run(config: mnli.MNLIConfig, case: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train, or go on, and one row for each stage."""
    mnli.run(config, resume=config.folder.exists())
    before = 0.0  # seconds of the early stage
    for stage, folder in mnli.runs(config).items():
        found = read_run(folder)
        summary = found.summary
        if summary is None or summary.stopped == "interrupted":
            return
        late = stage.startswith("late")
        began = before if late else 0.0
        curve = [f"{(began + each.time) / 60:.1f}:{100 * each.metrics['accuracy']:.2f}" for each in found.evals]
        end = found.evals[-1]
        before = before or end.time
        yield {
            "case": case,
            "seed": seed,
            "stage": stage,
            "accuracy": f"{100 * end.metrics['accuracy']:.2f}",
            "loss": f"{end.loss:.4f}",
            "minute": f"{(began + end.time) / 60:.1f}",
            "size_mb": f"{summary.size_bytes / 2**20:.3g}",
            "parameters": summary.parameters,
            "step_ms": f"{summary.step_time * 1e3:.4g}",
            "curve": " ".join(curve),
        }


def summary(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows without their curves."""
    return [{column: value for column, value in row.items() if column != "curve"} for row in rows]


def draw() -> None:
    """Accuracy over minutes, one line for each stage of each run."""
    from matplotlib.figure import Figure  # only this part needs it

    from comera.report.style import GREY, ORANGE, TEAL, png, styled

    with styled():
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.add_subplot()
        colors = {"early": TEAL, "narrow": GREY}
        dashes = dict(zip((f"late {target:g}" for target in sorted(TARGETS)), ("-", "--", ":"), strict=True))
        named = set()
        ends: dict[str, tuple[float, float]] = {}
        for row in measured(NAME):
            points = [(float(x), float(y)) for x, y in (point.split(":") for point in row["curve"].split())]
            late = row["stage"].startswith("late")
            kind = row["case"] if row["case"] == "narrow" else row["stage"]
            if late:
                points.insert(0, ends[row["seed"]])
            elif row["case"] == "comera":
                ends[row["seed"]] = points[-1]
            what = "narrow dense" if kind == "narrow" else f"compressed, {row['stage']}"
            label = None if kind in named else f"{what}, {row['size_mb']} MB"
            named.add(kind)
            style: dict[str, Any] = {"color": colors.get(kind, ORANGE), "linestyle": dashes.get(kind, "-")}
            axes.plot(*zip(*points, strict=True), marker="o", ms=4, label=label, **style)
        axes.set(xlabel="minutes of training on one core", ylabel="per cent of the development pairs right")
        axes.legend(frameon=False)
        FIGURE.write_bytes(png(figure))
    print(FIGURE)


if __name__ == "__main__":
    main()
