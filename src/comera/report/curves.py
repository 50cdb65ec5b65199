"""Curves over steps, time or epochs: smoothing, thinning, limits, marks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from comera.report.style import BLUE, MUTED, ORANGE, label_ends
from comera.report.tables import number


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred moving mean over about a thirtieth of the values, cut at both ends; NaNs are passed over.

    Of few values, from 20 on, it takes a tenth but seven at most: what is logged are losses of single batches.
    """
    count = len(values)
    reach = max(count // 60, min(3, count // 20))
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    weights = np.concatenate([[0], np.cumsum(finite)])
    at = np.arange(count)
    low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, count)
    weight = weights[high] - weights[low]
    return np.where(weight > 0, (sums[high] - sums[low]) / np.maximum(weight, 1), np.nan)


def thin(x: np.ndarray, y: np.ndarray, bins: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """At most 2·bins points that keep each bin's lowest and highest value, so that no spike is lost."""
    if len(x) <= 2 * bins:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(x)), bins):
        ordered = np.where(np.isfinite(y[part]), y[part], np.inf)
        keep += sorted({part[int(ordered.argmin())], part[int(np.where(np.isinf(ordered), -np.inf, ordered).argmax())]})
    return x[keep], y[keep]


def draw_losses(
    axes: Axes, train: tuple[Sequence[float], Sequence[float]], held_out: tuple[Sequence[float], Sequence[float]]
) -> list[tuple[float, str, str]]:
    """Draw (x, loss) of logged steps, raw and smoothed, and of evaluations; returns labels of their ends.

    The y axis takes the means and the start: single spikes of the raw loss may leave the frame.
    """
    ends = []
    shown: list[float] = []
    if len(train[0]):
        x, raw = map(np.asarray, train)
        mean = smooth(raw)
        few = len(raw) < 20
        if not few:
            axes.plot(*thin(x, raw), color=BLUE, alpha=0.28, linewidth=0.7)
        axes.plot(*thin(x, mean), color=BLUE, marker="o" if few else None, markersize=3)
        ends.append((float(mean[-1]), f"train {number(mean[-1])}", BLUE))
        shown += [*mean, *raw[: len(raw) // 50 + 1]]
    if len(held_out[0]):
        x, losses = map(np.asarray, held_out)
        axes.plot(x, losses, color=ORANGE, marker="o", markersize=3.2 if len(losses) < 40 else 0)
        ends.append((float(losses[-1]), f"held-out {number(losses[-1])}", ORANGE))
        shown += list(losses)
    fit_y(axes, shown)
    return ends


def fit_y(axes: Axes, values: Sequence[float]) -> None:
    """Limits that hold all finite values, with a margin."""
    finite = [value for value in values if np.isfinite(value)]
    if finite:
        low, high = min(finite), max(finite)
        pad = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - pad, high + pad)


def mark_prunes(axes: Axes, x: np.ndarray, *, named: bool = True) -> None:
    """Dotted lines where the model was cut, with a mark on top of each unless not `named`."""
    if not len(x):
        return
    top = axes.get_xaxis_transform()
    axes.vlines(x, 0, 1, transform=top, color=MUTED, linewidth=0.5, linestyle=(0, (1, 3)))
    if named:
        axes.plot(x, np.ones(len(x)), transform=top, color=MUTED, marker="v", linestyle="", markersize=4, clip_on=False)
        axes.text(1, 1.04, "▾ prune", transform=axes.transAxes, color=MUTED, ha="right", fontsize=8)


def finish_x(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Start the x axis at 0, end it at the last point, and label the lines there."""
    axes.set_xlim(0, axes.dataLim.x1 * 1.015 if axes.dataLim.x1 > 0 else 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes.get_xlabel() == "steps", steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,g}")
    label_ends(axes, ends)
