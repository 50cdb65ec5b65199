"""Write docs/frontier.md and its figure from results/frontier.csv and results/frontier_costs.csv.

python benchmarks/frontier_page.py
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from common import RESULTS
from frontier import RATES, TUNING, parse
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter

from comera.report.style import GREY, PURPLE, TEAL, png, styled

PAGE = Path(__file__).parents[1] / "docs" / "frontier.md"
FIGURE = PAGE.with_suffix(".png")
COLORS = {"dense": GREY, "btt": TEAL, "tt": PURPLE}
SIDES = {"parameters": "parameters", "mflops_token": "MFLOPs a token, forward and backward", "peak_mb": "peak MB"}
_ABOUT = ("machine", "threads", "python", "torch", "commit")

HEAD = """# The frontier: what is learned for what it costs

Written by `python benchmarks/frontier_page.py`; `make frontier BUDGET=600s` measures anew. Every case is the recipe
`lm` (Llama-style, {layers} blocks unless its name says otherwise), trained for the same time in measured steps,
with fused kernels and one optimizer. **The baseline is the best dense model of any width.** `btt2-384` is a block
tensor train of rank 2 in about as many blocks as features in each, 384 wide, `btt8b4-384` of rank 8 in 4 × 4 blocks;
`tt6r30-384` a tensor train of order 6 and rank 30. Base rates are tuned alike, out of
{rates},
for 1/{tuning} of the budget on one half of the held-out text; figures are read from the other half.

## Where compression can win

Written down from the costs below while the first runs were under way, before any of their figures.

A dense layer does 6 FLOPs a parameter and token, forward and backward, in products that run at the machine's peak. A
block tensor train does 6 as well, TT and plain low rank up to 6, so FLOPs per parameter are no handicap. What is: a
compressed model of as many FLOPs is two to four times wider, and everything between the layers (norms, activations,
attention) costs in proportion to the width, at the speed of memory; and small blocks run below the peak.

- **Compute-limited** (minutes, a small model): the narrow dense model takes the most steps. Compression wins only if a
  step teaches so much more that this is made up for.
- **Capacity-limited** (long training, a model that has stopped improving): what counts is the loss at equal parameters.
  Here block tensor trains should win.
- **Memory-limited**: optimizer state and gradients are 3 of the 4 copies of each parameter; with recomputation,
  activations are low-rank. At equal peak memory the compressed model may be several times wider.
- **Bandwidth-limited** (one sequence a step): a step reads every parameter once for few FLOPs; fewer parameters win
  directly.
"""


def main() -> None:
    rows, costs = (_read(RESULTS / f"{name}.csv") for name in ("frontier", "frontier_costs"))
    final = [row for row in rows if row["part"] == "final"]
    settings = sorted({_setting(row) for row in final})
    rates = "; ".join(f"{', '.join(f'{rate:g}' for rate in each)} ({name})" for name, each in RATES.items())
    lines = [HEAD.format(layers=4, rates=rates, tuning=TUNING)]
    if final:
        _draw(final)
        lines += ["## Measured", "", f"![Held-out nats per byte over what each model costs.]({FIGURE.name})"]
    for text, vocab, budget, optimizer in settings:
        chosen = [row for row in final if _setting(row) == (text, vocab, budget, optimizer)]
        tuned = {
            row["case"] for row in rows if row["part"] == "tune" and _setting(row) == (text, vocab, budget, optimizer)
        }
        lines += ["", f"### {text}, vocabulary {vocab:,}, {budget}, {optimizer}", "", *_table(chosen, tuned)]
    lines += ["", "## Costs", "", "| vocabulary | case | parameters | MFLOPs a token | FLOPs a parameter |"]
    lines.append("|--:|---|--:|--:|--:|")
    for row in costs:
        lines.append(
            f"| {int(row['vocab']):,} | {row['case']} | {int(row['parameters']):,} | {row['mflops_token']} | "
            f"{row['flops_per_parameter']} |"
        )
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(PAGE)


def _setting(row: dict[str, str]) -> tuple[str, int, str, str]:
    return row["text"], int(row["vocab"]), row["budget"], row["optimizer"]


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _table(rows: list[dict[str, str]], tuned: set[str]) -> list[str]:
    """A row for each case, the best first: mean and spread over seeds, and the distance from the best dense model.

    tuned: cases whose rate was tuned for this budget; a star marks the rates of the others.
    """
    by_case: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    means = {name: statistics.fmean(float(row["nats_per_byte"]) for row in own) for name, own in by_case.items()}
    dense = min((mean for name, mean in means.items() if parse(name).method == "dense"), default=None)
    lines = ["| case | nats per byte | spread | seeds | to the best dense | rate | steps | parameters | peak MB |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for name in sorted(means, key=means.__getitem__):
        own = by_case[name]
        losses = [float(row["nats_per_byte"]) for row in own]
        spread = f"{max(losses) - min(losses):.3f}" if len(own) > 1 else ""
        apart = "" if dense is None else f"{means[name] - dense:+.3f}"
        first = own[0]
        rate = first["lr"] if name in tuned else f"{first['lr']} \\*"
        lines.append(
            f"| {name} | {means[name]:.3f} | {spread} | {len(own)} | {apart} | {rate} | {first['steps']} | "
            f"{float(first['parameters']):,.0f} | {float(first['peak_mb']):,.0f} |"
        )
    abouts = sorted({", ".join(f"{key} {row[key]}" for key in _ABOUT) for row in rows})
    if set(means) - tuned:
        abouts.append("\n\\* given by hand, not tuned for this budget")
    return [*lines, "", *abouts]


def _draw(rows: list[dict[str, str]]) -> None:
    """Loss over parameters, FLOPs and memory; all points of a text, vocabulary and budget cost the same time."""
    with styled():
        figure = Figure(figsize=(10, 3.6))
        panels = figure.subplots(1, len(SIDES), sharey=True)
        for axes, (column, label) in zip(panels, SIDES.items(), strict=True):
            for row in rows:
                kind = next(kind for kind in ("dense", "btt", "tt", "") if row["case"].startswith(kind))
                x, y = float(row[column]), float(row["nats_per_byte"])
                axes.plot(x, y, "o", color=COLORS.get(kind, GREY), markersize=4)
                if row["seed"] == "0":
                    axes.annotate(row["case"], (x, y), textcoords="offset points", xytext=(4, 3), fontsize=6)
            costs = [float(row[column]) for row in rows]
            if max(costs) > 10 * min(costs):
                axes.set_xscale("log")
            else:
                axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.margins(x=0.2, y=0.1)
            axes.set_xlabel(label)
        panels[0].set_ylabel("held-out nats per byte")
        FIGURE.write_bytes(png(figure))


if __name__ == "__main__":
    main()
