"""The Hamilton–Jacobi–Bellman equation in 20 dimensions (`comera train pinn`): relative L2 error of compressed, narrow
dense and dense networks, each at the best of the rates in docs/log.md, three seeds.

    python benchmarks/pinn.py                                           benchmarks/results/pinn.csv, 4 minutes
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from common import about, update

RATES = {"dense": "1e-2", "narrow": "3e-2", "comera": "1e-1"}
SEEDS = range(3)


def main() -> None:
    for method, rate in RATES.items():
        for seed in SEEDS:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "run"
                command = [sys.executable, "-m", "comera", "train", "pinn", "--method", method, "--train.lr", rate]
                options = ["--train.seed", str(seed), "--train.threads", "1", "--out", str(out)]
                subprocess.run([*command, *options], check=True, capture_output=True)
                summary = json.loads((out / "summary.json").read_text("utf-8"))
            row = {
                "method": method,
                "lr": rate,
                "seed": seed,
                "relative_l2": f"{summary['metrics']['relative_l2']:.3g}",
                "parameters": summary["parameters"],
                "steps": summary["steps"],
            }
            print(row)
            update("pinn", [row | about()], ("method", "lr", "seed"))


if __name__ == "__main__":
    main()
