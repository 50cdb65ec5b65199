"""MNLI from scratch on every pair there is: accuracy over training time, compressed and dense of several sizes.

The recipe `comera train mnli --preset short` on all training pairs: six encoders, 16 pairs a step. The compressed model
goes through two passes and then, for each target, a late stage of 1.5 passes from there. Beside it are the same model
dense, for as long; narrow dense, the widest that needs no more FLOPs a step; and a small dense model. Rates and dropout
of each are the best of those tried (docs/log.md). Held out: all matched development pairs, by which they were chosen.

    python benchmarks/mnli.py speed --path FOLDER                       seconds of a step, on a quiet machine
    python benchmarks/mnli.py runs --path FOLDER --runs FOLDER [--cases comera narrow] [--seeds 1] [--targets 0.2]
                                                   [--pairs 20690]    fewer pairs, as many steps: what the data limits
    python benchmarks/mnli.py figure                                    docs/mnli.png

A run is kept in --runs, as `comera train mnli` leaves it: one that was stopped goes on from its last checkpoint, of a
finished one the figures are read again. With OMP_NUM_THREADS=1 and one case in each of two terminals, as measured, each
run has a core of its own, for 25 minutes. `minute` counts the steps from the beginning of the early stage, at the
seconds of `speed`; until its size has fallen, for half of its steps, a late stage takes the mean of before and after.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from common import about, changes, measured, update, write

from comera.baselines import Method
from comera.recipes.classify import mnli
from comera.recipes.classify.recipe import ClassifyConfig, Preset
from comera.report.run import RunData, read_run

NAME, SPEED = "mnli", "mnli_speed"
KEY = ("case", "seed", "stage", "pairs")
TARGETS = (0.2, 0.5, 0.8)  # the smallest first: a run that is stopped early has it
ALL = 41_379  # training pairs of the sample; more are not read
FIGURE = Path(__file__).parents[1] / "docs" / "mnli.png"


class Case(NamedTuple):
    """A preset of the recipe, with what differs from it in training and model, and the number of steps of `speed`."""

    method: Method
    preset: Preset
    train: dict[str, Any]
    dropout: float
    speed_steps: int = 200
    ngrams: int | None = None


CASES = {
    "comera": Case("comera", "mnli-short", {"epochs": 2.0}, 0.1),
    "ngrams": Case("comera", "mnli-short", {"epochs": 2.0}, 0.1, ngrams=3),
    "dense": Case("dense", "mnli-short", {"epochs": 0.45}, 0.1, speed_steps=60),
    "narrow": Case("narrow", "mnli-short", {"epochs": 3.5, "lr": 1e-4}, 0.1),
    "small": Case("dense", "mnli-small", {"epochs": 3.0}, 0.3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "runs", "figure"))
    parser.add_argument("--path", help="folder with MNLI's files")
    parser.add_argument("--runs", help="folder of the runs")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--targets", nargs="+", type=float, default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--pairs", type=int, default=ALL, help="training pairs that are read")
    parser.add_argument("--cache", help="folder for prepared data")
    options = parser.parse_args()
    if options.part == "figure":
        draw()
    elif not options.path or (options.part == "runs" and not options.runs):
        parser.error("speed needs --path, runs needs --path and --runs")
    elif options.part == "speed":
        write(SPEED, [row for case in options.cases for row in speed(options, case)])
    elif found := changes():
        sys.exit(f"results belong to a commit, and a run takes long: commit these changes first\n{found}")
    else:
        for seed in options.seeds:
            for case in options.cases:
                config = configuration(options, case, seed)
                name = f"{case}-{seed}" + (f"-{options.pairs}" if options.pairs < ALL else "")
                rows = list(run(replace(config, out=str(Path(options.runs) / name)), case, seed))
                for row in rows:
                    print(" ".join(f"{value!s:>9}" for value in list(row.values())[:8]), flush=True)
                update(NAME, rows, KEY)


def configuration(options: argparse.Namespace, case: str, seed: int) -> ClassifyConfig:
    """The preset, with what differs in this case, for as many steps as passes over all pairs have."""
    method, preset, train, dropout, _, ngrams = CASES[case]
    config = mnli.preset(method, preset)
    more = ALL / options.pairs
    return replace(
        config,
        data=replace(config.data, path=options.path, max_examples=options.pairs, cache=options.cache),
        model=replace(config.model, dropout=dropout),
        compress=replace(config.compress, ngrams=ngrams),
        late_targets=tuple(options.targets) if method == "comera" else (),
        late_epochs=1.5 * more,
        train=replace(config.train, seed=seed, **train | {"epochs": train["epochs"] * more}),
    )


def speed(options: argparse.Namespace, case: str) -> Iterator[dict[str, Any]]:
    """Seconds of a step of each stage, the mean over the second half of a short run."""
    steps = CASES[case].speed_steps
    config = configuration(options, case, seed=1)
    late = replace(config.train.late, steps=steps // 2)
    train = replace(config.train, epochs=None, steps=steps, log_every=steps // 2, eval_batches=1, late=late)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, train=train, out=folder + "/run")
        mnli.run(config)
        for stage, found in finished(config):
            middle, end = found.train[-2:]
            step_ms = (end.time - middle.time) / (end.step - middle.step) * 1e3
            yield {"case": case, "stage": stage, "step_ms": f"{step_ms:.4g}", **about()}


def finished(config: ClassifyConfig) -> Iterator[tuple[str, RunData]]:
    """The stages of a run that are there, in order; none after one that was interrupted."""
    for stage, folder in mnli.runs(config).items():
        found = read_run(folder)
        if found.summary is None or found.summary.stopped == "interrupted":
            return
        yield stage if config.method == "comera" else "dense", found


def run(config: ClassifyConfig, case: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train, or go on, and one row for each stage."""
    mnli.run(config, resume=config.folder.exists())
    for stage, found in finished(config):
        end = found.evals[-1]
        assert found.summary is not None
        begun = found.provenance[0]
        yield {
            "case": case,
            "seed": seed,
            "stage": stage,
            "pairs": config.data.max_examples,
            "accuracy": f"{100 * end.metrics['accuracy']:.2f}",
            "loss": f"{end.loss:.4f}",
            "size_mb": f"{found.summary.size_bytes / 2**20:.3g}",
            "parameters": found.summary.parameters,
            "steps": end.step,
            "curve": " ".join(f"{each.step}:{100 * each.metrics['accuracy']:.2f}" for each in found.evals),
            **about(),
            "threads": begun["threads"],
            "commit": begun["commit"].removesuffix("-dirty"),  # by results alone: `runs` starts with no other changes
        }


Timed = tuple[dict[str, str], list[tuple[float, float]]]  # a row, and its curve in minutes and per cent


def timed(rows: list[dict[str, str]], speeds: list[dict[str, str]]) -> Iterator[Timed]:
    """The rows whose steps were measured, with their curves over minutes from the beginning of the early stage."""
    minutes = {(row["case"], row["stage"]): float(row["step_ms"]) / 60e3 for row in speeds}
    ends: dict[tuple[str, str], tuple[float, float]] = {}  # of the early stages, by seed and number of pairs
    for row in rows:
        if (step := minutes.get((row["case"], row["stage"]))) is None:
            continue
        points = [(int(at), float(accuracy)) for at, accuracy in (each.split(":") for each in row["curve"].split())]
        if row["stage"].startswith("late"):
            begin, early = ends[row["seed"], row["pairs"]], minutes[row["case"], "early"]
            falling = int(row["steps"]) / 2
            spent = [(early - step) / 2 * min(at, falling) for at, _ in points]
            curve = [begin, *((begin[0] + at * step + more, y) for (at, y), more in zip(points, spent, strict=True))]
        else:
            curve = [(at * step, accuracy) for at, accuracy in points]
        if row["stage"] == "early":
            ends[row["seed"], row["pairs"]] = curve[-1]
        yield row, curve


def summary(rows: list[dict[str, str]], speeds: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with the minute of their end in place of their curves."""
    step_ms = {(row["case"], row["stage"]): row["step_ms"] for row in speeds}
    return [
        {**without_curve(row), "step_ms": step_ms[row["case"], row["stage"]], "minute": f"{curve[-1][0]:.1f}"}
        for row, curve in timed(rows, speeds)
    ]


def without_curve(row: dict[str, str]) -> dict[str, str]:
    return {column: value for column, value in row.items() if column != "curve"}


def draw() -> None:
    """Accuracy over minutes, one line for each stage of each run; and the best of the early stage over pairs."""
    from figures import GREY, INK, ORANGE, TEAL, png, styled
    from matplotlib.figure import Figure  # only this part needs it

    lines: dict[tuple[str, str], dict[str, Any]] = {
        ("comera", "early"): {"color": TEAL},
        ("comera", "late 0.2"): {"color": ORANGE},
        ("comera", "late 0.5"): {"color": ORANGE, "linestyle": "--"},
        ("comera", "late 0.8"): {"color": ORANGE, "linestyle": ":"},
        ("narrow", "dense"): {"color": GREY},
        ("small", "dense"): {"color": GREY, "linestyle": "--"},
        ("dense", "dense"): {"color": INK},
    }
    with styled():
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes, right = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
        named = set()
        for row, curve in timed(measured(NAME), measured(SPEED)):
            if row["stage"] == "early":
                best = max(accuracy for _, accuracy in curve)
                right.plot(int(row["pairs"]) / 1000, best, "o", ms=4, color=lines["comera", "early"]["color"])
            if int(row["pairs"]) < ALL:
                continue
            kind = row["case"], row["stage"]
            what = {"comera": f"compressed, {kind[1]}", "dense": "the same dense"}.get(kind[0], f"{kind[0]} dense")
            label = None if kind in named else f"{what}, {row['size_mb']} MB"
            named.add(kind)
            axes.plot(*zip(*curve, strict=True), marker="o", ms=3, label=label, **lines[kind])
        axes.set(xlabel="minutes of training on one core", ylabel="per cent of the development pairs right")
        axes.legend(frameon=False)
        right.set(xlabel="thousand pairs, early stage,\nas many steps", xlim=(0, 50))
        FIGURE.write_bytes(png(figure))
    print(FIGURE)


if __name__ == "__main__":
    main()
