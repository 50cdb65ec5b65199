"""What n-grams add to a small language model, by the CPU seconds of a step: tables of all n-grams as products, hashed
tables of equal bytes, summed tables and short convolutions, in the same narrow dense model.

Cases are those of frontier.py, trained for a fixed number of steps on one thread, each in a process of its own. So
losses and CPU seconds depend little on what else the machine does. Rates are chosen on one half of the held-out text,
figures read from the other.

    python benchmarks/ngrams.py tune  --steps 700 --rates 0.005 0.007 0.01     each case at each rate, one seed
    python benchmarks/ngrams.py final --steps 3000 --seeds 3                   each case at its best rate
    options: --cases NAMES, --text code|prose, --prose FOLDER|FILE, --vocab 256, --cache FOLDER, --rates RATE
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from children import run_children
from common import about, measured, update
from frontier import configuration, parse, run

CASES = ["dense-128", "densec4-128", "summed6-128", "hashed6r2840d24-128", "densen6r160-128", "densen6r160c4-128"]
KEY = ("part", "text", "vocab", "steps", "case", "lr", "seed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("tune", "final", "one"))
    parser.add_argument("--text", choices=("code", "prose"), default="code")
    parser.add_argument("--prose", help="file or folder of text for --text prose")
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="NAME")
    parser.add_argument("--rates", nargs="+", type=float, default=[5e-3, 7e-3, 1e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cache", help="folder for prepared text")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.optimizer, options.runs = "muon", None
    if options.text == "prose" and not options.prose:
        parser.error("--text prose needs --prose, a file or folder of text")
    if options.part == "one":
        print(json.dumps(one(options, **json.loads(options.run))))
        return
    for name in options.cases:
        parse(name)
    for row in campaign(options):
        print(" ".join(f"{row[name]:>9}" for name in (*KEY, "nats_per_byte", "model_mb", "step_cpu_ms")), flush=True)
        update("ngrams", [row], KEY)


def one(options: argparse.Namespace, case: str, lr: float, seed: int, half: int) -> dict[str, float]:
    """One run in this process. step_cpu_ms: CPU seconds of training by its steps, reading of batches included."""
    known = parse(case)
    config = configuration(options, known, lr, seed, options.steps)
    config = replace(config, train=replace(config.train, threads=1))
    marks: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        figures = run(config, half, Path(folder), known.taps, lambda: marks.append(time.process_time()))
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return figures | {"step_cpu_ms": 1e3 * sum(steps) / max(1, len(steps))}


def campaign(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The runs that are missing, one after the other, each in a process of its own."""
    rows = measured("ngrams")
    done = {tuple(row[name] for name in KEY) for row in rows}
    for name in options.cases:
        place = (options.text, str(options.vocab), str(options.steps), name)
        if options.part == "tune":
            wanted = [(lr, 0, 0) for lr in options.rates]
        else:
            tuned = [
                row
                for row in rows
                if (row["part"], row["text"], row["vocab"], row["case"]) == ("tune", *place[:2], name)
            ]
            best = min(tuned, key=lambda row: float(row["nats_per_byte"]), default=None)
            lr = options.rates[0] if len(options.rates) == 1 or best is None else float(best["lr"])
            wanted = [(lr, seed, 1) for seed in options.seeds]
        for lr, seed, half in wanted:
            key = (options.part, *place, f"{lr:g}", str(seed))
            if key in done:
                continue
            settings = json.dumps({"case": name, "lr": lr, "seed": seed, "half": half})
            command = [__file__, "one", "--text", options.text, "--vocab", str(options.vocab), "--run", settings]
            command += ["--steps", str(options.steps)]
            command += ["--prose", options.prose] if options.prose else []
            command += ["--cache", options.cache] if options.cache else []
            for _, figures in run_children({key: command}, 1):
                shown = {figure: f"{value:.5g}" for figure, value in figures.items()}
                yield {**dict(zip(KEY, key, strict=True)), **shown, **about()}


if __name__ == "__main__":
    main()
