"""The figures of a comparison as PNG, for compare.md: a page draws its own (curves.py)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comera.report.run import RunData
from comera.report.style import METHOD_COLORS, MUTED, OTHERS, Plots, label_ends, size_axes
from comera.report.tables import MEGA, count, label, number, time_unit

_SMALL = (4.8, 3.1)  # inches: half a page wide, or a phone


def metrics_of_runs(runs: Mapping[str, RunData]) -> Figure | None:
    """The held-out metric of every run over training time. Dashed lines: what simple models reach on the same held-out
    data.
    """
    references = {metric: values for run in runs.values() for metric, values in run.references.items()}
    metric = next(iter(references), "")
    curves = {
        name: [(point.time, point.metrics[metric]) for point in run.evals if metric in point.metrics]
        for name, run in runs.items()
    }
    if not any(curves.values()):
        return None
    unit, seconds = time_unit(max(time for points in curves.values() for time, _ in points))
    title = f"Held-out {label(metric)}"
    figure = Figure(figsize=_SMALL if len(runs) == 1 else (8, 3))
    axes = figure.add_subplot(title=title, xlabel=f"training time, {unit}", ylabel=label(metric))
    ends = [(value, f"{name} {number(value)}", MUTED) for name, value in references[metric].items()]
    for value, _, color in ends:
        axes.axhline(value, color=color, linewidth=0.9, linestyle=(0, (4, 3)))
    for (name, points), color in zip(curves.items(), colors_of(runs).values(), strict=True):
        axes.plot([time / seconds for time, _ in points], [y for _, y in points], color=color, marker="o", markersize=3)
        ends += [(points[-1][1], f"{name} {number(points[-1][1])}", color)] if points else []
    _widen(axes, ends)
    return figure


def colors_of(runs: Iterable[str]) -> dict[str, str]:
    """A color for each run, by its name."""
    others = cycle(OTHERS)
    return {name: METHOD_COLORS.get(name) or next(others) for name in runs}


def _fit_y(axes: Axes, values: Sequence[float]) -> None:
    """Limits from the means and the start; single spikes of the raw loss may leave the frame."""
    finite = [value for value in values if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - pad, high + pad)


def _widen(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """End the x axis, which starts at 0, at the last point, and label the lines there."""
    axes.set_xlim(0, axes.dataLim.x1 * 1.015 if axes.dataLim.x1 > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes.get_xlabel() == "steps", steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    label_ends(axes, ends)


def compare_runs(runs: Mapping[str, RunData]) -> Figure:
    """Left: held-out loss against training time; lower and further left is better. A late stage counts from its own
    start. Right: the size of the trained model, and how much data each method has seen in that time.
    """
    figure = Figure(figsize=(8, 3))
    grid = figure.add_gridspec(2, 2, width_ratios=(5, 3))
    losses, sizes, amounts = (figure.add_subplot(cell) for cell in (grid[:, 0], grid[0, 1], grid[1, 1]))
    colors = colors_of(runs)
    longest = max([point.time for run in runs.values() for point in run.evals], default=0.0)
    unit, seconds = time_unit(longest)
    losses.set(title="Held-out loss", xlabel=f"training time, {unit}")
    ends, shown = [], []
    for name, run in runs.items():
        y = [point.loss for point in run.evals]
        losses.plot([point.time / seconds for point in run.evals], y, color=colors[name], marker="o", markersize=3)
        ends += [(y[-1], f"{name} {number(y[-1])}", colors[name])] if y else []
        # fitting the first tenth would flatten the part worth comparing, so curves may enter from above
        shown += [point.loss for point in run.evals if point.time > longest / 10] or y
    _fit_y(losses, shown)
    _widen(losses, ends)

    megas = [run.summary.size_bytes / MEGA if run.summary else 0.0 for run in runs.values()]
    seen = [run.summary.tokens if run.summary else 0 for run in runs.values()]
    _bars(sizes, "Model size, MB", colors, megas, number)
    _bars(amounts, f"{next(iter(runs.values())).unit.capitalize()} seen", colors, seen, count)
    return figure


def pareto_of_runs(runs: Mapping[str, RunData]) -> Figure | None:
    """Model size against held-out quality, one point per run. Left is better: smaller. So is up for a share of correct
    answers, and down for a loss or nats per byte.
    """
    summaries = {run: data.summary for run, data in runs.items() if data.summary}
    name = next((name for summary in summaries.values() for name in summary.metrics), "")
    points = {run: (s.size_bytes / MEGA, s.metrics[name]) for run, s in summaries.items() if name in s.metrics}
    if len({size for size, _ in points.values()}) < 2:
        return None
    figure = Figure(figsize=(8, 3))
    axes = size_axes(figure, title=f"Size and {label(name)}", xlabel="model size, MB", ylabel=label(name))
    colors = colors_of(runs)
    for run, (size, value) in points.items():
        axes.plot(size, value, marker="o", color=colors[run], linestyle="")
    axes.margins(x=0.15, y=0.25)
    label_ends(axes, [(value, run, colors[run]) for run, (_, value) in points.items()])
    return figure


def _bars(
    axes: Axes, title: str, colors: Mapping[str, str], values: Sequence[float], shown: Callable[[float], str]
) -> None:
    bars = axes.barh(range(len(values)), values, color=list(colors.values()), height=0.62)
    axes.bar_label(bars, [shown(value) for value in values], padding=4)
    axes.set_title(title)
    axes.set_yticks(range(len(values)), list(colors))
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18 or 1.0)
    axes.set_xticks([])
    axes.grid(False)
    axes.spines[:].set_visible(False)


PLOTS_OF_RUNS: Plots[Mapping[str, RunData]] = {
    "compare": compare_runs,
    "metric": metrics_of_runs,
    "pareto": pareto_of_runs,
}
