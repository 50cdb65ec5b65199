"""A model of one billion parameters beside the dense model that a user would train in the same time.

    OMP_NUM_THREADS=1 python benchmarks/one_billion.py train --runs FOLDER --cases ours      85 minutes, 4 GB
    OMP_NUM_THREADS=1 python benchmarks/one_billion.py train --runs FOLDER --cases dense     85 minutes, 4 GB
    python benchmarks/one_billion.py figure                                                  docs/one_billion.png

`ours` is the preset llama-1b of `comera train lm` with a table of all strings of four tokens, compressed on the meta
device; `dense` has short convolutions and the width and depth at which a step takes as long and that reached most in
four minutes (docs/log.md). Both read one text of 512 tokens a step, from the source files of all packages that are
installed beside this Python, none of them twice. One core each, at the same time, as measured.

A run that was stopped goes on from its last checkpoint; of a finished one the figures are read again. `step_s`: the
tenth part of the logged times that was shortest, as other programs can only add to them. `minutes`: steps of so long.
"""

import argparse
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from common import about, measured, update

from comera.report.run import RunData, read_run

NAME = "one_billion"
METRIC = "nats_per_byte"
FIGURE = Path(__file__).parents[1] / "docs" / f"{NAME}.png"
BOTH = {"preset": "llama-1b", "data.vocab_size": 32768, "data.suffixes": '[".py"]', "train.eval_batches": 128}
CASES: dict[str, dict[str, Any]] = {
    "ours": {"compress.ngrams": 4, "train.lr": 5e-4, "train.table_lr": 3e-4, "train.steps": 2600},
    "dense": {
        "method": "narrow_conv",
        "baselines.narrow_conv.hidden": 704,
        "model.hidden": 704,
        "model.heads": 11,
        "model.layers": 10,
        "model.ffn": "null",
        "model.kv_heads": "null",
        "train.lr": 1e-3,
        "train.steps": 2930,
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "figure"))
    parser.add_argument("--runs", type=Path, help="folder of the runs")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--cache", help="folder for prepared data")
    asked = parser.parse_args()
    if asked.part == "figure":
        draw()
        return
    if asked.runs is None:
        parser.error("--runs FOLDER: where the runs are to be kept")
    for name in asked.cases:
        folder = asked.runs / name
        train(name, folder, asked.cache)
        print(update(NAME, [row(name, read_run(folder))], ("case",)))


def train(name: str, folder: Path, cache: str | None) -> None:
    """Begin or continue a run."""
    options = {**BOTH, "data.path": sysconfig.get_paths()["purelib"], "out": folder, **CASES[name]}
    every = -(-options["train.steps"] // 4)
    options |= {"train.eval_every": every, "train.save_every": every} | ({"data.cache": cache} if cache else {})
    command = [f"--{option}={value}" for option, value in options.items()]
    resume = ["--resume"] if (folder / "checkpoints").exists() else []
    subprocess.run([sys.executable, "-m", "comera", "train", "lm", *command, *resume], check=True)


def row(name: str, run: RunData) -> dict[str, Any]:
    """The figures of a finished run."""
    if run.summary is None:
        sys.exit(f"{run.folder}: the run has not ended; start the same command again, it goes on")
    step_s = statistics.quantiles([point.step_time for point in run.train], n=10)[0]
    return {
        "case": name,
        METRIC: f"{run.summary.metrics[METRIC]:.4f}",
        "steps": run.summary.steps,
        "step_s": f"{step_s:.3f}",
        "minutes": f"{run.summary.steps * step_s / 60:.1f}",
        "parameters": run.summary.parameters,
        "peak_mb": f"{max(point.peak_memory for point in run.train) / 1e6:.0f}",
        "kj": f"{sum(run.energy.values()) / 1e3:.0f}",
        "curve": " ".join(f"{point.step}:{point.value(METRIC):.4f}" for point in run.evals),
        **about(),
        "commit": str(run.provenance[0]["commit"]),
    }


def draw() -> None:
    """Held-out loss over minutes of training."""
    from figures import GREY, TEAL, png, styled
    from matplotlib.figure import Figure  # only this part needs it

    with styled():
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        for found in measured(NAME):
            points = [each.split(":") for each in found["curve"].split()]
            curve = [(int(step) * float(found["step_s"]) / 60, float(nats)) for step, nats in points]
            ours = found["case"] == "ours"
            label = f"{'1 billion, compressed to' if ours else 'dense,'} {int(found['parameters']) / 1e6:.0f} million"
            axes.plot(*zip(*curve, strict=True), marker="o", ms=3, label=label, color=TEAL if ours else GREY)
        axes.set(xlabel="minutes of training on one core", ylabel="held-out nats per byte")
        axes.legend(frameon=False)
        FIGURE.write_bytes(png(figure))
    print(FIGURE)


if __name__ == "__main__":
    main()
