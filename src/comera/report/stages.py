"""The figures of rank adaptation: the two objectives on their way to the targets, and what each size has reached."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comera.report.curves import draw_losses, finish_x, mark_prunes
from comera.report.run import RunData
from comera.report.style import INK, MUTED, SMALL, TEAL, log_megabytes
from comera.report.tables import MEGA, number, quality

DASHES = (0, (4, 3))


def objectives(run: RunData) -> Figure | None:
    """Loss above and size below over the same steps, with the switch to the late stage, its targets, and every cut.

    None for a dense run, and for one whose steps tell no size.
    """
    points = [(point.step, point.size) for point in run.train if point.size]
    if not points:
        return None
    figure = Figure(figsize=(SMALL[0], 4.4))
    above, below = figure.subplots(2, 1, sharex=True)
    mega = run.number_bytes / MEGA
    # rounding comes after the last logged step, at the same step
    points += [(point.step, point.size) for point in run.stages] + [(point.step, point.after) for point in run.rounds]
    steps, sizes = (np.array(values) for values in zip(*sorted(points, key=lambda at: at[0]), strict=True))
    megas = sizes * mega
    train, evals = ([(point.step, point.loss) for point in kind] for kind in (run.train, run.evals))
    ends = draw_losses(above, *(tuple(zip(*at, strict=True)) if at else ((), ()) for at in (train, evals)))
    below.plot(steps, megas, color=TEAL, drawstyle="steps-post", marker="o" if len(steps) == 1 else None)
    above.set(title="The two objectives", ylabel="loss")
    below.set(ylim=(0, max(megas) * 1.12), xlabel="steps", ylabel="tensorized, MB")
    for stage in run.stages:
        _target(above, stage.target_loss, "L₀")
        _target(below, stage.target_size * mega, "S₀")
        for axes in (above, below):
            axes.axvspan(stage.step, steps[-1], color=TEAL, alpha=0.07, linewidth=0)
            axes.axvline(stage.step, color=TEAL, linewidth=0.9)
        late = stage.step > 0.7 * steps[-1]  # no room to the right of the line
        above.annotate(
            "late stage",
            (stage.step, 0.96),
            (-4 if late else 4, 0),
            above.get_xaxis_transform(),
            "offset points",
            color=INK,
            fontsize=8,
            ha="right" if late else "left",
            va="top",
        )
    for point in run.rounds:
        at = (point.step, point.after * mega)
        below.plot(*at, color=TEAL, marker="D", markersize=5, clip_on=False, zorder=3)
        below.annotate("rounded", at, (-6, 7), textcoords="offset points", color=TEAL, fontsize=8, ha="right")
    prunes = np.array([prune.step for prune in run.prunes])
    for axes in (above, below):
        mark_prunes(axes, prunes, named=axes is above)
    finish_x(below, [(float(megas[-1]), f"{number(megas[-1])} MB", TEAL)])
    finish_x(above, ends)
    return figure


def _target(axes: Axes, value: float, name: str) -> None:
    if np.isfinite(value):
        low, high = axes.get_ylim()
        pad = 0.06 * (high - low)
        axes.set_ylim(min(low, value - pad), max(high, value + pad))
        axes.axhline(value, color=MUTED, linestyle=DASHES, linewidth=0.9)
        axes.text(0.01, value, name, transform=axes.get_yaxis_transform(), color=MUTED, fontsize=8, va="bottom")


def trajectory(run: RunData) -> Figure | None:
    """What each evaluation reached against the size that the model had then; None where the size never changed."""
    sizes = {size.step: size.total * run.number_bytes / MEGA for size in run.sizes}
    points = [(sizes[point.step], point) for point in run.evals if point.step in sizes]
    if len({size for size, _ in points}) < 2:
        return None
    name = next((name for _, point in points for name in point.metrics), None)
    values = [point.loss if name is None else point.metrics.get(name, np.nan) for _, point in points]
    figure = Figure(figsize=SMALL)
    axes = figure.add_subplot(title="Size and quality", xlabel="model, MB", ylabel=name or "held-out loss")
    x = [size for size, _ in points]
    axes.plot(x, values, color=TEAL, alpha=0.5, marker="o", markersize=3)
    axes.plot(x[-1], values[-1], color=TEAL, marker="o", markersize=7)
    label = f"{number(x[-1])} MB, {quality(name, values[-1])}"
    axes.annotate(label, (x[-1], values[-1]), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(x=0.2, y=0.2)
    log_megabytes(axes)
    return figure
