"""The figures of a run: their order on the page, how to read each; here losses over steps and time, size over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from comera.report.curves import draw_losses, finish_x, mark_prunes
from comera.report.ranks import ranks_over_time
from comera.report.run import RunData
from comera.report.stages import objectives, trajectory
from comera.report.style import GREY, SMALL, TEAL
from comera.report.tables import MEGA, number, time_unit


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
    return _loss(run, "Loss over steps", *steps, [prune.step for prune in run.prunes], "steps")


def loss_over_time(run: RunData) -> Figure | None:
    """Train and held-out loss over seconds (minutes, hours) of training, prunes marked."""
    unit, seconds = time_unit(max((point.time for point in (*run.train, *run.evals)), default=0.0))
    train, evals, prunes = ([point.time / seconds for point in kind] for kind in (run.train, run.evals, run.prunes))
    return _loss(run, "Loss over training time", train, evals, prunes, f"training time, {unit}")


def _loss(
    run: RunData, title: str, train_x: Sequence[float], eval_x: Sequence[float], prune_x: Sequence[float], unit: str
) -> Figure | None:
    if not run.train and not run.evals:
        return None
    figure = Figure(figsize=SMALL)
    axes = figure.add_subplot(title=title, xlabel=unit, ylabel="loss")
    train, held_out = ([point.loss for point in kind] for kind in (run.train, run.evals))
    ends = draw_losses(axes, (train_x, train), (eval_x, held_out))
    mark_prunes(axes, np.array(prune_x))
    finish_x(axes, ends)
    return figure


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
    mark_prunes(axes, np.array([prune.step for prune in run.prunes]))
    finish_x(axes, [(y[-1], f"{name} {number(y[-1])}", colour) for name, y, colour, _ in lines])
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
        "objectives",
        "The two objectives",
        "Loss and size of the tensorized layers on their way. In the late stage, shaded, both have a target, dashed: "
        "the loss L₀, the size S₀. Once the size is there, the model trains on at that size.",
        objectives,
    ),
    Plot(
        "ranks",
        "Ranks over time",
        "A row for each chain of cores, a column for each bond; in it time runs from left to right, and the height is "
        "the rank that is active: pale what the bond began with, dark what is left. Left the first rank, where it has "
        "changed, right the last one. What shrinks early needs least capacity.",
        ranks_over_time,
    ),
    Plot(
        "size_steps",
        "Size over steps",
        "What the model stores. The dotted line counts only ranks above the threshold: where it runs below the line "
        "of the tensorized layers, the next prune cuts the difference.",
        size_over_steps,
    ),
    Plot(
        "trajectory",
        "Size and quality",
        "Each evaluation by the size that the model had, in the order of training; the large point is the last one. A "
        "good late stage goes left without getting worse.",
        trajectory,
    ),
)
