"""Small pictures of what compression is ahead in, for README and docs/where-it-wins.md, from benchmarks/results.

    python benchmarks/wins.py                                           docs/assets/wins-*.svg

Each has one panel and labels beside its marks, and follows the colors of the page, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple
from xml.sax.saxutils import escape

from common import measured
from estimate import MB, config_of

from comera.recipes.lm import recipe as lm

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
WIDTH = 420  # of the drawing's own units: text of 15 is readable on a phone
STYLE = """  <style>
  .ink { fill: #263238 } .dim { fill: #607d8b } .line { stroke: #b0bec5; fill: none }
  .mark { fill: #00897b }
  @media (prefers-color-scheme: dark) {
    .ink { fill: #eceff1 } .dim { fill: #b0bec5 } .line { stroke: #607d8b }
    .mark { fill: #4db6ac }
  }
</style>"""


class Dot(NamedTuple):
    """A model in a plane: one value of x, one y a seed. beside: where the label stands."""

    label: str
    x: float
    ys: Sequence[float]
    ours: bool
    beside: str = "start"


class Bar(NamedTuple):
    label: str
    value: float
    shown: str
    ours: bool


def scatter(title: str, unit: str, dots: Sequence[Dot], lowest: float, highest: float, xs: Sequence[float]) -> str:
    """Means, each with the range of its seeds, over a logarithmic axis. xs: its ticks, from left end to right end."""
    left, right, top, bottom = 14.0, WIDTH - 14.0, 52.0, 262.0
    span = math.log(xs[-1] / xs[0])

    def at(x: float, y: float) -> tuple[float, float]:
        return left + math.log(x / xs[0]) / span * (right - left), bottom - (y - lowest) / (highest - lowest) * (
            bottom - top
        )

    out = [_text(left, 24, title, "ink", size=16, weight="bold")]
    out += [f'  <line x1="{left}" y1="{bottom}" x2="{right}" y2="{bottom}" class="line"/>']
    for x in xs:
        out.append(_text(at(x, 0)[0], bottom + 20, f"{x:g}", "dim", anchor="middle"))
    out.append(_text(right, bottom + 42, unit, "dim", anchor="end"))
    for dot in dots:
        kind, middle = "mark" if dot.ours else "dim", mean(dot.ys)
        (x, top_y), (_, bottom_y), (_, height) = (at(dot.x, y) for y in (max(dot.ys), min(dot.ys), middle))
        seeds = f'x="{x - 1:.1f}" y="{top_y:.1f}" width="2" height="{bottom_y - top_y:.1f}"'
        out += [f'  <rect {seeds} class="{kind}"/>'] if len(dot.ys) > 1 else []
        out.append(f'  <circle cx="{x:.1f}" cy="{height:.1f}" r="4.5" class="{kind}"/>')
        place = {"start": (x + 13, height + 5), "end": (x - 13, height + 5), "middle": (x, height + 26)}[dot.beside]
        words = f"{dot.label}: {middle:.1f}"
        out.append(
            _text(*place, words, "ink" if dot.ours else "dim", anchor=dot.beside, weight="bold" if dot.ours else "")
        )
    return _svg(out, 316)


def bars(title: str, found: Sequence[Bar]) -> str:
    """A bar for each, its label above it and its value beside it."""
    out, y = [_text(14, 24, title, "ink", size=16, weight="bold")], 56.0
    longest = max(bar.value for bar in found)
    for bar in found:
        width = max(3.0, bar.value / longest * (WIDTH - 200))
        kind, weight = ("mark", "bold") if bar.ours else ("dim", "")
        out.append(_text(14, y, bar.label, "ink" if bar.ours else "dim", weight=weight))
        out.append(f'  <rect x="14" y="{y + 7:.0f}" width="{width:.1f}" height="14" rx="2" class="{kind}"/>')
        out.append(_text(22 + width, y + 20, bar.shown, "ink", weight=weight))
        y += 48
    return _svg(out, y - 16)


def _text(x: float, y: float, words: str, kind: str, *, anchor: str = "start", size: int = 15, weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'  <text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}" font-size="{size}"{bold}>'
        f"{escape(words)}</text>"
    )


def _svg(lines: Sequence[str], height: float) -> str:
    box = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 0 {WIDTH} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="Helvetica, Arial, sans-serif">'
    return "\n".join([head, STYLE, *lines, "</svg>"]) + "\n"


def few_data() -> str:
    """Encoders trained from scratch on 41,379 pairs: accuracy over size, the mean and range of seeds."""
    rows = [row for row in measured("mnli") if row["pairs"] == "41379"]

    def dot(label: str, case: str, stage: str, beside: str) -> Dot:
        own = [row for row in rows if (row["case"], row["stage"]) == (case, stage)]
        return Dot(label, float(own[0]["size_mb"]), [float(row["accuracy"]) for row in own], case == "comera", beside)

    dots = [
        dot("ours", "comera", "late 0.2", "start"),
        dot("best dense", "narrow", "dense", "start"),
        dot("small dense", "small", "dense", "end"),
        dot("same model dense", "dense", "dense", "end"),
    ]
    return scatter("Sentence pairs right, %", "size of the model, MB", dots, 36.0, 56.0, (2, 10, 50, 300))


def slow_links() -> str:
    """Seconds a step of two processes behind links of 100 Mbit/s."""
    rows = {row["side"]: row for row in measured("links") if row["processes"] == "2" and row["link"].startswith("100")}
    labels = {
        "dense": "dense",
        "dense, float16 sent": "dense, gradients as float16",
        "dense, PowerSGD": "dense, gradients of rank 4 (PowerSGD)",
        "compressed": "ours",
    }
    found = [
        Bar(label, float(rows[side]["step_s"]), f"{float(rows[side]['step_s']):.1f} s", side == "compressed")
        for side, label in labels.items()
    ]
    return bars("A step over 100 Mbit/s, 10 ms", found)


def tables() -> str:
    """Tables of a click model at the sizes of the full Criteo data, 16 wide: megabytes, and the loss beside them."""
    rows = [row for row in measured("dlrm_tables") if row["part"] == "final" and row["dim"] == "16"]
    labels = {("dense", "1"): "dense", ("hashing", "200"): "hashed rows", ("comera", "200"): "ours"}

    def bar(method: str, ratio: str) -> Bar:
        own = [row for row in rows if (row["method"], row["ratio"]) == (method, ratio)]
        loss, size = mean(float(row["nce"]) for row in own), float(own[0]["tables_mb"])
        return Bar(labels[method, ratio], size, f"{size:,.0f} MB, loss {loss:.4f}", method == "comera")

    return bars("Tables of a click model", [bar(*key) for key in labels])


def equation() -> str:
    """Relative errors of networks that solve an equation, three seeds each."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in measured("pinn"):
        found.setdefault((row["method"], int(row["parameters"])), []).append(float(row["relative_l2"]))
    labels = {"dense": "dense", "narrow": "narrow dense", "comera": "ours"}
    return bars(
        "Error of the solution",
        [
            Bar(f"{labels[method]}, {parameters:,} parameters", mean(errors), f"{mean(errors):.1e}", method == "comera")
            for (method, parameters), errors in found.items()
        ],
    )


def large() -> str:
    """Memory of a training step of a model of Llama 7B's shape: dense by the estimate, ours as measured."""
    dense = lm.estimate(config_of("lm llama-7b"), ["dense"])["dense"].total / MB
    (ours,) = (float(row["peak_mb"]) for row in measured("large") if row["case"] == "llama-7b")
    found = [
        Bar("dense", dense, f"{dense:,.0f} MB, estimated", ours=False),
        Bar("ours", ours, f"{ours:,.0f} MB, measured", ours=True),
    ]
    return bars("A training step of Llama 7B's shape", found)


def demo() -> str:
    """What `make demo` reaches, one seed."""
    labels = {
        "dense": "dense, 64 wide",
        "narrow": "dense, 48 wide",
        "hashed_ngrams": "and hashed n-grams",
        "narrow_conv": "and short convolutions",
        "comera": "ours: tables of low rank and of n-grams",
    }
    found = {row["method"]: row["nats_per_byte"] for row in measured("demo") if row["seed"] == "0"}
    return bars(
        "Nats per byte after 100 seconds",
        [Bar(label, float(found[key]), f"{float(found[key]):.2f}", key == "comera") for key, label in labels.items()],
    )


PICTURES: dict[str, Callable[[], str]] = {
    "wins-few-data": few_data,
    "wins-slow-links": slow_links,
    "wins-tables": tables,
    "wins-equation": equation,
    "wins-large": large,
    "wins-demo": demo,
}


def main() -> None:
    for name, draw in PICTURES.items():
        path: Path = ASSETS / f"{name}.svg"
        path.write_text(draw(), "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
