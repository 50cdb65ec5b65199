"""CodeBERT's job in small: loss over time, compressed beside dense and beside narrower dense models.

The recipe `comera train code-lm --preset codebert-small`, masked language modelling of Python functions and their
docstrings: 4 encoders, 256 wide, 8,192 tokens, sequences of 128. Every case gets the same wall-clock time, to which the
schedule of its rates is stretched, the same rates to choose from at that length, fused kernels and the same optimizer.
The loss is that of 128 held-out batches, in nats per masked token; they choose the rate, too. The cases in phases go on
to half of their compressed layers' size from about the middle on.

    python benchmarks/codebert_small.py --rates 5e-4 1e-3 2e-3      seed 0, every case at every rate
    python benchmarks/codebert_small.py --seeds 3                   the best rate found, further seeds
    python benchmarks/codebert_small.py figure                      docs/codebert.png, of what is measured
    options: --optimizer adamw (or muon), --cases NAMES, --seconds 300, --jobs N, --cache FOLDER, --again

Runs share the machine: with OMP_NUM_THREADS=1 and --jobs 2 on two cores, as measured, each has a core of its own.
Rows are written one by one to results/codebert_small.csv; runs that it holds are not repeated without --again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from children import run_children
from common import about, measured, update

from comera.rank.objective import LateStage
from comera.recipes.code_lm import recipe as code_lm

NAME = "codebert_small"
KEY = ("case", "optimizer", "seconds", "lr", "seed")
WIDTH = 256
NARROWER = (192, 128, 96)
EVERY, BATCHES = 400, 128  # steps between points of the curve; held-out batches of each
PHASE_2 = LateStage(target_size=0.5, start_step=1300, steps=650)
FIGURE = Path(__file__).parents[1] / "docs" / "codebert.png"


class Case(NamedTuple):
    """A model: its width, the format of a compressed one, and if it goes through both phases."""

    width: int
    format: Literal["tt", "btt"] | None = None
    phases: bool = False


CASES = {
    **{f"dense-{width}": Case(width) for width in (WIDTH, *NARROWER)},
    "tt": Case(WIDTH, "tt"),
    "btt": Case(WIDTH, "btt"),
    "btt-phases": Case(WIDTH, "btt", phases=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="runs", choices=("runs", "figure", "one"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--rates", nargs="+", type=float, help="default: the best rate measured")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, which share the cores")
    parser.add_argument("--cache", help="folder for prepared data")
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "one":
        print(json.dumps(run(options.cache, **json.loads(options.run))))
    elif options.part == "figure":
        draw()
    else:
        for row in campaign(options):
            print(" ".join(f"{row[name]:>10}" for name in (*KEY, "loss", "steps", "parameters")), flush=True)
            update(NAME, [row], KEY)


def configuration(case: Case, **train: Any) -> code_lm.CodeLMConfig:
    """A run of the recipe; its folder is still to be set."""
    config = code_lm.preset("comera" if case.format else "dense", "codebert-small")
    late = PHASE_2 if case.phases else LateStage()
    fixed: dict[str, Any] = {
        "late": late,
        "eval_every": EVERY,
        "eval_batches": BATCHES,
        "save_every": 0,
        "progress": False,
    }
    formats = config.compress
    if case.format == "btt":  # the parameters of the preset's tensor trains, to 2 %
        formats = replace(formats, format="btt", rank=10, blocks=(4, 4), head_rank=5)
    settings = replace(config.train, steps=None, device="cpu", **fixed, **train)
    return replace(config, model=config.model.narrowed(case.width), compress=formats, train=settings)


def run(cache: str | None, case: str, optimizer: str, seconds: float, lr: float, seed: int) -> dict[str, Any]:
    """Train in this process, a fresh one; the figures of the run, and its curve as SECONDS:LOSS."""
    config = configuration(CASES[case], optimizer=optimizer, max_seconds=seconds, lr=lr, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        summary = code_lm.run(replace(config, data=replace(config.data, cache=cache), out=folder))
        lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
        curve = [f"{line['time']:.0f}:{line['loss']:.3f}" for line in lines if line["kind"] == "eval"]
    return {
        "loss": f"{summary.held_out_loss:.4f}",
        "steps": summary.steps,
        "parameters": summary.parameters,
        "step_ms": f"{summary.step_time * 1e3:.4g}",
        "peak_mb": f"{summary.peak_memory / 1e6:.4g}",
        "curve": " ".join(curve),
    }


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, each in a process of its own, `--jobs` of them at a time."""
    done = {tuple(row[name] for name in KEY) for row in measured(NAME)}
    seconds = f"{options.seconds:g}"
    commands = {}
    for name in options.cases:
        for lr in options.rates or [best_rate(name, options.optimizer, seconds)]:
            for seed in range(options.seeds):
                place = (name, options.optimizer, seconds, f"{lr:g}", str(seed))
                if place not in done or options.again:
                    of_run: dict[str, Any] = {
                        "case": name,
                        "optimizer": options.optimizer,
                        "seconds": options.seconds,
                        "lr": lr,
                        "seed": seed,
                    }
                    cache = ["--cache", options.cache] if options.cache else []
                    commands[place] = [__file__, "one", *cache, "--run", json.dumps(of_run)]
    for place, figures in run_children(commands, options.jobs):
        yield {**dict(zip(KEY, place, strict=True)), **figures, **about()}


def best_rate(name: str, optimizer: str, seconds: str) -> float:
    """The rate at which seed 0 of a case ended lowest."""
    place = {"case": name, "optimizer": optimizer, "seconds": seconds, "seed": "0"}
    rows = [row for row in measured(NAME) if place.items() <= row.items()]
    if not rows:
        raise SystemExit(f"{name} has no run of {seconds} seconds with {optimizer} yet: give --rates")
    return float(min(rows, key=lambda row: float(row["loss"]))["lr"])


def summary(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each case at its best rate, the lowest loss first; losses are means over the seeds."""
    lines = []
    key = KEY[:3]
    for place in sorted({tuple(row[name] for name in key) for row in rows}):
        own = [row for row in rows if tuple(row[name] for name in key) == place]
        rates = sorted({float(row["lr"]) for row in own})
        best = min((row for row in own if row["seed"] == "0"), key=lambda row: float(row["loss"]))
        seeds = [float(row["loss"]) for row in own if row["lr"] == best["lr"]]
        lines.append(
            {
                **dict(zip(key, place, strict=True)),
                "loss": f"{sum(seeds) / len(seeds):.3f}",
                "spread": f"{(max(seeds) - min(seeds)) / 2:.3f}" if len(seeds) > 1 else "",
                "seeds": str(len(seeds)),
                "lr": f"{best['lr']} of {', '.join(f'{rate:g}' for rate in rates)}",
                **{column: best[column] for column in ("steps", "parameters", "step_ms", "peak_mb", *about())},
            }
        )
    return sorted(lines, key=lambda line: float(line["loss"]))


def draw() -> None:
    """The curves of seed 0, each case at its best rate."""
    import matplotlib  # only this part needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in CASES:
        rows = [row for row in measured(NAME) if row["case"] == name and row["seed"] == "0"]
        if rows:
            row = min(rows, key=lambda row: float(row["loss"]))
            points = [tuple(map(float, point.split(":"))) for point in row["curve"].split()]
            label = f"{name}, {row['optimizer']}, {int(row['parameters']) / 1e6:.2f} million parameters"
            axes.plot(*zip(*points, strict=True), "--" if name.startswith("dense") else "-", label=label)
    axes.set(xlabel="seconds on one core", ylabel="held-out loss, nats per masked token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=120)
    print(FIGURE)


if __name__ == "__main__":
    main()
