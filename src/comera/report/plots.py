"""The figures: of one run (loss over steps and time, size over steps, ranks per layer), and of runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comera.report.ranks import ranks_over_time
from comera.report.run import RunData
from comera.report.stages import objectives, pareto, smooth
from comera.report.style import BLUE, GREY, MUTED, ORANGE, PINK, PURPLE, TEAL, label_ends
from comera.report.tables import MEGA, count, number, time_unit

SMALL = (4.8, 3.1)  # inches: half a page wide, or a phone's width


@dataclass(frozen=True)
class Plot:
    """A figure of a run. draw gives None where the run holds nothing to show; reading: how to read it, a sentence."""

    name: str
    title: str
    reading: str
    draw: Callable[[RunData], Figure | None]


def loss_over_steps(run: RunData) -> Figure | None:
    """Train and held-out loss over steps, prunes marked."""
    steps = [point.step for point in run.train], [point.step for point in run.evals]
    return _loss(run, "Loss over steps", *steps, [prune.step for prune in run.prunes], "steps", 1.0)


def loss_over_time(run: RunData) -> Figure | None:
    """Train and held-out loss over seconds (minutes, hours) of training, prunes marked."""
    times = [point.time for point in run.train], [point.time for point in run.evals]
    unit, seconds = time_unit(max([*times[0], *times[1]], default=0.0))
    prunes = [prune.time for prune in run.prunes]
    return _loss(run, "Loss over training time", *times, prunes, f"training time, {unit}", seconds)


def _loss(
    run: RunData,
    title: str,
    train_x: Sequence[float],
    eval_x: Sequence[float],
    prune_x: Sequence[float],
    unit: str,
    scale: float,
) -> Figure | None:
    if not run.train and not run.evals:
        return None
    figure = Figure(figsize=SMALL)
    axes = figure.add_subplot(title=title, xlabel=unit, ylabel="loss")
    ends = []
    shown: list[float] = []
    if run.train:
        x, raw = np.array(train_x) / scale, np.array([point.loss for point in run.train])
        mean = smooth(raw)
        few = len(raw) < 20
        if not few:
            axes.plot(*thin(x, raw), color=BLUE, alpha=0.28, linewidth=0.7)
        axes.plot(*thin(x, mean), color=BLUE, marker="o" if few else None, markersize=3)
        ends.append((mean[-1], f"train {number(mean[-1])}", BLUE))
        shown += list(mean) + list(raw[: len(raw) // 50 + 1])
    if run.evals:
        x, held = np.array(eval_x) / scale, np.array([point.loss for point in run.evals])
        axes.plot(x, held, color=ORANGE, marker="o", markersize=3.2 if len(held) < 40 else 0)
        ends.append((held[-1], f"held-out {number(held[-1])}", ORANGE))
        shown += list(held)
    _fit_y(axes, shown)
    _mark_prunes(axes, np.array(prune_x) / scale)
    _widen(axes, ends)
    return figure


def thin(x: np.ndarray, y: np.ndarray, bins: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """At most 2·bins points that keep each bin's lowest and highest value, so that no spike is lost."""
    if len(x) <= 2 * bins:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(x)), bins):
        ordered = np.where(np.isfinite(y[part]), y[part], np.inf)
        keep += sorted({part[int(ordered.argmin())], part[int(np.where(np.isinf(ordered), -np.inf, ordered).argmax())]})
    return x[keep], y[keep]


def _fit_y(axes: Axes, values: Sequence[float]) -> None:
    """Limits from the means and the start: single spikes of the raw loss may leave the frame."""
    finite = [value for value in values if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - pad, high + pad)


def _mark_prunes(axes: Axes, x: np.ndarray) -> None:
    if len(x):
        top = axes.get_xaxis_transform()
        axes.vlines(x, 0, 1, transform=top, color=MUTED, linewidth=0.5, linestyle=(0, (1, 3)))
        axes.plot(x, np.ones(len(x)), transform=top, color=MUTED, marker="v", linestyle="", markersize=4, clip_on=False)
        axes.text(1, 1.04, "▾ prune", transform=axes.transAxes, color=MUTED, ha="right", fontsize=8)


def _widen(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Start the x axis at 0, end it at the last point, and label the lines there."""
    axes.set_xlim(0, axes.dataLim.x1 * 1.015 if axes.dataLim.x1 > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes.get_xlabel() == "steps", steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    label_ends(axes, ends)


def size_over_steps(run: RunData) -> Figure | None:
    """Megabytes stored over steps: the whole model, the tensorized layers, the part with active ranks."""
    if not run.sizes:
        return None
    figure = Figure(figsize=SMALL)
    axes = figure.add_subplot(title="Size over steps", xlabel="steps", ylabel="size, MB")
    mega = run.number_bytes / MEGA
    x = [size.step for size in run.sizes]
    last = run.sizes[-1]
    lines: list[tuple[str, list[float], str, Any]] = [("model", [size.total * mega for size in run.sizes], GREY, "-")]
    if last.ranks:
        lines.append(("tensorized", [size.tensorized * mega for size in run.sizes], TEAL, "-"))
        lines.append(("active", [size.active * mega for size in run.sizes], TEAL, (0, (1.2, 1.6))))
    for _, y, colour, dashes in lines:
        axes.plot(x, y, color=colour, linestyle=dashes, drawstyle="steps-post", marker="o" if len(x) == 1 else None)
    axes.set_ylim(0, max(max(y) for _, y, _, _ in lines) * 1.08 or 1.0)
    _mark_prunes(axes, np.array([prune.step for prune in run.prunes]))
    _widen(axes, [(y[-1], f"{name} {number(y[-1])}", colour) for name, y, colour, _ in lines])
    return figure


PLOTS = (
    Plot(
        "loss_steps",
        "Loss over steps",
        "Lower is better; the thin line is the loss of each logged step, the thick one its moving mean. Held-out data "
        "is never trained on: once it rises while the train loss falls, the model memorises.",
        loss_over_steps,
    ),
    Plot(
        "loss_time",
        "Loss over training time",
        "The same losses against the clock, evaluation and set-up left out: this is the axis on which to compare "
        "methods whose steps take different time.",
        loss_over_time,
    ),
    Plot(
        "size_steps",
        "Size over steps",
        "What the model stores. The dotted line counts only ranks above the threshold: where it runs below the line "
        "of the tensorized layers, the next prune cuts the difference.",
        size_over_steps,
    ),
    Plot(
        "ranks",
        "Ranks per layer",
        "One row a chain of cores, one column a bond, in it the steps from left to right: paler means that fewer of "
        "the bond's first ranks are still active, the number says how many at the end. Rows that fade early are the "
        "layers that need least capacity.",
        ranks_over_time,
    ),
    Plot(
        "objectives",
        "The two objectives",
        "Loss and size on their way, with the targets of the late stage dashed; shaded, the late stage. Where the size "
        "has reached S₀ the model trains on at that size.",
        objectives,
    ),
    Plot(
        "pareto",
        "Size and quality",
        "Each evaluation by the size that the model had; the large point is the last one. A good late stage goes left "
        "without going down.",
        pareto,
    ),
)


def compare_runs(runs: Mapping[str, RunData]) -> Figure:
    """Held-out loss over training time for every method; beside it, bars of the size and of the data seen."""
    figure = Figure(figsize=(8, 3))
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 3))
    losses, sizes, amounts = (figure.add_subplot(cell) for cell in (grid[:, 0], grid[0, 1], grid[1, 1]))
    others = cycle((BLUE, ORANGE, PURPLE, PINK))
    colours = {name: {"dense": GREY, "comera": TEAL}.get(name) or next(others) for name in runs}

    longest = max([point.time for run in runs.values() for point in run.evals], default=0.0)
    unit, seconds = time_unit(longest)
    losses.set(title="Held-out loss", xlabel=f"training time, {unit}")
    ends, shown = [], []
    for name, run in runs.items():
        y = [point.loss for point in run.evals]
        losses.plot([point.time / seconds for point in run.evals], y, color=colours[name], marker="o", markersize=3)
        ends += [(y[-1], f"{name} {number(y[-1])}", colours[name])] if y else []
        # the first tenth would squeeze what the curves are compared for, so they may enter from above
        shown += [point.loss for point in run.evals if point.time > longest / 10] or y
    _fit_y(losses, shown)
    _widen(losses, ends)

    megas = [run.summary.size_bytes / MEGA if run.summary else 0.0 for run in runs.values()]
    seen = [run.summary.tokens if run.summary else 0 for run in runs.values()]
    _bars(sizes, "Model size, MB", list(colours.items()), megas, [number(value) for value in megas])
    counted = next(iter(runs.values())).counted.capitalize()
    _bars(amounts, f"{counted} seen", list(colours.items()), seen, [count(value) for value in seen])
    return figure


def _bars(
    axes: Axes, title: str, colours: list[tuple[str, str]], values: Sequence[float], labels: Sequence[str]
) -> None:
    rows = range(len(values))
    axes.barh(rows, values, color=[colour for _, colour in colours], height=0.62)
    axes.set_title(title)
    axes.set_yticks(rows, [name for name, _ in colours])
    for row, value, label in zip(rows, values, labels, strict=True):
        axes.annotate(label, (value, row), (4, 0), textcoords="offset points", va="center", annotation_clip=False)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18 or 1.0)
    axes.set_xticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)
