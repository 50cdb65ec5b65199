"""CodeBERT's job in small: loss over time, compressed beside dense and beside narrower dense models.

The recipe `comera train code-lm --preset codebert-small`, masked language modelling of Python functions and their
docstrings: 4 encoders, 8,192 tokens, sequences of 128. Every case gets the same time, in steps of the time that `speed`
has measured, the same rates to choose from at that length, fused kernels and the same optimizer; cases are named by
their width, and the layers of `low-rank-table` are dense; `dense-conv` has a convolution over five neighbouring tokens
before each block, which is what one would add to a dense model to see neighbours, `ngrams` a table of all strings of
three tokens. The loss is that of 128 held-out batches, in nats per masked
token; they choose the rate, too.

    python benchmarks/codebert_small.py speed                        the time of a step, on a quiet machine
    python benchmarks/codebert_small.py --rates 1e-3 2e-3 4e-3       seed 0, every case at every rate
    python benchmarks/codebert_small.py --seeds 3                    the best rate found, further seeds
    python benchmarks/codebert_small.py figure --seconds 840         docs/codebert.png, of what is measured
    options: --optimizer muon (or adamw), --cases NAMES, --seconds 300, --jobs N, --cache FOLDER, --again

Times are those of one core (OMP_NUM_THREADS=1). Rows are written one by one to results/codebert_small.csv; runs that it
holds are not repeated without --again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from children import run_children
from common import about, measured, step_times, update
from torch import Tensor, nn

from comera.rank.objective import LateStage
from comera.recipes.code_lm import recipe as code_lm
from comera.recipes.code_lm.data import prepare
from comera.trainer.loop import fit

NAME, SPEED = "codebert_small", "codebert_small_speed"
KEY = ("case", "optimizer", "seconds", "lr", "seed")
SPEED_KEY = ("case", "optimizer")
EVERY, BATCHES = 400, 128  # steps between points of the curve; held-out batches of each
STEPS = 20  # of each run of `speed`
TOLERANCE = 0.1  # of a run's time: what the speed of one machine differs from one day to another
FIGURE = Path(__file__).parents[1] / "docs" / "codebert.png"

# Formats of a compressed model. TT: four cores, 4.3 times smaller than dense with a head of its own; BTT: as many
# parameters, to 2 %.
TT: dict[str, Any] = {"format": "tt", "order": 4, "rank": 40}
BTT: dict[str, Any] = {"format": "btt", "rank": 10, "blocks": (4, 4)}
OWN_HEAD: dict[str, Any] = {"embedding": "ttm", "embedding_order": 3, "embedding_rank": 48, "head": "untie"}
TIED = OWN_HEAD | {"head": "share", "embedding_rank": 96}
TABLE: dict[str, Any] = {"format": "dense", "embedding_rank": 48}
LOW_RANK: dict[str, Any] = {"embedding": "low_rank", "head": "share"}


NGRAMS: dict[str, Any] = {"ngrams": 3, "ngram_rank": 64}


class Case(NamedTuple):
    """A model: its width, the formats of a compressed one, and how many tokens a convolution before each block sees."""

    width: int
    formats: dict[str, Any] | None = None
    taps: int = 0


CASES = {
    **{f"dense-{width}": Case(width) for width in (256, 192, 128, 96, 72, 64)},
    "tt-256": Case(256, TT | OWN_HEAD | {"head_rank": 48}),
    "btt-256": Case(256, BTT | OWN_HEAD | {"head_rank": 5}),
    "btt-128": Case(128, BTT | OWN_HEAD | {"head_rank": 5}),
    "btt-tied-128": Case(128, BTT | TIED),
    "btt-low-rank-128": Case(128, BTT | LOW_RANK | {"embedding_rank": 48}),
    "btt-low-rank-192": Case(192, BTT | LOW_RANK | {"embedding_rank": 64}),
    **{f"low-rank-table-{width}": Case(width, TABLE | LOW_RANK) for width in (96, 128)},
    "low-rank-table-ngrams-96": Case(96, TABLE | LOW_RANK | NGRAMS),
    "dense-conv-96": Case(96, taps=5),
    "low-rank-table-ngrams-conv-96": Case(96, TABLE | LOW_RANK | NGRAMS, taps=5),
}


class Convolution(nn.Module):
    """x_i becomes Σ_k w_k ⊙ x_{i+k}, k from -K to K, over (B, T, width): at first x itself."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1, taps))
        self.weight.data[:, :, taps // 2] = 1

    def forward(self, x_BTD: Tensor) -> Tensor:
        taps_D1K = self.weight
        y_BDT = F.conv1d(x_BTD.mT, taps_D1K, padding=taps_D1K.shape[2] // 2, groups=taps_D1K.shape[0])
        return y_BDT.mT


class Task(code_lm.CodeLMTask):
    """The recipe's, with a convolution before each block if there is to be one."""

    def __init__(self, config: code_lm.CodeLMConfig, taps: int) -> None:
        super().__init__(config, prepare(config.data, quiet=True))
        if not taps:
            return
        model: Any = self.model
        for layer in model.bert.encoder.layer:
            layer.convolution = Convolution(config.model.hidden, taps)
            layer.register_forward_pre_hook(lambda layer, given: (layer.convolution(given[0]), *given[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="runs", choices=("runs", "speed", "figure", "one"))
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--optimizer", default="muon", choices=("adamw", "muon"))
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
        draw(f"{options.seconds:g}")
    elif options.part == "speed":
        speed(options)
    else:
        for row in campaign(options):
            print(" ".join(f"{row[name]:>10}" for name in (*KEY, "loss", "steps", "parameters")), flush=True)
            update(NAME, [row], KEY)


def configuration(case: Case, cache: str | None, **train: Any) -> code_lm.CodeLMConfig:
    """A run of the recipe; its folder is still to be set."""
    config = code_lm.preset("dense" if case.formats is None else "comera", "codebert-small")
    fixed: dict[str, Any] = {
        "late": LateStage(),
        "eval_every": EVERY,
        "eval_batches": BATCHES,
        "save_every": 0,
        "progress": False,
    }
    return replace(
        config,
        model=config.model.narrowed(case.width),
        compress=replace(config.compress, **(case.formats or {})),
        data=replace(config.data, cache=cache),
        train=replace(config.train, device="cpu", **{**fixed, **train}),
    )


def speed(options: argparse.Namespace) -> None:
    """Write the milliseconds of each case's step."""

    def step_time(name: str) -> float:
        train = {"steps": STEPS, "eval_every": 0, "eval_batches": 1, "optimizer": options.optimizer}
        config = configuration(CASES[name], options.cache, **train)
        with tempfile.TemporaryDirectory() as folder:
            return fit(Task(config, CASES[name].taps), config.train, Path(folder)).step_time

    times = step_times(options.cases, step_time)
    rows = [{"case": name, "optimizer": options.optimizer, **row, **about()} for name, row in times.items()]
    update(SPEED, rows, SPEED_KEY)


def step_seconds(name: str, optimizer: str) -> float:
    """The time of a case's step, as measured."""
    for row in measured(SPEED):
        if (row["case"], row["optimizer"]) == (name, optimizer):
            return float(row["step_ms"]) / 1e3
    raise SystemExit(f"{name} has no measured step with {optimizer}: run the part speed first, on a quiet machine")


def fitting(rows: list[dict[str, str]], speeds: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows whose steps fill their seconds by the measured times: others are of another machine or older code."""
    step = {tuple(row[name] for name in SPEED_KEY): float(row["step_ms"]) / 1e3 for row in speeds}
    return [row for row in rows if fills(int(row["steps"]), float(row["seconds"]), step[row["case"], row["optimizer"]])]


def fills(steps: int, seconds: float, step: float) -> bool:
    """Whether so many steps are those of this time."""
    return abs(steps * step / seconds - 1) <= TOLERANCE


def steps_in(seconds: float, step: float) -> int:
    """How many steps of so many seconds fit."""
    return max(1, int(seconds / step))


def run(cache: str | None, case: str, optimizer: str, steps: int, lr: float, seed: int) -> dict[str, Any]:
    """Train in this process, a fresh one; the figures of the run, and its curve as STEP:LOSS."""
    config = configuration(CASES[case], cache, optimizer=optimizer, steps=steps, lr=lr, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        summary = fit(Task(config, CASES[case].taps), config.train, Path(folder))
        lines = (json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines())
        curve = [f"{line['step']}:{line['loss']:.3f}" for line in lines if line["kind"] == "eval"]
    return {
        "loss": f"{summary.held_out_loss:.4f}",
        "steps": summary.steps,
        "parameters": summary.parameters,
        "peak_mb": f"{summary.peak_memory / 1e6:.4g}",
        "curve": " ".join(curve),
    }


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, each in a process of its own, `--jobs` of them at a time."""
    done = {tuple(row[name] for name in KEY): int(row["steps"]) for row in measured(NAME)}
    seconds = f"{options.seconds:g}"
    commands = {}
    for name in options.cases:
        step = step_seconds(name, options.optimizer)
        steps = steps_in(options.seconds, step)
        for lr in options.rates or [best_rate(name, options.optimizer, seconds)]:
            for seed in range(options.seeds):
                place = (name, options.optimizer, seconds, f"{lr:g}", str(seed))
                # a run of other steps is from a time when a step took longer or shorter
                if place not in done or not fills(done[place], options.seconds, step) or options.again:
                    of_run: dict[str, Any] = {
                        "case": name,
                        "optimizer": options.optimizer,
                        "steps": steps,
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


def summary(rows: list[dict[str, str]], speeds: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each case at its best rate, the lowest loss first; losses are means over the seeds."""
    rows = fitting(rows, speeds)
    lines, step_ms = [], {tuple(row[name] for name in SPEED_KEY): row["step_ms"] for row in speeds}
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
                "step_ms": step_ms[place[:2]],
                "took": f"{int(best['steps']) * float(step_ms[place[:2]]) / 1e3:.0f}",
                **{column: best[column] for column in ("steps", "parameters", "peak_mb", *about())},
            }
        )
    return sorted(lines, key=lambda line: float(line["loss"]))


def draw(seconds: str) -> None:
    """The curves of seed 0 with Muon over this time, each case at its best rate."""
    import matplotlib  # only this part needs it

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in CASES:
        place = {"case": name, "optimizer": "muon", "seconds": seconds, "seed": "0"}
        rows = [row for row in fitting(measured(NAME), measured(SPEED)) if place.items() <= row.items()]
        if rows:
            row = min(rows, key=lambda row: float(row["loss"]))
            second = step_seconds(name, row["optimizer"])
            points = [(int(step) * second, float(loss)) for step, loss in (p.split(":") for p in row["curve"].split())]
            label = f"{name}, {int(row['parameters']) / 1e6:.2f} million parameters"
            axes.plot(*zip(*points, strict=True), "--" if name.startswith("dense") else "-", label=label)
    axes.set(xlabel="seconds on one core", ylabel="held-out loss, nats per masked token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=120)
    print(FIGURE)


if __name__ == "__main__":
    main()
