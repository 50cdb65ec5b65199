"""The figure of ranks: tensor trains × inner ranks over time, the paper's table of ranks as a picture."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure

from comera.report.run import RunData
from comera.report.style import INK, MUTED

# from nearly transparent to full teal: the page shows through, so one picture serves light and dark
_SHARE = ListedColormap(np.array([(*to_rgb("#16a394"), alpha) for alpha in np.linspace(0.04, 0.8, 256)]), name="share")
_COLUMNS = 80  # time steps of each strip


def ranks_over_time(run: RunData) -> Figure | None:
    """One row per tensor train, one panel per inner rank, steps from left to right. Color: the share of the initial
    rank that is unpruned; number: the final rank. Rows that fade early are the layers that need the least capacity.
    """
    sizes = [size for size in run.sizes if size.ranks]
    if not sizes:
        return None
    first, last, logged = sizes[0], sizes[-1], [size.step for size in sizes]
    names = list(first.ranks)
    positions = max(len(ranks) for ranks in first.ranks.values())
    if not positions:
        return None
    steps = np.linspace(first.step, last.step, _COLUMNS)
    at = [sizes[bisect_right(logged, step) - 1] for step in steps]
    figure = Figure(figsize=(9.6, 1.5 + 0.2 * len(names)))
    panels = figure.subplots(1, positions, sharey=True, squeeze=False)[0]
    for k, axes in enumerate(panels):
        share = np.full((len(names), _COLUMNS), np.nan)
        for row, name in enumerate(names):
            if k < len(first.ranks[name]):
                ranks_at = [size.ranks.get(name, first.ranks[name]) for size in at]
                share[row] = [ranks[k] / max(first.ranks[name][k], 1) for ranks in ranks_at]
                text = axes.text(_COLUMNS - 2, row, str(ranks_at[-1][k]), ha="right", va="center", fontsize=7.5)
                text.set(color=INK, in_layout=False)
        image = axes.imshow(share, cmap=_SHARE, vmin=0, vmax=1, aspect="auto", interpolation="none")
        for point in run.stages:
            place = (point.step - first.step) / max(last.step - first.step, 1) * _COLUMNS - 0.5
            axes.axvline(place, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_title(f"inner rank {k + 1}", fontsize=9)
        axes.set_xticks([0, _COLUMNS - 1], [f"{first.step:,}", f"{last.step:,}"], fontsize=7)
        axes.set_yticks(range(len(names)), short_names(names), fontsize=7.5)
    panels[positions // 2].set_xlabel("steps")
    bar = figure.colorbar(image, ax=list(panels), shrink=min(1.0, 2.4 / figure.get_figheight()), aspect=16, pad=0.02)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_ticks([0, 0.5, 1], labels=["0 %", "50 %", "100 %"])
    for axes in (*panels, bar.ax):
        axes.grid(False)
        axes.spines[:].set_visible(False)
    return figure


def short_names(names: Sequence[str], longest: int = 48) -> list[str]:
    """Names without their common leading components and the trailing `.tt`, shortened in the middle."""
    parts = [name.removesuffix(".tt").split(".") for name in names]
    columns = zip(*parts, strict=False) if len(parts) > 1 else ()
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1 and not column[0].isdigit(), columns))
    cut = [".".join(part[shared:]) or ".".join(part) for part in parts]
    return [name if len(name) <= longest else f"{name[: longest // 2 - 1]}…{name[-longest // 2 :]}" for name in cut]
