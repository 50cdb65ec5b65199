"""The look of figures: one palette, thin axes, direct labels; saved as PNG, and as SVG in the colors of the page."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comera.files import replace_file

T = TypeVar("T")
# By file name: the title, and the function that draws the figure, or returns None if there is nothing to show. Its
# docstring is the caption, which says how to read the figure.
Plots: TypeAlias = Mapping[str, tuple[str, Callable[[T], Figure | None]]]

INK, MUTED, GRID, PAPER = "#1d2330", "#69707d", "#e1e4ea", "#ffffff"
BLUE, ORANGE, TEAL, PURPLE, PINK, GREY = "#2f6fbb", "#c8590b", "#0e857a", "#7b4fc4", "#b8336a", "#7a828f"
METHOD_COLORS = {"dense": GREY, "comera": TEAL}
OTHERS = (BLUE, ORANGE, PURPLE, PINK)  # colors of runs that are not named after these methods
# SVGs inside a page use its variables for these colors, so one figure serves light, dark and print
_COLORS = (INK, MUTED, GRID, BLUE, ORANGE, TEAL, PURPLE, PINK, GREY)
_VARIABLES = ("ink", "muted", "grid", "blue", "orange", "teal", "purple", "pink", "grey")
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
    "svg.fonttype": "none",
    "svg.hashsalt": "comera",
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


def write_figures(plots: Plots[T], data: T, folder: Path) -> dict[str, tuple[str, str]]:
    """Write `folder`/NAME.png of each figure that has something to show; returns its HTML and its caption by name.

    A wide figure scrolls on a phone.
    """
    written = {}
    with styled():
        for name, (title, draw) in plots.items():
            if figure := draw(data):
                png, svg = png_and_svg(figure, name, title)
                replace_file(folder / f"{name}.png", png)
                caption = " ".join(str(draw.__doc__).split())
                kind = ' class="wide"' if figure.get_figwidth() > 6 else ""
                body = f'<div class="scroll">{svg}</div><figcaption>{escape(caption)}</figcaption>'
                written[name] = f"<figure{kind}>{body}</figure>\n", caption
    return written


def png_and_svg(figure: Figure, name: str, label: str) -> tuple[bytes, str]:
    """The figure as PNG on white, and as an SVG element for a page.

    The SVG's colors are CSS variables, its text is text in `--sans`, its ids start with `name`.
    label: what a screen reader says.
    """
    png, out = BytesIO(), StringIO()
    figure.savefig(png, format="png", dpi=200)
    figure.set_layout_engine("none")  # keep the PNG's layout: measuring all texts again takes most of the time
    figure.savefig(out, format="svg", facecolor="none")
    return png.getvalue(), _for_page(out.getvalue(), name, label)


def _for_page(svg: str, name: str, label: str) -> str:
    svg = svg[svg.index("<svg") :]
    # its style sheet would apply to the whole page, which has the same rules for its figures
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg)
    svg = re.sub(r'(<image[^>]*?) id="[^"]*"', r"\1", svg)  # a hash of the content: equal pictures would share it
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#|url\(#', lambda found: f"{found[0]}{name}-", svg)
    svg = svg.replace("'DejaVu Sans'", "var(--sans)")
    for color, variable in zip(_COLORS, _VARIABLES, strict=True):
        svg = svg.replace(color, f"var(--{variable})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
