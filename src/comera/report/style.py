"""The look of figures: one palette, thin axes, direct labels; saved as PNG."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comera.files import replace_file

T = TypeVar("T")
# By file name: the function that draws the figure, or returns None if there is nothing to show. Its docstring is the
# caption, which says how to read the figure.
Plots: TypeAlias = Mapping[str, Callable[[T], Figure | None]]

INK, MUTED, GRID, PAPER = "#1d2330", "#69707d", "#e1e4ea", "#ffffff"
BLUE, ORANGE, TEAL, PURPLE, PINK, GREY = "#2f6fbb", "#c8590b", "#0e857a", "#7b4fc4", "#b8336a", "#7a828f"
METHOD_COLORS = {"dense": GREY, "comera": TEAL}
OTHERS = (BLUE, ORANGE, PURPLE, PINK)  # colors of runs that are not named after these methods
_RC: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.formatter.limits": (-4, 6),
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 9,
    "axes.linewidth": 0.6,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.major.width": 0.6,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}


@contextmanager
def styled() -> Iterator[None]:
    """Our style while figures are drawn and saved; restores matplotlib's settings afterwards."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]], *, gap: float = 0.075) -> None:
    """Label line ends, given as (y, text, color), at the right edge, at least `gap` of the axes' height apart."""
    low, high = axes.get_ylim()
    heights: list[float] = []
    ends = sorted((end for end in ends if isfinite(end[0])), key=lambda end: end[0])
    for y, _, _ in ends:
        height = (min(max(y, low), high) - low) / (high - low)
        heights.append(max(height, heights[-1] + gap) if heights else height)
    over = max(0.0, *heights, 1.0) - 1.0
    for height, (_, text, color) in zip(heights, ends, strict=True):
        at, beside = (1.0, height - over), (6.0, 0.0)
        axes.annotate(text, at, beside, "axes fraction", "offset points", va="center", color=color)


def size_axes(figure: Figure, **settings: str) -> Axes:
    """Axes with plain numbers on a logarithmic x axis of sizes."""
    axes = figure.add_subplot(xscale="log", **settings)
    for set_formatter in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        set_formatter(lambda x, _: f"{x:.3g}")
    axes.tick_params(axis="x", which="minor", labelsize=7)
    return axes


def write_figures(plots: Plots[T], data: T, folder: Path) -> dict[str, str]:
    """Write `folder`/NAME.png of each figure that has something to show; returns its caption by name."""
    captions = {}
    with styled():
        for name, draw in plots.items():
            if figure := draw(data):
                replace_file(folder / f"{name}.png", png(figure))
                captions[name] = " ".join(str(draw.__doc__).split())
    return captions


def png(figure: Figure) -> bytes:
    """The figure as PNG on white."""
    out = BytesIO()
    figure.savefig(out, format="png", dpi=200)
    return out.getvalue()
