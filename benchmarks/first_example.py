"""README's example over three seeds: what its code prints. And its dense model at other widths and rates, also with
short convolutions, one seed each: what a user would try instead.

OMP_NUM_THREADS=1 python benchmarks/first_example.py                benchmarks/results/first_example.csv, 12 minutes
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from common import about, update

README = Path(__file__).parents[1] / "README.md"
SEEDS = range(3)
INSTEAD = [(width, rate) for width in (96, 128, 192) for rate in ("1e-3", "1.5e-3", "2e-3")]
WITH_CONVOLUTIONS = [(width, rate) for width in (96, 128) for rate in ("1.5e-3", "3e-3", "6e-3")]
PRINTED = re.compile(r"^([\d,]+) parameters: ([\d.]+) nats$", re.MULTILINE)


def replaced(code: str, *changes: tuple[str, str]) -> str:
    """The code with each change, which must occur in it."""
    for old, new in changes:
        if old not in code:
            raise SystemExit(f"README's example no longer has {old!r}")
        code = code.replace(old, new)
    return code


def measure(code: str, names: tuple[str, ...], rate: str, seed: int) -> None:
    """Run the code and write what it prints of each model."""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for name, (parameters, loss) in zip(names, PRINTED.findall(printed), strict=True):
        row = {
            "model": name,
            "rate": rate,
            "seed": seed,
            "nats_per_byte": loss,
            "parameters": parameters.replace(",", ""),
        }
        print(row, flush=True)
        update("first_example", [row | about()], ("model", "rate", "seed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL", help="such as conv-128, at its rates; default: everything"
    )
    only = parser.parse_args().only
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for seed in () if only else SEEDS:
        seeded = replaced(code, ("manual_seed(0)", f"manual_seed({seed})"))
        measure(seeded, ("dense-128", "ours-80"), "1.5e-3", seed)
    alone = ("for model in dense, ours", "for model in (dense,)")
    convolutions = [
        ("import os", "import comera.baselines, os"),
        ("comera.ngrams_(ours, order=4, rank=128)", "comera.baselines.NarrowConv().apply_(dense)"),
    ]
    for name, cases, more in (("dense", INSTEAD, []), ("conv", WITH_CONVOLUTIONS, convolutions)):
        for width, rate in [case for case in cases if not only or f"{name}-{case[0]}" in only]:
            changes = [alone, ("(128, 80)", f"({width}, 80)"), ("lr=1.5e-3", f"lr={rate}"), *more]
            measure(replaced(code, *changes), (f"{name}-{width}",), rate, 0)


if __name__ == "__main__":
    main()
