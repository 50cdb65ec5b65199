"""Write docs/benchmarks.md from results/*.csv: the goals that were reached first, then the others, then every table.

python benchmarks/page.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import codebert_small
import decompose
import dlrm_tables
import mnli
import sst2
from common import measured
from figures import INK, ORANGE, TEAL, png, styled
from goals import GOALS, LIMITS, Rows
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
FIGURE = PAGE.with_suffix(".png")
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
_ABOUT = ("machine", "threads", "python", "torch", "commit")
# results file -> the script and its part, where a script has several files
_COMMANDS = {
    "roofline_operations": "roofline.py",
    "projections": "projections.py losses",
    "projections_steps": "projections.py times",
}
# results file -> heading and how to read it
_SECTIONS = {
    "step": (
        "One training step, six-encoder transformer",
        "`times_dense`: the time of the fastest dense side over this one's; medians of alternating steps. Compressed "
        "sides adapt their ranks. `graph`: forward and backward recorded once and replayed, mode graph of the trainer.",
    ),
    "families": (
        "One training step by family of models",
        "Models of transformers, 4 blocks, 512 wide, 8 texts of 128 tokens; `compressed` and `fused` have a tenth "
        "of the parameters (ViT an eighth). `dense` is fused, too. `times_dense`: its time over this side's; `fused`: "
        "what `fuse_` replaced.",
    ),
    "recompute": (
        "Peak memory with recomputation",
        "`added`: beyond an interpreter with its libraries. `kept_mb`: what the forward keeps for the backward. "
        "`least_mb`: parameters, moments, what is kept, and operands and results of one operation, where that is most: "
        "no order of these operations and no allocator takes less.",
    ),
    "tiny": (
        "Training in the memory of a small chip",
        "`plan_mb`: what `plan_memory` says, in MB of a million bytes; `live_mb`, `allocated_mb`: the tensors of four "
        "steps, followed one by one, and as torch's allocator gave them out.",
    ),
    "roofline": (
        "How far the step is from the machine's limits",
        "`least_ms`: every operation at the speed of large products and of its functions (`functions_ms`: GELU, the "
        "exponentials of softmax, dropout's random numbers) in the caches, or of copies from memory if that is slower; "
        "`ratio`, `best_ratio`: measured time of the first side of a case over this one's, and over its least.",
    ),
    "roofline_operations": (
        "Where the time of our step goes",
        "Operations that take a hundredth of the fused step or more; `between them`: Python, autograd and the "
        "dispatcher.",
    ),
    "peers": (
        "Against what one would pick instead",
        "`times_comera`: a side's step time or memory over CoMERA's in the same case and mode. `graph`: recorded once "
        "and replayed, mode graph of the trainer, for any method.",
    ),
    "layer": ("One encoder layer by width", "`ratio`: forward and backward; `step_ratio`: with the optimizer."),
    "block_product": (
        "Block tensor trains and low rank at equal FLOPs",
        "`times_low_rank`, `times_dense`: time over that of the C++ low-rank products, and of torch's linear layer "
        "between narrower features, of as many FLOPs; `kernel_gflops` counts no recomputation.",
    ),
    "heads": (
        "Output heads over a vocabulary",
        "Logits and all gradients: `dense`, and a table of plain low rank by the C++ kernel and by torch's products; "
        "`times_dense`, `times_torch`: their time over the kernel's.",
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
    "shrunk_step": (
        "The step after all ranks are cut to 0.2 of the size",
        "`speed`: compared with before; both from recordings.",
    ),
    "codebert": (
        "CodeBERT at full size",
        "A step of a few sequences of 512 tokens; `added_mb`: beyond an interpreter with its libraries.",
    ),
    "codebert_small": (
        "CodeBERT in small",
        "Four encoders of the width in the case's name, masked tokens of Python functions; as many steps as take "
        "`seconds` on one core at `step_ms`, in nats per masked token; `lr`: the best of those tried, at that length.",
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
        "normalized cross-entropy `nce` on test rows, mean of the seeds, and half their range; "
        "`over_comera`: `nce` less that of comera, seed by seed, mean and standard error. All methods read the same "
        "ids, categories hashed into the sizes of the tables; `own_rows` is dense with a row for each category of the "
        "sample, `frequent_rows` with one for those that training has twice or more and one for the rest. Above them: "
        "in per cent. `step_mb`: memory of a step, estimated. A note is the "
        "reason why there is no figure; tensor trains 10 times smaller were not run.",
    ),
    "sst2": (
        "SST-2 from scratch",
        "Two encoders, 512 wide, dense and compressed, and narrower dense ones; `passes` over 60,614 phrases, the rate "
        "`lr` tuned out of four (three passes: the best of one pass) on phrases that were split off (`valid`, in per "
        "cent). `dev`: accuracy on GLUE's development set, mean of the seeds; `spread`: half their range; "
        "`times_dense`: speed of a step.",
    ),
    "mnli": (
        "MNLI from scratch on 41,379 pairs",
        "Six encoders, compressed and dense; `narrow` is the dense model of as many FLOPs a step, `small` one of two "
        "encoders. `accuracy` and `loss` on all 9,815 matched development pairs at the end of a stage; `minute` of "
        "training on one core, by `step_ms`, measured alone. Late stages go on from the end of the early one. Fewer "
        "`pairs`, as many steps: what the number of pairs limits.",
    ),
    "decompose": (
        "SST-2: a dense model made smaller, then fine-tuned",
        "Half a pass over the phrases, the rate `lr` the best of three on phrases that were split off (`valid`). "
        "`before`, `dev`: accuracy on GLUE's development set before and after, in per cent. `magnitude` counts the "
        "weights that are not 0, without their places, and is no faster than dense.",
    ),
    "criteo_prepare": ("Preparation of click data", "`peak_mb` must not grow with the number of rows."),
    "gpu_step": ("One training step on a GPU", "`times_dense` compares with the fastest mode of dense."),
    "gpu_kernels": ("Triton kernels on a GPU", "Kernels are used only where they measured faster."),
    "calibrate": ("Speed of this machine as the planner sees it", "The constants of `ops/planner/cost.py`."),
}


def main() -> None:
    tables = {name: measured(name) for name in _SECTIONS}
    tables["dlrm_tables"] = dlrm_tables.summary(tables["dlrm_tables"])
    tables["codebert_small"] = codebert_small.summary(tables["codebert_small"], measured(codebert_small.SPEED))
    tables["sst2"] = sst2.summary(tables["sst2"], measured("sst2_speed"))
    tables["decompose"] = decompose.summary(tables["decompose"])
    tables["mnli"] = mnli.summary(tables["mnli"], measured(mnli.SPEED))
    goals = list(_goals(tables))
    _draw([(what, reached) for what, *_, reached in goals if reached is not None])
    met = [goal for goal in goals if (goal[3] or 0) >= 1]
    short = [goal for goal in goals if goal not in met]
    lines = [
        "# Benchmarks",
        "",
        f"**{len(met)} of {len(goals)} goals are reached:**",
        "",
        *_beside_goals(met, tables),
        "",
        "Written by `python benchmarks/page.py` from `benchmarks/results/*.csv`; each script there makes its own file",
        "anew. Machines are shared and noisy: ratios are of medians, and sides alternate within one process.",
        "",
        "Limit: the most that ours could reach, if a step took only what its operations need at the machine's ceilings",
        "(`least_ms`, below, where both are of one machine) or only the memory that must be alive at once (`least_mb`,",
        "below); for DLRM, if its tables took no time.",
        "",
        "## Short of the goal, or not measured",
        "",
        *_beside_goals(short, tables),
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
    for what, name, goal, most, figure in GOALS:
        value = None
        with suppress(LookupError, ValueError):  # no such file, or no such row in it
            value = figure(tables[name])
        reached = None if value is None else goal / value if most else value / goal
        yield what, f"{'≤' if most else '≥'}\N{NO-BREAK SPACE}{_short(goal)}", value, reached


def _limit(what: str, tables: dict[str, Rows]) -> float | None:
    """The most that ours can reach; None where that is not known, or not for the machine of the figure."""
    with suppress(KeyError, LookupError, ValueError):
        return LIMITS[what](tables)
    return None


def _beside_goals(goals: Sequence[Goal], tables: dict[str, Rows]) -> list[str]:
    lines = ["| what | goal | measured | limit |", "|---|--:|--:|--:|"]
    for what, goal, value, _ in goals:
        limit = None if value is None else _limit(what, tables)
        shown, most = ("not measured" if value is None else _short(value)), ("" if limit is None else _short(limit))
        lines.append(f"| {what} | {goal} | {shown} | {most} |")
    return lines


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    near = 0.995 <= value < 1.005  # which side of 1 must show
    return next((shown for shown in (f"{value:.4g}", f"{value:.6g}") if shown != "1"), "1") if near else f"{value:.3g}"


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


def _table(name: str, rows: Rows) -> list[str]:
    columns = [column for column in rows[0] if column not in _ABOUT]
    abouts = sorted({", ".join(f"{key} {row[key]}" for key in _ABOUT if key in row) for row in rows})
    return [
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row[column] for column in columns)} |" for row in rows),
        "",
        f"`python benchmarks/{_COMMANDS.get(name, f'{name}.py')}`; {'; '.join(abouts)}.",
    ]


if __name__ == "__main__":
    main()
