"""What `make demo` reached: the summaries of its runs as rows of results/demo.csv.

make demo DEMO_OUT=runs/demo && python benchmarks/demo.py runs/demo        11 minutes, on a machine that is idle
"""

import argparse
import json
from pathlib import Path

import yaml
from common import about, update

METHODS = ("dense", "narrow", "narrow_conv", "hashed_ngrams", "comera")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="DEMO_OUT")
    folder: Path = parser.parse_args().folder
    rows = []
    for method in METHODS:
        summary = json.loads((folder / method / "summary.json").read_text("utf-8"))
        config = yaml.safe_load((folder / method / "config.yaml").read_text("utf-8"))
        row = {
            "method": method,
            "seed": config["train"]["seed"],
            "seconds": f"{summary['time']:.0f}",
            "nats_per_byte": f"{summary['metrics']['nats_per_byte']:.3f}",
            "parameters": summary["parameters"],
            "mb": f"{summary['size_bytes'] / 2**20:.2f}",
            "step_ms": f"{summary['step_time'] * 1e3:.1f}",
            "peak_mb": f"{summary['peak_memory'] / 2**20:.0f}",
            "steps": summary["steps"],
        }
        rows.append(row | about())
        print(*row.values())
    update("demo", rows, ["method", "seed"])


if __name__ == "__main__":
    main()
