"""The charts of a run, and of a comparison of runs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from math import isfinite

import numpy as np

from comera.report.charts import Chart, Line, Mark, smooth
from comera.report.run import Point, RunData, TrainPoint
from comera.report.tables import MEGA, label, time_unit
from comera.trainer.energy import is_estimated, total

WATT_HOUR = 3600.0  # joules
_COLORS = {"dense": "grey", "comera": "teal"}
_OTHERS = ("blue", "orange", "purple", "pink")
_FEW = 20  # logged losses that need no moving mean
_SPREAD = 30  # between the largest and smallest gradient norm, from which on their axis is logarithmic


def charts_of(run: RunData) -> list[Chart]:
    """Every chart that the run has data for."""
    unit, seconds = time_unit(max((point.time for point in run.points), default=0.0))
    axes = {"steps": "steps", "time": f"training time, {unit}"}

    def line(name: str, color: str, points: Sequence[Point], y: Iterable[float], style: str = "line") -> Line:
        x = {"steps": [point.step for point in points], "time": [point.time / seconds for point in points]}
        return Line(name, color, x, list(y), style)  # type: ignore[arg-type]

    def mark(name: str, point: Point) -> Mark:
        return Mark(name, {"steps": point.step, "time": point.time / seconds})

    prunes = [mark("" if k else "prune", point) for k, point in enumerate(run.prunes)]
    stages = [mark("late stage", point) for point in run.stages]
    charts = [
        *_losses(run, axes, line, [*prunes, *stages]),
        *_metrics(run, axes, line),
        *_sizes(run, axes, line, [*prunes, *stages]),
        *_quality(run),
        *_optimizer(run, axes, line),
        *_cost(run, axes, line),
    ]
    return [chart for chart in charts if any(isfinite(y) for line in chart.lines for y in line.y)]


_MakeLine = Callable[..., Line]


def _losses(run: RunData, axes: Mapping[str, str], line: _MakeLine, marks: Sequence[Mark]) -> list[Chart]:
    losses = [point.loss for point in run.train]
    few = len(losses) < _FEW
    lines = [] if few else [line("train, each step logged", "blue", run.train, losses, "thin")]
    lines.append(line("train" if few else "train, moving mean", "blue", run.train, smooth(np.array(losses))))
    if run.evals:
        lines.append(line("held-out", "orange", run.evals, [point.loss for point in run.evals], "marked"))
    levels = {"L₀, loss to keep": run.stages[-1].target_loss} if run.stages else {}
    caption = (
        "Lower is better. The model never trains on held-out data: a held-out loss that rises while the train loss "
        "falls means overfitting. Over training time, methods compare whose steps take different times."
    )
    return [Chart("Loss", caption, axes, lines, {**levels, **run.references.get("loss", {})}, marks)] if losses else []


def _metrics(run: RunData, axes: Mapping[str, str], line: _MakeLine) -> list[Chart]:
    charts = []
    for name in dict.fromkeys(name for point in run.evals for name in point.metrics):
        points = [point for point in run.evals if name in point.metrics]
        lines = [line(run.method, "teal", points, [point.metrics[name] for point in points], "marked")]
        levels = run.references.get(name, {})
        caption = "On held-out data. " + ("Dashed: what simple models reach on the same data." if levels else "")
        charts.append(Chart(f"Held-out {label(name)}", caption, axes, lines, levels))
    return charts


def _sizes(run: RunData, axes: Mapping[str, str], line: _MakeLine, marks: Sequence[Mark]) -> list[Chart]:
    mega = run.element_bytes / MEGA
    lines = [line("model", "grey", run.sizes, [size.total * mega for size in run.sizes], "steps")]
    caption = "What the model stores."
    if run.sizes and run.sizes[-1].ranks:
        lines.append(line("compressed layers", "teal", run.sizes, [s.tensorized * mega for s in run.sizes], "steps"))
        sized = [point for point in run.train if point.size]
        finer = (sized, [point.size * mega for point in sized]) if sized else None
        points, unpruned = finer or (run.sizes, [size.active * mega for size in run.sizes])
        lines.append(line("of them unpruned", "teal", points, unpruned, "dotted"))
        caption += " Pruning removes the difference between compressed layers and their unpruned ranks."
    levels = {"S₀, size to reach": run.stages[-1].target_size * mega} if run.stages else {}
    return [Chart("Size, MB", caption, axes, lines, levels, marks, zero=True)] if run.sizes else []


def _quality(run: RunData) -> list[Chart]:
    """Quality at each evaluation against the model's size at that step, for a run whose size changes."""
    sizes = {size.step: size.total * run.element_bytes / MEGA for size in run.sizes}
    points = [point for point in run.evals if point.step in sizes]
    if len({sizes[point.step] for point in points}) < 2:
        return []
    name = run.judged_by
    x = {"size": [sizes[point.step] for point in points]}
    line = Line(label(name), "teal", x, [point.value(name) for point in points], "marked")
    caption = "At each evaluation. A good late stage moves left without getting worse."
    return [Chart(f"Size and held-out {label(name)}", caption, {"size": "model, MB"}, [line])]


def _optimizer(run: RunData, axes: Mapping[str, str], line: _MakeLine) -> list[Chart]:
    groups = list(dict.fromkeys(name for point in run.train for name in point.lr))
    colors = cycle(("blue", "orange", "teal", "purple", "pink", "grey"))
    rates = [
        line(name, next(colors), run.train, [point.lr.get(name, np.nan) for point in run.train]) for name in groups
    ]
    norms = [point.grad_norm for point in run.train]
    found = [norm for norm in norms if isfinite(norm) and norm > 0]
    log = "y" if found and len(found) == len(norms) and max(found) > _SPREAD * min(found) else ""
    limit = run.config.get("train", {}).get("max_grad_norm") if isinstance(run.config.get("train"), dict) else None
    levels = {"clipped above": float(limit)} if isinstance(limit, int | float) and limit else {}
    return [
        Chart("Learning rates", "Of each group of parameters: cores, gates and dense weights differ.", axes, rates),
        Chart(
            "Gradient norm",
            "Before clipping. Spikes that the loss follows call for a lower rate or a longer warm-up.",
            axes,
            [line("gradient norm", "blue", run.train, norms)],
            levels,
            log=log,
        ),
    ]


def _cost(run: RunData, axes: Mapping[str, str], line: _MakeLine) -> list[Chart]:
    def drawn(name: str, color: str, y: Callable[[TrainPoint], float]) -> list[Line]:
        return [line(name, color, run.train, map(y, run.train))]

    caption = "Mean over the steps since the last record."
    charts = [
        Chart("Time of a step, ms", caption, axes, drawn("step", "blue", lambda point: point.step_time * 1e3)),
        Chart(
            "Peak memory, MB",
            "Since the last record, with all that the process holds; without evaluation and saving.",
            axes,
            drawn("peak", "blue", lambda point: point.peak_memory / MEGA or np.nan),
        ),
    ]
    if any(point.energy for point in run.train):
        estimated = any(is_estimated(point.energy) for point in run.train)
        lines = drawn("energy", "blue", lambda point: (total(point.energy) or 0.0) / WATT_HOUR)
        caption = "Of training, without evaluation and saving. The section on energy says where it comes from."
        charts.append(Chart(f"Energy{', estimated' if estimated else ''}, Wh", caption, axes, lines))
    return charts


def charts_of_runs(runs: Mapping[str, RunData]) -> list[Chart]:
    """Held-out loss and metrics of all runs over time, tokens and energy, and their last values over size."""
    unit, seconds = time_unit(max((point.time for run in runs.values() for point in run.evals), default=0.0))
    counted = next(iter(runs.values())).unit if runs else "tokens"
    axes = {"time": f"training time, {unit}", "tokens": f"{counted} seen"}
    powered = [point.energy for run in runs.values() for point in run.evals]
    if powered and all(powered):
        axes["energy"] = f"energy{', estimated' if any(map(is_estimated, powered)) else ''}, Wh"
    colors = colors_of(runs)
    names = ["loss", *dict.fromkeys(name for run in runs.values() for point in run.evals for name in point.metrics)]
    references = {metric: values for run in runs.values() for metric, values in run.references.items()}
    charts, last = [], []
    for name in names:
        lines = []
        for each, run in runs.items():
            points = [point for point in run.evals if isfinite(point.value(name))]
            x: dict[str, Sequence[float]] = {"time": [point.time / seconds for point in points]}
            x["tokens"] = [point.tokens for point in points]
            if "energy" in axes:
                x["energy"] = [(total(point.energy) or 0.0) / WATT_HOUR for point in points]
            y = [point.value(name) for point in points]
            lines += [Line(each, colors[each], x, y, "marked")] if points else []
            if points and run.summary and name == run.judged_by:
                last.append((each, run.summary.size_bytes / MEGA, y[-1]))
        levels = references.get(name, {})
        caption = "" if name != "loss" else "Lower and further left is better. A late stage counts from its own start."
        caption += " Dashed: what simple models reach on the same data." if levels else ""
        charts += [Chart(f"Held-out {label(name)}", caption, axes, lines, levels)] if lines else []
    if len({size for _, size, _ in last}) > 1:
        title = f"Size and held-out {label(next(iter(runs.values())).judged_by)}"
        dots = [Line(each, colors[each], {"size": [size]}, [y], "dots") for each, size, y in last]
        charts.append(Chart(title, "At the end. Further left is smaller.", {"size": "model, MB"}, dots, log="x"))
    return charts


def colors_of(runs: Iterable[str]) -> dict[str, str]:
    """A color of the page for each run, by its name."""
    others = cycle(_OTHERS)
    return {name: _COLORS.get(name) or next(others) for name in runs}
