"""The figure of ranks: layers × bonds over time, as the paper's table of ranks, drawn."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from comera.report.run import RunData
from comera.report.style import INK, MUTED

# from nearly clear to full teal: the page shows through, so the same picture reads on white and on black
SHARE = ListedColormap(np.array([(*to_rgb("#16a394"), alpha) for alpha in np.linspace(0.04, 0.8, 256)]), name="share")
COLUMNS = 80  # of each strip over time


def ranks_over_time(run: RunData) -> Figure | None:
    """A strip for each bond of each chain: the share of its first rank over the steps, and the rank at the end."""
    sizes = [size for size in run.sizes if size.ranks]
    if not sizes:
        return None
    first, last, known = sizes[0], sizes[-1], [size.step for size in sizes]
    names = list(first.ranks)
    bonds = max(len(ranks) for ranks in first.ranks.values())
    if not bonds:
        return None
    steps = np.linspace(first.step, last.step, COLUMNS)
    at = [sizes[bisect_right(known, step) - 1] for step in steps]
    figure = Figure(figsize=(9.6, 1.5 + 0.2 * len(names)))
    panels = figure.subplots(1, bonds, sharey=True, squeeze=False)[0]
    for k, axes in enumerate(panels):
        share = np.full((len(names), COLUMNS), np.nan)
        for row, name in enumerate(names):
            if k < len(first.ranks[name]):
                known_at = [size.ranks.get(name, first.ranks[name]) for size in at]
                share[row] = [ranks[k] / max(first.ranks[name][k], 1) for ranks in known_at]
                text = axes.text(COLUMNS - 2, row, str(known_at[-1][k]), ha="right", va="center", fontsize=7.5)
                text.set(color=INK, in_layout=False)
        image = axes.imshow(share, cmap=SHARE, vmin=0, vmax=1, aspect="auto", interpolation="none")
        for point in run.stages:
            place = (point.step - first.step) / max(last.step - first.step, 1) * COLUMNS - 0.5
            axes.axvline(place, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_title(f"bond {k + 1}", fontsize=9)
        axes.set_xticks([0, COLUMNS - 1], [f"{first.step:,}", f"{last.step:,}"], fontsize=7)
        axes.set_yticks(range(len(names)), short_names(names), fontsize=7.5)
    panels[bonds // 2].set_xlabel("steps")
    bar = figure.colorbar(image, ax=list(panels), shrink=min(1.0, 2.4 / figure.get_figheight()), aspect=16, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_ticks([0, 0.5, 1], labels=["0 %", "50 %", "100 %"])
    for axes in (*panels, bar.ax):
        axes.grid(False)
        axes.spines[:].set_visible(False)
    return figure


def short_names(names: Sequence[str], longest: int = 48) -> list[str]:
    """Names without the leading parts that all share and the trailing `.tt`, shortened in the middle."""
    parts = [name.removesuffix(".tt").split(".") for name in names]
    columns = zip(*parts, strict=False) if len(parts) > 1 else ()
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1 and not column[0].isdigit(), columns))
    cut = [".".join(part[shared:]) or ".".join(part) for part in parts]
    return [name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-longest // 2 :]}" for name in cut]
