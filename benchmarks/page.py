"""docs/benchmarks.md from the results files: every table as it was measured, with its machine, versions and commit.

python benchmarks/page.py
"""

from __future__ import annotations

import csv
from pathlib import Path

from common import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_ABOUT = ("machine", "threads", "python", "torch", "commit")
# results file -> heading and what its figures are to be held against
_SECTIONS = {
    "step": (
        "One training step, six-encoder transformer",
        "`times_dense` is dense time over this side's, medians of steps in turns; `goal` is what was set out for.",
    ),
    "recompute": (
        "Peak memory with recomputation",
        "Goal: at most 1/3 of dense, for at most 1.15 of the time without recomputation.",
    ),
    "shrunk_step": ("The step after all ranks are cut to 0.2 of the size", "`speed` against before; goal 1.25."),
    "lookup": ("Look-up of rows in a compressed table", "Goal: 5 times the plain look-up, forward and backward."),
    "shrinkage": ("Ways of shrinking to 0.2, three seeds", "The lowest held-out loss became the default."),
    "criteo_prepare": ("Preparation of click data", "Goal: 150,000 rows a second, memory flat in the number of rows."),
    "calibrate": ("Speed of this machine as the plans see it", "The constants of `contract/cost.py`."),
}


def main() -> None:
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/page.py` from `benchmarks/results/*.csv`; each script there reproduces its own",
        "file. Shared, noisy machines: ratios are of medians, sides taken in turns within one process.",
    ]
    for name, (heading, goal) in _SECTIONS.items():
        path = RESULTS / f"{name}.csv"
        if path.exists():
            lines += ["", f"## {heading}", "", goal, "", *_table(path)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE)


def _table(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [column for column in rows[0] if column not in _ABOUT]
    abouts = sorted({", ".join(f"{key} {row[key]}" for key in _ABOUT if key in row) for row in rows})
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row[column] for column in columns)} |" for row in rows),
        "",
        f"`python benchmarks/{path.stem}.py`; {'; '.join(abouts)}.",
    ]


if __name__ == "__main__":
    main()
