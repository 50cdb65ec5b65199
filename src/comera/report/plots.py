"""The figures of one run (loss over steps and time, size over steps, ranks per layer), and of a comparison."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comera.report.adaptation import objectives, pareto, ranks_over_time, smooth
from comera.report.run import Point, RunData
from comera.report.style import BLUE, GREY, METHOD_COLORS, MUTED, ORANGE, OTHERS, TEAL, Plots, label_ends, size_axes
from comera.report.tables import MEGA, count, label, number, time_unit

_SMALL = (4.8, 3.1)  # inches: half a page wide, or a phone


def loss_over_steps(run: RunData) -> Figure | None:
    """Lower is better. Thin line: loss of each logged step; thick line: its moving mean. The model never trains on
    held-out data: a held-out loss that rises while the train loss falls means overfitting.
    """
    return _loss(run, "Loss over steps", "steps", lambda point: point.step)


def loss_over_time(run: RunData) -> Figure | None:
    """The same losses over training time, without setup and evaluation. Use this axis to compare methods whose steps
    take different times.
    """
    unit, seconds = time_unit(max([point.time for point in (*run.train, *run.evals)], default=0.0))
    return _loss(run, "Loss over training time", f"training time, {unit}", lambda point: point.time / seconds)


def _loss(run: RunData, title: str, unit: str, at: Callable[[Point], float]) -> Figure | None:
    """Train and held-out loss, with prunings marked. at: where a point stands on the x axis."""
    if not run.train and not run.evals:
        return None
    figure = Figure(figsize=_SMALL)
    axes = figure.add_subplot(title=title, xlabel=unit, ylabel="loss")
    ends = []
    shown: list[float] = []
    if run.train:
        x, raw = np.array([*map(at, run.train)]), np.array([point.loss for point in run.train])
        mean = smooth(raw)
        few = len(raw) < 20
        if not few:
            axes.plot(*thin(x, raw), color=BLUE, alpha=0.28, linewidth=0.7)
        axes.plot(*thin(x, mean), color=BLUE, marker="o" if few else None, markersize=3)
        ends.append((mean[-1], f"train {number(mean[-1])}", BLUE))
        shown += list(mean) + list(raw[: len(raw) // 50 + 1])
    if run.evals:
        x, held = np.array([*map(at, run.evals)]), np.array([point.loss for point in run.evals])
        axes.plot(x, held, color=ORANGE, marker="o", markersize=3.2 if len(held) < 40 else 0)
        ends.append((held[-1], f"held-out {number(held[-1])}", ORANGE))
        shown += list(held)
    _fit_y(axes, shown)
    _mark_prunes(axes, np.array([*map(at, run.prunes)]))
    _widen(axes, ends)
    return figure


def metric_over_time(run: RunData) -> Figure | None:
    """The held-out metric over training time. Dashed lines: what simple models reach on the same held-out data."""
    return metrics_of_runs({run.method: run})


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


def thin(x: np.ndarray, y: np.ndarray, bins: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """At most 2·bins points: the lowest and highest of each bin, so no spike is lost."""
    if len(x) <= 2 * bins:
        return x, y
    keep = []
    for chunk in np.array_split(np.arange(len(x)), bins):
        ordered = np.where(np.isfinite(y[chunk]), y[chunk], np.inf)
        highest = np.where(np.isinf(ordered), -np.inf, ordered)
        keep += sorted({chunk[int(ordered.argmin())], chunk[int(highest.argmax())]})
    return x[keep], y[keep]


def _fit_y(axes: Axes, values: Sequence[float]) -> None:
    """Limits from the means and the start; single spikes of the raw loss may leave the frame."""
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
    """End the x axis, which starts at 0, at the last point, and label the lines there."""
    axes.set_xlim(0, axes.dataLim.x1 * 1.015 if axes.dataLim.x1 > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes.get_xlabel() == "steps", steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    label_ends(axes, ends)


def size_over_steps(run: RunData) -> Figure | None:
    """What the model stores. The dotted line counts only ranks above the pruning threshold: the next pruning removes
    the difference between it and the tensorized layers.
    """
    if not run.sizes:
        return None
    figure = Figure(figsize=_SMALL)
    axes = figure.add_subplot(title="Size over steps", xlabel="steps", ylabel="size, MB")
    mega = run.element_bytes / MEGA
    x = [size.step for size in run.sizes]
    last = run.sizes[-1]
    lines: list[tuple[str, list[float], str, Any]] = [("model", [size.total * mega for size in run.sizes], GREY, "-")]
    if last.ranks:
        lines.append(("tensorized", [size.tensorized * mega for size in run.sizes], TEAL, "-"))
        lines.append(("unpruned", [size.active * mega for size in run.sizes], TEAL, (0, (1.2, 1.6))))
    for _, y, color, dashes in lines:
        axes.plot(x, y, color=color, linestyle=dashes, drawstyle="steps-post", marker="o" if len(x) == 1 else None)
    axes.set_ylim(0, max(max(y) for _, y, _, _ in lines) * 1.08 or 1.0)
    _mark_prunes(axes, np.array([prune.step for prune in run.prunes]))
    _widen(axes, [(y[-1], f"{name} {number(y[-1])}", color) for name, y, color, _ in lines])
    return figure


PLOTS: Plots[RunData] = {
    "loss_steps": ("Loss over steps", loss_over_steps),
    "loss_time": ("Loss over training time", loss_over_time),
    "metric_time": ("Held-out metric over training time", metric_over_time),
    "size_steps": ("Size over steps", size_over_steps),
    "ranks": ("Ranks per layer", ranks_over_time),
    "objectives": ("The two objectives", objectives),
    "pareto": ("Size and quality", pareto),
}


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
    points = {
        run: (s.size_bytes / MEGA, s.metrics[name], s.method) for run, s in summaries.items() if name in s.metrics
    }
    if len({size for size, _, _ in points.values()}) < 2:
        return None
    figure = Figure(figsize=(8, 3))
    axes = size_axes(figure, title=f"Size and {label(name)}", xlabel="model size, MB", ylabel=label(name))
    for run, (size, value, method) in points.items():
        axes.plot(size, value, marker="o", color=METHOD_COLORS.get(method, ORANGE), linestyle="")
        axes.annotate(run, (size, value), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(x=0.15, y=0.25)
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
    "compare": ("Held-out loss over time, size, data seen", compare_runs),
    "metric": ("Held-out metric over time", metrics_of_runs),
    "pareto": ("Size and held-out quality of every run", pareto_of_runs),
}
