"""Write docs/benchmarks.md from results/*.csv: goals beside figures first, then every table.

python benchmarks/page.py
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from common import RESULTS
from dlrm_tables import summary
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from comera.__main__ import SPIN_COUNT
from comera.report.style import INK, ORANGE, TEAL, png, styled

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURE = PAGE.with_suffix(".png")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_ABOUT = ("machine", "threads", "python", "torch", "commit")
Rows = list[dict[str, str]]
# results file -> heading and how to read it
_SECTIONS = {
    "step": (
        "One training step, six-encoder transformer",
        "`times_dense`: dense time over this side's; medians of alternating steps.",
    ),
    "recompute": ("Peak memory with recomputation", "`added`: beyond an interpreter with its libraries."),
    "tiny": (
        "Training in the memory of a small chip",
        "`plan_mb`: what `plan_memory` says, in MB of a million bytes; `live_mb`, `allocated_mb`: the tensors of ten "
        "steps, followed one by one, and as torch's allocator gave them out.",
    ),
    "roofline": (
        "How far the step is from the machine's limits",
        "`least_ms`: every operation at the speed of large products or of copies from memory, whichever is slower; "
        "`best_ratio`: measured dense time over that.",
    ),
    "peers": (
        "Against what one would pick instead",
        "`times_comera`: a side's step time or memory over CoMERA's in the same case.",
    ),
    "layer": ("One encoder layer by width", "`ratio`: forward and backward; `step_ratio`: with the optimizer."),
    "block_product": (
        "Block tensor trains and low rank at equal FLOPs",
        "`times_low_rank`, `times_dense`: time over that of the C++ low-rank products, and of torch's linear layer "
        "between narrower features, of as many FLOPs; `kernel_gflops` counts no recomputation.",
    ),
    "optimizer": (
        "The optimizer's part of a step",
        "`part`: of forward, backward and the optimizer's step; models of about as many parameters in pairs.",
    ),
    "projections": (
        "Projected gradients: state and loss",
        "`kb`: of the optimizer's state at the end; `largest_kb`: its peak; held-out loss in nats per byte.",
    ),
    "projections_steps": (
        "Projected gradients: the longest step",
        "Steps of the optimizer alone; `first_ms`: the one that makes the state, in no other column.",
    ),
    "shrunk_step": ("The step after all ranks are cut to 0.2 of the size", "`speed`: compared with before."),
    "codebert": (
        "CodeBERT at full size",
        "A step of a few sequences of 512 tokens; `added_mb`: beyond an interpreter with its libraries.",
    ),
    "busy": (
        "A step beside another program",
        "Dense and compressed with GOMP_SPINCOUNT as in `spin_count`; `kept`: the ratio, of that on the idle machine.",
    ),
    "threads": (
        "Kernels on more threads",
        "Forward and backward. `times`: speed on two threads over one. `busy_of_16`: of 16 threads, those with at "
        "least a quarter of an equal share of the work.",
    ),
    "links": (
        "Slow links",
        "Data-parallel training with a link of its own for each process; `sent_mb`: by a process in a step; "
        "`times_dense`: dense time over this side's. The loss is not compared here.",
    ),
    "lookup": ("Lookup of rows in a compressed table", "Forward and backward; `times_x`: time of x over this side's."),
    "shrinkage": (
        "Ways of shrinking to 0.2",
        "`own`: the part of the size that a way reached by itself, before rounding; `fell`: of the gates, pruned then.",
    ),
    "dlrm": ("DLRM at the table sizes of the full Kaggle data", "Notes name what a figure compares with."),
    "dlrm_tables": (
        "DLRM at equal bytes, tables of the full Kaggle data's sizes",
        "One pass over 117,548 rows of Criteo's log with AdamW, the rate `lr` tuned out of three on validation rows; "
        "normalized cross-entropy `nce` on test rows, mean of the seeds, and half their range. All methods read "
        "the same ids, categories hashed into the sizes of the tables; `own_rows` is dense with a row for each "
        "category of the sample. Above them: in per cent. `step_mb`: memory of a step, estimated. A note is the "
        "reason why there is no figure; tensor trains 10 times smaller were not run.",
    ),
    "criteo_prepare": ("Preparation of click data", "`peak_mb` must not grow with the number of rows."),
    "gpu_step": ("One training step on a GPU", "`times_dense` compares with the fastest mode of dense."),
    "gpu_kernels": ("Triton kernels on a GPU", "Kernels are used only where they measured faster."),
    "calibrate": ("Speed of this machine as the planner sees it", "The constants of `ops/planner/cost.py`."),
}


def main() -> None:
    tables = {name: _read(RESULTS / f"{name}.csv") for name in _SECTIONS}
    tables["dlrm_tables"] = summary(tables["dlrm_tables"])
    goals = list(_goals(tables))
    _draw([(what, reached) for what, *_, reached in goals if reached is not None])
    lines = [
        "# Benchmarks",
        "",
        "Written by `python benchmarks/page.py` from `benchmarks/results/*.csv`; each script there reproduces its own",
        "file. Machines are shared and noisy: ratios are of medians, and sides alternate within one process.",
        "Limit: the figure if our step took only what its operations need at the machine's ceilings (`least_ms`,",
        "below), where both are of one machine.",
        "",
        "## Goals and figures",
        "",
        "| what | goal | measured | limit | reached |",
        "|---|---|---|---|---|",
        *(_line(*goal, _limit(goal[0], tables)) for goal in goals),
        "",
        f"![Each figure over its goal, on a logarithmic axis; bars to the right of the line reach it.]({FIGURE.name})",
    ]
    for name, (heading, reading) in _SECTIONS.items():
        if tables[name]:
            lines += ["", f"## {heading}", "", reading, "", *_table(name, tables[name])]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE)


Goal = tuple[str, str, float | None, float | None]  # what, the goal in words, the figure, how many times the goal


def _goals(tables: dict[str, Rows]) -> Iterator[Goal]:
    """Every goal; without a results file it has no figure."""
    for what, name, goal, most, figure in _GOALS:
        value = None
        with suppress(LookupError, ValueError):  # no such file, or no such row in it
            value = figure(tables[name])
        reached = None if value is None else goal / value if most else value / goal
        yield what, f"{'≤' if most else '≥'} {_short(goal)}", value, reached


def _limit(what: str, tables: dict[str, Rows]) -> float | None:
    """The figure at the roofline: the time of a side's step over the least that ours can take; None for other goals,
    and for figures of another machine than that of the roofline."""
    if what not in _AT_THE_ROOFLINE:
        return None
    case, side, measured = _AT_THE_ROOFLINE[what]
    if len({row["machine"] for name in (measured, "roofline") for row in tables[name] if row["case"] == case}) > 1:
        return None
    with suppress(LookupError, ValueError):
        least_ms = _one("least_ms", case=case, side="fused")(tables["roofline"])
        return _one("step_ms", case=case, side=side)(tables["peers"]) / least_ms
    return None


def _line(what: str, goal: str, value: float | None, reached: float | None, limit: float | None) -> str:
    if value is None or reached is None:
        return f"| {what} | {goal} | not measured | | |"
    most = "" if limit is None else _short(limit)
    return f"| {what} | {goal} | {_short(value)} | {most} | {'yes' if reached >= 1 else '**no**'} |"


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if 0.995 <= value < 1.005 else f"{value:.3g}"  # which side of 1 must show


def _draw(goals: list[tuple[str, float]]) -> None:
    """The figures over their goals, as bars that start at the goal."""
    with styled():
        figure = Figure(figsize=(8, 0.8 + 0.24 * len(goals)))
        axes = figure.add_subplot()
        names, reached = [what for what, _ in goals][::-1], [value for _, value in goals][::-1]
        colours = [TEAL if value >= 1 else ORANGE for value in reached]
        axes.barh(names, [value - 1 for value in reached], left=1, height=0.6, color=colours)
        axes.set_xscale("log")
        axes.axvline(1, color=INK, linewidth=0.8)
        axes.set_title("Measured over goal")
        axes.grid(axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xticks([tick for tick in TICKS if min(*reached, 1) / 1.5 < tick < max(*reached, 1) * 1.5])
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        FIGURE.write_bytes(png(figure))


def _one(column: str, **wanted: str) -> Callable[[Rows], float]:
    """The figure in `column` of the first row with the wanted values."""
    return lambda rows: [float(row[column]) for row in _where(rows, wanted) if row[column]][0]  # noqa: RUF015


def _over(column: str, method: str, other: str, **wanted: str) -> Callable[[Rows], float]:
    """The figure of a method over that of another."""
    return lambda rows: _one(column, method=method, **wanted)(rows) / _one(column, method=other, **wanted)(rows)


def _least(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: min(float(row[column]) for row in _where(rows, wanted))


def _largest(column: str, **wanted: str) -> Callable[[Rows], float]:
    return lambda rows: max(float(row[column]) for row in _where(rows, wanted))


def _where(rows: Rows, wanted: dict[str, str]) -> Rows:
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"no row with {wanted}")
    return found


# what, results file, goal, whether the goal is an upper bound, how to find the figure
_GOALS: list[tuple[str, str, float, bool, Callable[[Rows], float]]] = [
    (
        "step, batch 32 × 128, float32: times dense",
        "step",
        10,
        False,
        _one("times_dense", case="batch 32", side="fused"),
    ),
    ("step, batch 1: times dense", "step", 9, False, _one("times_dense", case="batch 1", side="fused")),
    ("step, batch 1, bf16: times dense", "step", 2, False, _one("times_dense", case="batch 1, bf16", side="fused")),
    (
        "step, batch 32, bf16: times dense in float32",
        "step",
        2,
        False,
        _one("times_dense", case="batch 32", side="fused, bf16"),
    ),
    (
        "memory with recomputation, of dense",
        "recompute",
        0.09,
        True,
        _one("added_of_dense", side="fused, recompute"),
    ),
    (
        "two encoders, 768 wide, one text: MB of tensors in training",
        "tiny",
        28.5,
        True,
        _one("live_mb", case="compressed, batch 1, adamw"),
    ),
    (
        "time with recomputation, of that without",
        "recompute",
        1.08,
        True,
        _one("time_of_plain", side="fused, recompute"),
    ),
    ("GaLore, batch 1: times our step", "peers", 10, False, _one("times_comera", case="batch 1", side="galore")),
    (
        "GaLore, batch 1: times our memory, with recomputation",
        "peers",
        20,
        False,
        lambda rows: (
            _one("memory_mb", case="batch 1", side="galore")(rows)
            / _least("memory_mb", case="batch 1", side="comera, recompute")(rows)
        ),
    ),
    ("LTE, batch 32: times our step", "peers", 9, False, _one("times_comera", case="batch 32", side="lte")),
    (
        "LTE, batch 32: times our memory, with recomputation",
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
        11,
        False,
        _one("times_comera", case="batch 32", side="tensorly"),
    ),
    ("CodeBERT, 12 encoders, phase 1: times smaller", "codebert", 4.23, False, _one("times_smaller", side="phase 1")),
    ("CodeBERT, 12 encoders, phase 1: times dense", "codebert", 2.5, False, _one("times_faster", side="phase 1")),
    (
        "one busy neighbour on two cores, as comera runs: ratio to dense, of the idle one",
        "busy",
        0.9,
        False,
        _one("kept", spin_count=SPIN_COUNT, load="one core busy"),
    ),
    (
        "100 Mbit/s, 2 processes: dense DDP step over compressed",
        "links",
        20,
        False,
        _one("times_dense", processes="2", link="100 Mbit/s, 10 ms", side="compressed"),
    ),
    ("encoder layer: least ratio, any width, float32", "layer", 1, False, _least("ratio", precision="fp32")),
    ("encoder layer: least ratio, any width, bf16", "layer", 1, False, _least("ratio", precision="bf16")),
    ("encoder layer: width 4096, float32", "layer", 8, False, _least("ratio", precision="fp32", width="4096")),
    (
        "block tensor trains: most time over low rank's, forward and backward",
        "block_product",
        1,
        True,
        _largest("times_low_rank", products="forward and backward"),
    ),
    (
        "lookup in 10 M × 64: times the plain one",
        "lookup",
        5,
        False,
        _least("times_plain", table="10000000 x 64", side="comera"),
    ),
    (
        "step after the cut to 0.2: times before",
        "shrunk_step",
        1.5,
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
        "DLRM, D = 16, tables of the sample: cross-entropy above dense, %",
        "dlrm",
        0.5,
        True,
        _one("value", figure="nce above dense, %", method="late 0.5, sample"),
    ),
    (
        "DLRM, D = 16, tables of the full data: cross-entropy above dense, %",
        "dlrm",
        0.5,
        True,
        _one("value", figure="nce above dense, %", method="late 0.5, kaggle"),
    ),
    *(
        (
            f"DLRM, D = {dim}, 200 times: cross-entropy above {reference}, %",
            "dlrm_tables",
            0.5,
            True,
            _one(column, dim=dim, ratio="200", method="comera"),
        )
        for dim in ("16", "64")
        for column, reference in (
            ("above_dense", "dense"),
            ("above_own_rows", "a row for each category"),
        )
    ),
    *(
        (
            f"DLRM, D = {dim}, {ratio} times: cross-entropy, times {name}'s",
            "dlrm_tables",
            1,
            True,
            _over("nce", "comera", method, dim=dim, ratio=ratio),
        )
        for dim, ratio in (("16", "50"), ("16", "200"), ("64", "200"))
        for method, name in (("hashing", "hashing"), ("quotient_remainder", "quotient-remainder"))
    ),
    (
        "DLRM, D = 16: samples/s, times dense Adagrad",
        "dlrm",
        1.3,
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

# goal -> the case of roofline.csv, the side of peers.csv whose step it compares with ours, and the goal's own file
_AT_THE_ROOFLINE = {
    "step, batch 32 × 128, float32: times dense": ("batch 32", "dense", "step"),
    "step, batch 1: times dense": ("batch 1", "dense", "step"),
    "GaLore, batch 1: times our step": ("batch 1", "galore", "peers"),
    "LTE, batch 32: times our step": ("batch 32", "lte", "peers"),
    "tensorly-torch, batch 32: times our step": ("batch 32", "tensorly", "peers"),
}


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
