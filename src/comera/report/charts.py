"""Charts of a page, drawn in the browser by uPlot: values under the pointer, zoom, light and dark.

A chart is a figure with its data as JSON inside; charts.js draws it. `scripts` is what a page with charts needs
besides: uPlot's code (vendor/, MIT license) and charts.js, inlined, so that the page stays one file that loads nothing.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from typing import Literal

import numpy as np

_MOST = 600  # points of a line: more do not show


@dataclass(frozen=True)
class Line:
    """A line or, as "dots", single points. color: a variable of the page. x: values by axis.

    y: as many; NaNs are gaps.
    """

    name: str
    color: str
    x: Mapping[str, Sequence[float]]
    y: Sequence[float]
    style: Literal["line", "thin", "marked", "steps", "dotted", "dots"] = "line"


@dataclass(frozen=True)
class Mark:
    """A moment: a vertical line. x: by axis."""

    name: str
    x: Mapping[str, float]


@dataclass(frozen=True)
class Chart:
    """A figure of lines over one of several x axes, of which the reader chooses.

    caption: how to read it. axes: labels by axis, the first one shown. levels: horizontal lines by name. log: "x", "y"
    or "xy" for logarithmic axes; zero: y begins there.
    """

    title: str
    caption: str
    axes: Mapping[str, str]
    lines: Sequence[Line]
    levels: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    log: str = ""
    zero: bool = False

    def html(self) -> str:
        """A figure element. Its data holds no "<", so that no text of a user can end the script element."""
        data = {"title": self.title, "axes": self.axes, "levels": self.levels, "log": self.log, "zero": self.zero}
        data |= {"lines": [_thinned(line) for line in self.lines], "marks": [asdict(mark) for mark in self.marks]}
        text = json.dumps(_finite(data), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
        return (
            f'<figure><h3>{escape(self.title)}</h3><div class="chart" role="img" aria-label="{escape(self.title)}">'
            f'<script type="application/json">{text}</script></div>'
            f"<figcaption>{escape(self.caption)}</figcaption></figure>"
        )


def plots(charts: Sequence[Chart]) -> str:
    """The charts in a grid, under the choice of their x axis where they have one. "" without charts."""
    if not charts:
        return ""
    axes = {name: label for chart in charts if len(chart.axes) > 1 for name, label in chart.axes.items()}
    buttons = "".join(
        f'<label><input type="radio" name="axis" value="{escape(name)}"{" checked" * (k == 0)}> {escape(label)}</label>'
        for k, (name, label) in enumerate(axes.items())
    )
    choice = f'<fieldset class="axis"><legend>over</legend>{buttons}</fieldset>' if buttons else ""
    hint = '<p class="muted">Point at a chart for its values; drag to zoom, double-click to see all of it again.</p>'
    without = "<noscript><p>The charts need JavaScript; their data is in metrics.jsonl.</p></noscript>"
    return f'{choice}{hint}{without}<div class="plots">{"".join(chart.html() for chart in charts)}</div>'


def scripts() -> str:
    """Style and scripts for the end of a page with charts."""
    vendor = files("comera.report").joinpath("vendor")
    notice = vendor.joinpath("uPlot.LICENSE").read_text("utf-8")
    style = vendor.joinpath("uPlot.min.css").read_text("utf-8")
    library = vendor.joinpath("uPlot.iife.min.js").read_text("utf-8")
    own = files("comera.report").joinpath("charts.js").read_text("utf-8")
    return f"<style>{style}</style>\n<script>/*{notice}*/\n{library}</script>\n<script>\n{own}</script>"


def smooth(values: np.ndarray) -> np.ndarray:
    """Centered moving mean over about a thirtieth of the values, truncated at both ends; ignores NaNs."""
    if not len(values):
        return values
    window, finite = np.ones(2 * (len(values) // 60) + 1), np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    counts = np.convolve(finite, window, mode="same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def thin(y: np.ndarray, most: int = _MOST) -> np.ndarray:
    """Indices of at most `most` values: the lowest and highest of each stretch, so no spike is lost."""
    if len(y) <= most:
        return np.arange(len(y))
    keep: list[int] = [0, len(y) - 1]
    for chunk in np.array_split(np.arange(len(y)), (most - 2) // 2):
        ordered = np.where(np.isfinite(y[chunk]), y[chunk], np.inf)
        highest = np.where(np.isinf(ordered), -np.inf, ordered)
        keep += [int(chunk[ordered.argmin()]), int(chunk[highest.argmax()])]
    return np.unique(keep)


def _thinned(line: Line) -> dict[str, object]:
    y = np.asarray(line.y, float)
    kept = thin(y)
    x = {axis: np.asarray(values, float)[kept].tolist() for axis, values in line.x.items()}
    return {**asdict(line), "x": x, "y": y[kept].tolist()}


def _finite(value: object) -> object:
    """The value with null for numbers that are not finite, which JSON lacks, and six significant digits."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value
