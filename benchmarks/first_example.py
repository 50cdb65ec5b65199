"""README's example over three seeds: what its code prints, line by line.

OMP_NUM_THREADS=1 python benchmarks/first_example.py                benchmarks/results/first_example.csv, 4 minutes
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from common import about, update

README = Path(__file__).parents[1] / "README.md"
SEEDS = range(3)


def main() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for seed in SEEDS:
        command = [sys.executable, "-c", code.replace("manual_seed(0)", f"manual_seed({seed})")]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for width, loss in re.findall(r"^(\d+) wide: ([\d.]+) nats per byte$", shown, re.MULTILINE):
            row = {"width": width, "seed": seed, "nats_per_byte": loss}
            print(row)
            update("first_example", [row | about()], ("width", "seed"))


if __name__ == "__main__":
    main()
