"""The report of a run: figures as PNG beside it, and one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from comera._version import __version__
from comera.files import replace_file
from comera.report.layers import layer_table
from comera.report.run import RunData, read_run
from comera.report.tables import Table, count, duration, megabytes, number, times

FOOTER = f"Made by comera {__version__}. 1 MB = 2<sup>20</sup> bytes."


def render(run: Path) -> Path:
    """Draw the figures of a run folder as PNG and write its report.html; returns the page's path.

    Takes partial runs too. Raises DataError for a folder that is missing, foreign or malformed.
    """
    from comera.report.plots import PLOTS  # matplotlib, only when something is drawn
    from comera.report.style import export, styled

    data = read_run(run)
    plots = []
    with styled():
        for plot in PLOTS:
            figure = plot.draw(data)
            if figure is not None:
                png, svg = export(figure, plot.name, plot.title)
                replace_file(data.folder / f"{plot.name}.png", png)
                plots.append(figure_html(svg, plot.reading, wide=figure.get_figwidth() > 6))
    table = layer_table(data)
    sections = [
        figures_html(headline(data)),
        _section("Course", f'<div class="plots">{"".join(plots)}</div>' if plots else "<p>No step was logged yet.</p>"),
        _section("Layers", table.html() if table else "<p>No layer is compressed: this is a dense run.</p>"),
    ]
    if data.memory:
        sections.append(_section("Memory of a training step, estimated", memory_table(data).html()))
    if data.config_text:
        sections.append(_section("Configuration", f"<pre>{escape(data.config_text.rstrip())}</pre>"))
    heading = f"{data.recipe}, {data.method}"
    return replace_file(data.folder / "report.html", page(heading, _lead(data), sections))


def page(heading: str, lead: str, sections: Iterable[str]) -> str:
    """A whole page. heading: text; lead and sections: HTML."""
    template = Template(files("comera.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(heading), heading=escape(heading), lead=lead, main="\n".join(sections), footer=FOOTER
    )


def figure_html(svg: str, reading: str, *, wide: bool = False) -> str:
    """A figure with the sentence on how to read it; a wide one scrolls on a phone."""
    kind = ' class="wide"' if wide else ""
    return f'<figure{kind}><div class="scroll">{svg}</div><figcaption>{escape(reading)}</figcaption></figure>\n'


def figures_html(figures: Mapping[str, tuple[str, str]]) -> str:
    """The headline figures as cards: name -> (figure, remark)."""
    cards = []
    for name, (figure, remark) in figures.items():
        small = f"<small>{escape(remark)}</small>" if remark else ""
        cards.append(f"<div><dt>{escape(name)}</dt><dd>{escape(figure)}{small}</dd></div>")
    return f'<dl class="figures">{"".join(cards)}</dl>'


def headline(run: RunData) -> dict[str, tuple[str, str]]:
    """What a reader wants first, name -> (figure, remark): from the summary, else from the last metrics."""
    figures: dict[str, tuple[str, str]] = {}
    summary, train, evals, sizes = run.summary, run.train, run.evals, run.sizes
    if evals:
        best = min(evals, key=lambda point: point.loss)
        remark = "its best" if best.step == evals[-1].step else f"best {best.loss:.3f} at step {best.step:,}"
        figures["Held-out loss"] = (f"{evals[-1].loss:.3f}", remark)
        for name, value in evals[-1].metrics.items():
            shown = f"{100 * value:.1f} %" if name == "accuracy" else number(value)
            figures[f"Held-out {name}"] = (shown, "at the last evaluation")
    for name, value in run.test.items():
        figures[f"Test {name}"] = (f"{100 * value:.1f} %" if name == "accuracy" else number(value), "of the last model")
    if train:
        figures["Steps"] = (f"{train[-1].step:,}", f"in {duration(train[-1].time)} of training")
        figures[f"{run.counted.capitalize()} seen"] = (
            count(train[-1].tokens),
            f"{count(train[-1].tokens / max(train[-1].time, 1e-9))}/s",
        )
        step_time = summary.step_time if summary else sorted(point.step_time for point in train)[len(train) // 2]
        figures["Step time"] = (f"{number(step_time * 1e3)} ms", "median")
    if sizes:
        size = sizes[-1]
        smaller = "" if size.ratio == 1 else f"{times(size.ratio)} smaller than dense"
        if 0 < size.ratio < 1:
            smaller = f"{times(1 / size.ratio)} larger than dense"
        figures["Model"] = (f"{megabytes(size.total * run.number_bytes)} MB", smaller)
        if size.ranks:
            part = f"{megabytes(size.tensorized * run.number_bytes)} MB"
            figures["Tensorized layers"] = (part, f"{times(size.tensorized_ratio)} smaller than dense")
        for stage in run.stages[-1:]:
            met = "met" if size.tensorized <= stage.target_size else "not met yet"
            figures["Target size"] = (f"{megabytes(stage.target_size * run.number_bytes)} MB", met)
        figures["Parameters"] = (count(size.total), f"{size.total:,}")
    if summary and summary.peak_memory:
        figures["Peak memory"] = (f"{megabytes(summary.peak_memory)} MB", "")
    return figures


def memory_table(run: RunData) -> Table:
    """Bytes of a training step by part, a row a method; their sum bounds the peak from above."""
    parts = list(next(iter(run.memory.values())))
    rows = [
        (method, *(megabytes(step.get(part, 0)) for part in parts), megabytes(sum(step.values())))
        for method, step in run.memory.items()
    ]
    return Table(("method", *(f"{part} MB" for part in parts), "total MB"), "l" + "r" * (1 + len(parts)), tuple(rows))


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>\n{body}\n</section>"


def _lead(run: RunData) -> str:
    if run.summary is None:
        return (
            '<p class="notice">This run has no summary: it is still going on, or it was killed. '
            "The figures are those of its metrics so far.</p>"
        )
    ended = {
        "steps": f"Ended after its {run.summary.steps:,} steps",
        "time": "Ended when its time was up",
        "interrupted": "Interrupted; it can be resumed",
    }
    how = ended.get(run.summary.stopped, f"Stopped: {run.summary.stopped}")
    return f'<p class="muted">{escape(how)}, after {duration(run.summary.time)} of training.</p>'
