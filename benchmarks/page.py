"""Write docs/benchmarks.md from results/*.csv: goals beside figures first, then every table.

python benchmarks/page.py
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from common import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_ABOUT = ("machine", "threads", "python", "torch", "commit")
Rows = list[dict[str, str]]
# results file -> heading and how to read it
_SECTIONS = {
    "step": (
        "One training step, six-encoder transformer",
        "`times_dense` is dense time over this side's, medians of steps in turns.",
    ),
    "recompute": ("Peak memory with recomputation", "`added`: beyond an interpreter with its libraries."),
    "peers": (
        "Beside what one would pick instead",
        "`times_comera`: a side's step time or memory over CoMERA's in the same case.",
    ),
    "layer": ("One encoder layer by width", "`ratio` of forward and backward, `step_ratio` with the optimizer."),
    "shrunk_step": ("The step after all ranks are cut to 0.2 of the size", "`speed` against before."),
    "lookup": ("Look-up of rows in a compressed table", "Forward and backward; `times_x`: time of x over this side's."),
    "shrinkage": ("Ways of shrinking to 0.2, three seeds", "The lowest held-out loss became the default."),
    "dlrm": ("DLRM at the table sizes of the full Kaggle data", "Each figure names what it was held against."),
    "criteo_prepare": ("Preparation of click data", "`peak_mb` must not follow the number of rows."),
    "gpu_step": ("One training step on a GPU", "All modes of both sides; `times_dense` against the fastest of dense."),
    "gpu_kernels": ("Triton kernels on a GPU", "Kernels are used only where they measure faster."),
    "calibrate": ("Speed of this machine as the plans see it", "The constants of `contract/cost.py`."),
}


def main() -> None:
    tables = {name: _read(RESULTS / f"{name}.csv") for name in _SECTIONS}
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/page.py` from `benchmarks/results/*.csv`; each script there reproduces its own",
        "file. Shared, noisy machines: ratios are of medians, sides taken in turns within one process.",
        "",
        "## Goals and figures",
        "",
        "| what | goal | measured | reached |",
        "|---|---|---|---|",
        *_goals(tables),
    ]
    for name, (heading, reading) in _SECTIONS.items():
        if tables[name]:
            lines += ["", f"## {heading}", "", reading, "", *_table(name, tables[name])]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE)


def _goals(tables: dict[str, Rows]) -> Iterator[str]:
    """A line for each goal; what has no results file says so."""
    for what, name, goal, most, figure in _GOALS:
        try:
            value = figure(tables[name])
        except (LookupError, ValueError):  # no such file, or no such row in it
            yield f"| {what} | {'≤' if most else '≥'} {goal:.3g} | not measured | |"
            continue
        reached = value <= goal if most else value >= goal
        yield f"| {what} | {'≤' if most else '≥'} {goal:.6g} | {value:.3g} | {'yes' if reached else '**no**'} |"


def _one(column: str, **wanted: str) -> Callable[[Rows], float]:
    """The figure in `column` of the first row that has the wanted values."""
    return lambda rows: [float(row[column]) for row in _where(rows, wanted) if row[column]][0]  # noqa: RUF015


def _least(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: min(float(row[column]) for row in _where(rows, wanted))


def _where(rows: Rows, wanted: dict[str, str]) -> Rows:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no row with {wanted}")
    return found


# what, results file, goal, whether the goal is the most it may be, how to find the figure
_GOALS: list[tuple[str, str, float, bool, Callable[[Rows], float]]] = [
    (
        "step, batch 32 × 128, float32: times dense",
        "step",
        5,
        False,
        _one("times_dense", case="batch 32", side="fused"),
    ),
    ("step, batch 1: times dense", "step", 5, False, _one("times_dense", case="batch 1", side="fused")),
    ("step, batch 32, bf16: times dense", "step", 2, False, _one("times_dense", case="batch 32, bf16", side="fused")),
    (
        "memory with recomputation, of dense",
        "recompute",
        1 / 3,
        True,
        _one("added_of_dense", side="fused, recompute"),
    ),
    (
        "time with recomputation, of that without",
        "recompute",
        1.15,
        True,
        _one("time_of_plain", side="fused, recompute"),
    ),
    ("GaLore, batch 1: times our step", "peers", 10, False, _one("times_comera", case="batch 1", side="galore")),
    (
        "GaLore, batch 1: times our memory",
        "peers",
        20,
        False,
        lambda rows: (
            _one("memory_mb", case="batch 1", side="galore")(rows)
            / _least("memory_mb", case="batch 1", side="comera, recompute")(rows)
        ),
    ),
    ("LTE, batch 32: times our step", "peers", 12, False, _one("times_comera", case="batch 32", side="lte")),
    (
        "LTE, batch 32: times our memory",
        "peers",
        12,
        False,
        lambda rows: (
            _one("memory_mb", case="batch 32", side="lte")(rows)
            / _least("memory_mb", case="batch 32", side="comera, recompute")(rows)
        ),
    ),
    (
        "tensorly-torch, batch 32: times our step",
        "peers",
        20,
        False,
        _one("times_comera", case="batch 32", side="tensorly"),
    ),
    ("encoder layer: least ratio, any width, float32", "layer", 1, False, _least("ratio", precision="fp32")),
    ("encoder layer: least ratio, any width, bf16", "layer", 1, False, _least("ratio", precision="bf16")),
    ("encoder layer: width 4096, float32", "layer", 8, False, _least("ratio", precision="fp32", width="4096")),
    (
        "look-up of 10 M × 64: times the plain one, least over the laws of ids",
        "lookup",
        5,
        False,
        lambda rows: min(float(row["times_plain"]) for row in rows if row["rows"] == "10000000" and _ours(row)),
    ),
    (
        "step after the cut to 0.2: times before",
        "shrunk_step",
        1.25,
        False,
        _one("speed", model="after the cut to 0.2", multiple="1", dropout="0.1"),
    ),
    (
        "DLRM, D = 128: model, times smaller",
        "dlrm",
        150,
        False,
        _one("value", figure="model, times smaller", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 128: tables, times smaller",
        "dlrm",
        200,
        False,
        _one("value", figure="tables, times smaller", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 16: peak memory, times lower",
        "dlrm",
        10,
        False,
        _one("value", figure="peak, times lower", method="comera", dim="16"),
    ),
    (
        "DLRM, D = 128: peak MB",
        "dlrm",
        2000,
        True,
        _one("value", figure="peak MB", method="comera", dim="128"),
    ),
    (
        "DLRM, D = 16: normalised cross-entropy above dense, %, tables of the sample",
        "dlrm",
        0.5,
        True,
        _one("value", figure="nce above dense, %", method="late 0.5, sample"),
    ),
    (
        "DLRM, D = 16: samples/s, times dense Adagrad",
        "dlrm",
        1,
        False,
        _one("value", figure="times faster than dense adagrad", optimizer="adagrad"),
    ),
    (
        "DLRM, D = 16: samples/s, times dense AdamW",
        "dlrm",
        1,
        False,
        _one("value", figure="times faster than dense adamw"),
    ),
    (
        "click data: rows/s from train.txt.gz",
        "criteo_prepare",
        150_000,
        False,
        _least("rows_per_second", form="txt.gz"),
    ),
    (
        "GPU step, bf16, batch 128: times dense",
        "gpu_step",
        2.5,
        False,
        lambda rows: max(float(row["times_dense"]) for row in _where(rows, {"precision": "bf16", "batch": "128"})),
    ),
]


def _ours(row: dict[str, str]) -> bool:
    return "comera" in row.values()


def _read(path: Path) -> Rows:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _table(name: str, rows: Rows) -> list[str]:
    columns = [column for column in rows[0] if column not in _ABOUT]
    abouts = sorted({", ".join(f"{key} {row[key]}" for key in _ABOUT if key in row) for row in rows})
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row[column] for column in columns)} |" for row in rows),
        "",
        f"`python benchmarks/{name}.py`; {'; '.join(abouts)}.",
    ]


if __name__ == "__main__":
    main()
