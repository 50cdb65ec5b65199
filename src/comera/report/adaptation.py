"""The figures of rank adaptation: both objectives on the way to their targets, quality against size, and ranks."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comera.report.run import RunData
from comera.report.style import BLUE, INK, MUTED, ORANGE, TEAL, label_ends, size_axes
from comera.report.tables import MEGA, label, number

_DASHES = (0, (4, 3))
# from nearly transparent to full teal: the page shows through, so one picture serves light and dark
_SHARE = ListedColormap(np.array([(*to_rgb("#16a394"), alpha) for alpha in np.linspace(0.04, 0.8, 256)]), name="share")
_COLUMNS = 80  # time steps of each strip


def objectives(run: RunData) -> Figure | None:
    """Loss and size during training. Shaded: the late stage; dashed: its targets. Once the size reaches S₀, the model
    keeps training at that size.
    """
    points = [point for point in run.train if point.size]
    if not points:
        return None
    figure = Figure(figsize=(4.8, 4.2))
    top, bottom = figure.subplots(2, 1, sharex=True)
    mega = run.element_bytes / MEGA
    steps = np.array([point.step for point in points])
    losses = smooth(np.array([point.loss for point in points]))
    sizes = np.array([point.size * mega for point in points])
    top.plot(steps, losses, color=BLUE)
    ends = [(float(losses[-1]), f"train {number(losses[-1])}", BLUE)]
    if run.evals:
        held = [point.loss for point in run.evals]
        top.plot([point.step for point in run.evals], held, color=ORANGE, marker="o", markersize=3.2)
        ends.append((held[-1], f"held-out {number(held[-1])}", ORANGE))
    bottom.plot(steps, sizes, color=TEAL, drawstyle="steps-post")
    bottom.set(ylim=(0, max(sizes) * 1.12), xlabel="steps", ylabel="tensorized, MB")
    top.set(title="The two objectives", ylabel="loss")
    for stage in run.stages:
        _target(top, stage.step, stage.target_loss, "L₀")
        _target(bottom, stage.step, stage.target_size * mega, "S₀")
        for axes in (top, bottom):
            axes.axvspan(stage.step, steps[-1], color=TEAL, alpha=0.07, linewidth=0)
        place, across = (stage.step, 0.97), top.get_xaxis_transform()
        top.text(*place, " late stage ▸", transform=across, color=INK, fontsize=8, va="top")
    for point in run.rounds:
        bottom.plot(point.step, point.after * mega, color=TEAL, marker="D", markersize=5)
    right = max(float(steps[-1]), 1.0)
    for axes in (top, bottom):
        axes.set_xlim(0, right * 1.015)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    label_ends(top, ends)
    last = run.rounds[-1].after * mega if run.rounds else float(sizes[-1])
    label_ends(bottom, [(last, f"{number(last)} MB", TEAL)])
    return figure


def _target(axes: Axes, start: float, value: float, name: str) -> None:
    if np.isfinite(value):
        axes.axhline(value, color=MUTED, linestyle=_DASHES, linewidth=0.9)
        axes.text(0.01, value, name, transform=axes.get_yaxis_transform(), color=MUTED, fontsize=8, va="bottom")


def pareto(run: RunData) -> Figure | None:
    """Quality at each evaluation against the model's size at that step; the large point is the last one. A good late
    stage moves left without moving down.
    """
    sizes = {size.step: size.total * run.element_bytes / MEGA for size in run.sizes}
    points = [(sizes[point.step], point) for point in run.evals if point.step in sizes]
    if len({size for size, _ in points}) < 2:
        return None
    names = [name for _, point in points for name in point.metrics]
    name = names[0] if names else "held-out loss"
    values = [point.metrics.get(name, np.nan) if names else point.loss for _, point in points]
    figure = Figure(figsize=(4.8, 3.1))
    axes = size_axes(figure, title="Size and quality", xlabel="model, MB", ylabel=label(name))
    x = [size for size, _ in points]
    axes.plot(x, values, color=TEAL, alpha=0.5, marker="o", markersize=3)
    axes.plot(x[-1], values[-1], color=TEAL, marker="o", markersize=7)
    axes.annotate(f"{number(x[-1])} MB, {number(values[-1])}", (x[-1], values[-1]), (6, 8), textcoords="offset points")
    axes.margins(x=0.2, y=0.2)
    return figure


def smooth(values: np.ndarray) -> np.ndarray:
    """Centered moving mean over about a thirtieth of the values, truncated at both ends; ignores NaNs."""
    window, finite = np.ones(2 * (len(values) // 60) + 1), np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    counts = np.convolve(finite, window, mode="same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


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
