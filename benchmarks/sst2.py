"""SST-2 from scratch: compressed encoders beside the same encoder dense and beside narrower dense ones.

A BERT of two encoders, 512 wide, on the phrases of the Stanford Sentiment Treebank in GLUE's form, with a tokenizer
trained on them: dense, dense of other widths, and compressed 10 or 20 times as a whole. All run with fused kernels and
AdamW. Rates are tuned alike: the same ones for each case, for half of the time, on phrases that were split off.
With --epochs 3 the compressed and the narrower model take as long as dense does with one pass. The figure is the
accuracy on GLUE's development set, read once, at the end.

    python benchmarks/sst2.py speed --data FOLDER      seconds of a step, the cases in turns, on a quiet machine
    python benchmarks/sst2.py tune  --data FOLDER      every case at every rate, one seed
    python benchmarks/sst2.py final --data FOLDER      the tuned rate, three seeds
    options: --cases NAMES, --rates RATES, --epochs 1, --seeds 3, --jobs N, --cache FOLDER, --again

FOLDER holds sst2_train.tsv.gz, sst2_valid.tsv.gz and sst2_dev.tsv.gz, with columns sentence and label. Accuracies do
not depend on what else the machine does, so several runs may go at once (--jobs). Rows are written one by one to
results/sst2.csv; runs that it holds are not repeated without --again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from children import run_children
from common import about, measured, update

from comera.baselines import Method
from comera.recipes.classify import recipe as classify
from comera.recipes.classify.data import ClassifyDataConfig
from comera.recipes.classify.model import CompressConfig, EncoderConfig
from comera.recipes.classify.recipe import ClassifyConfig
from comera.trainer.config import TrainConfig

KEY = ("part", "case", "epochs", "lr", "seed")
RATES = (2.5e-4, 5e-4, 1e-3, 2e-3)
LAYERS, WIDTH, HEAD = 2, 512, 64
ROWS, LENGTH = 64, 64
EPOCHS, TUNING = 1.0, 2  # passes over the phrases; times fewer to tune
ROUNDS, STEPS = 5, 20  # of `speed`, for each case


class Case(NamedTuple):
    """A model: its width, and the format and ratio of a compressed one."""

    width: int
    format: Literal["btt", "tt"] | None = None
    ratio: float | None = None


CASES = {
    **{f"dense-{width}": Case(width) for width in (WIDTH, 256, 192, 128)},
    "btt-10": Case(WIDTH, "btt", 10),
    "tt-10": Case(WIDTH, "tt", 10),
    "tt-20": Case(WIDTH, "tt", 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "tune", "final", "one"))
    parser.add_argument("--data", type=Path, required=True, help="folder of the three files")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, which share the cores")
    parser.add_argument("--cache", help="folder for prepared data")
    parser.add_argument("--again", action="store_true", help="repeat runs that the results hold already")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "one":
        print(json.dumps(run(options, **json.loads(options.run))))
    elif options.part == "speed":
        speed(options)
    else:
        for row in campaign(options):
            print(" ".join(f"{row[name]:>9}" for name in (*KEY, "valid", "dev")), flush=True)
            update("sst2", [row], KEY)


def configuration(options: argparse.Namespace, case: Case, train: TrainConfig, *, test: bool) -> ClassifyConfig:
    """A run of the recipe classify; its folder is still to be set."""
    method: Method = "comera" if case.format else "dense"
    config = classify.preset(method, "small")
    files = {name: str(options.data / f"sst2_{name}.tsv.gz") for name in ("train", "valid", "dev")}
    data = ClassifyDataConfig(
        path=files["train"],
        valid=files["valid"],
        test=files["dev"] if test else None,
        text="sentence",
        label="label",
        max_length=LENGTH,
        cache=options.cache,
    )
    heads = case.width // HEAD
    model = EncoderConfig(
        hidden=case.width, layers=LAYERS, heads=heads, ffn=4 * case.width, dropout=0.1, max_positions=LENGTH
    )
    compress = CompressConfig(ratio=case.ratio, format=case.format) if case.format else config.compress
    return replace(config, data=data, model=model, compress=compress, train=train)


def settings(method: Method, **changed: Any) -> TrainConfig:
    """How the recipe trains, without what takes time beside it."""
    own = classify.preset(method, "small").train
    return replace(own, batch_size=ROWS, progress=False, device="cpu", save_every=0, eval_every=0, **changed)


def run(options: argparse.Namespace, case: str, lr: float, seed: int, epochs: float, test: bool) -> dict[str, Any]:
    """Train in this process, a fresh one; the figures of the run."""
    made = CASES[case]
    train = settings("comera" if made.format else "dense", lr=lr, seed=seed, epochs=epochs)
    with tempfile.TemporaryDirectory() as folder:
        config = replace(configuration(options, made, train, test=test), out=folder)
        summary = classify.run(config)
        dev = json.loads((next(Path(folder).rglob("test.json"))).read_text()) if test else {}
    return {
        "valid": f"{100 * summary.metrics['accuracy']:.2f}",
        "dev": f"{100 * dev['accuracy']:.2f}" if test else "",
        "steps": summary.steps,
        "parameters": summary.parameters,
        "peak_mb": f"{summary.peak_memory / 1e6:.4g}",
    }


def speed(options: argparse.Namespace) -> None:
    """Write the seconds of each case's step: the least of its runs of some steps each, the cases in turns.

    The least, since other programs can only add to it; the spread says how much they did.
    """
    seconds: dict[str, list[float]] = {name: [] for name in options.cases}
    for _ in range(ROUNDS):
        for name, own in seconds.items():
            made = CASES[name]
            train = settings("comera" if made.format else "dense", steps=STEPS, epochs=None, eval_batches=1)
            with tempfile.TemporaryDirectory() as folder:
                config = replace(configuration(options, made, train, test=False), out=folder)
                own.append(classify.run(config).step_time)
    dense = min(seconds[f"dense-{WIDTH}"])
    rows = []
    for name, own in seconds.items():
        least, spread = min(own), statistics.median(own) / min(own) - 1
        row = {"case": name, "step_ms": f"{least * 1e3:.4g}", "spread": f"{spread:.2f}"}
        rows.append({**row, "times_dense": f"{dense / least:.2f}", **about()})
        print(name, *(f"{second * 1e3:.4g}" for second in own), flush=True)
    update("sst2_speed", rows, ("case",))


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, each in a process of its own, `--jobs` of them at a time."""
    done = {tuple(row[name] for name in KEY) for row in measured("sst2")}
    test = options.part == "final"
    epochs = options.epochs if test else options.epochs / TUNING
    commands = {}
    for name in options.cases:
        wanted = [(lr, 0) for lr in options.rates]
        if test:
            wanted = [(best_rate(name, options.epochs / TUNING), seed) for seed in range(options.seeds)]
        for lr, seed in wanted:
            place = (options.part, name, f"{epochs:g}", f"{lr:g}", str(seed))
            if place not in done or options.again:
                of_run = {"case": name, "lr": lr, "seed": seed, "epochs": epochs, "test": test}
                cache = ["--cache", options.cache] if options.cache else []
                commands[place] = [__file__, "one", "--data", str(options.data), *cache, "--run", json.dumps(of_run)]
    for place, figures in run_children(commands, options.jobs):
        yield {**dict(zip(KEY, place, strict=True)), **figures, **about()}


def summary(rows: Sequence[dict[str, str]], steps: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The final accuracy of each case on the development set, the mean over its seeds, and what a step takes. spread:
    half the range of the seeds. below_dense: points, of the means, dense after one pass."""
    cases: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        if row["part"] == "final":
            cases.setdefault((row["case"], row["epochs"]), []).append(row)
    speed = {row["case"]: row for row in steps}
    dev = {place: [float(row["dev"]) for row in found] for place, found in cases.items()}
    valid = {place: [float(row["valid"]) for row in found] for place, found in cases.items()}
    lines = []
    for place in sorted(cases, key=lambda place: (list(CASES).index(place[0]), float(place[1]))):
        name, passes = place
        first, own = cases[place][0], dev[place]
        line = {
            "case": name,
            "passes": passes,
            "parameters": f"{int(first['parameters']):,}",
            "lr": first["lr"],
            "seeds": str(len(own)),
        }
        line |= {"dev": f"{statistics.fmean(own):.2f}", "spread": f"{(max(own) - min(own)) / 2:.2f}"}
        line["valid"] = f"{statistics.fmean(valid[place]):.2f}"
        dense = dev.get((f"dense-{WIDTH}", "1"))
        line["below_dense"] = f"{statistics.fmean(dense) - statistics.fmean(own):.2f}" if dense else ""
        line |= {figure: speed.get(name, {}).get(figure, "") for figure in ("step_ms", "times_dense")}
        lines.append({**line, "peak_mb": first["peak_mb"], **{column: first[column] for column in about()}})
    return lines


def best_rate(name: str, epochs: float) -> float:
    """The rate that was tuned for a case."""
    place = ("tune", name, f"{epochs:g}")
    tuned = [row for row in measured("sst2") if tuple(row[key] for key in KEY[:3]) == place]
    if not tuned:
        raise SystemExit(f"{name} has no tuned rate for {epochs:g} epochs: run the part tune first")
    return float(max(tuned, key=lambda row: float(row["valid"]))["lr"])


if __name__ == "__main__":
    main()
