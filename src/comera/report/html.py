"""The report of a run: figures as PNG, and one self-contained HTML page."""

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from comera._version import __version__
from comera.convert.report import fold
from comera.files import replace_file
from comera.report.run import RunData, read_run
from comera.report.tables import (
    count,
    duration,
    join_ranks,
    label,
    megabytes,
    metric,
    modes_of,
    number,
    times,
)
from comera.tables import Table

_FOOTER = f"Made by comera {__version__}. 1 MB = 2<sup>20</sup> bytes."


def render(run: Path) -> Path:
    """Draw the figures of a run as PNG and write its report.html; returns the page's path.

    Unfinished runs are fine. Raises DataError for a folder that is missing, malformed or not a run.
    """
    from comera.report.plots import PLOTS  # matplotlib, only to draw
    from comera.report.style import write_figures

    data = read_run(run)
    plots = "".join(html for html, _ in write_figures(PLOTS, data, data.folder).values())
    table = layer_table(data)
    cards = ""
    for name, (value, remark) in _headline(data).items():
        small = f"<small>{escape(remark)}</small>" if remark else ""
        cards += f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"
    sections = [
        f'<dl class="cards">{cards}</dl>',
        section("Training curves", f'<div class="plots">{plots}</div>' if plots else "<p>No steps yet.</p>"),
        section("Layers", table.html() if table else "<p>No layer is compressed: this is a dense run.</p>"),
    ]
    if data.memory:
        sections.append(section("Estimated memory of a training step", _memory_table(data).html()))
    if data.config_text:
        sections.append(section("Configuration", f"<pre>{escape(data.config_text.rstrip())}</pre>"))
    heading = f"{data.recipe}, {data.method}"
    return replace_file(data.folder / "report.html", page(heading, _lead(data), sections))


def page(heading: str, lead: str, sections: Iterable[str]) -> str:
    """A complete page. heading: text; lead and sections: HTML."""
    template = Template(files("comera.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(heading), heading=escape(heading), lead=lead, main="\n".join(sections), footer=_FOOTER
    )


def section(title: str, body: str) -> str:
    """A section of a page. title: text; body: HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>"


def _headline(run: RunData) -> dict[str, tuple[str, str]]:
    """Headline results, name -> (value, remark), from the summary or else from the last metrics."""
    results: dict[str, tuple[str, str]] = {}
    summary, train, evals, sizes = run.summary, run.train, run.evals, run.sizes
    if evals:
        best = min(evals, key=lambda point: point.loss)
        remark = "best so far" if best.step == evals[-1].step else f"best {best.loss:.3f} at step {best.step:,}"
        results["Held-out loss"] = (f"{evals[-1].loss:.3f}", remark)
        for name, value in evals[-1].metrics.items():
            results[f"Held-out {label(name)}"] = (metric(name, value, " %"), "at the last evaluation")
    for name, value in run.test.items():
        results[f"Test {name}"] = (metric(name, value, " %"), "of the final model")
    if train:
        last = train[-1]
        results["Steps"] = (f"{last.step:,}", f"in {duration(last.time)} of training")
        rate = f"{count(last.tokens / max(last.time, 1e-9))}/s"
        results[f"{run.unit.capitalize()} seen"] = (count(last.tokens), rate)
        step_time = summary.step_time if summary else sorted(point.step_time for point in train)[len(train) // 2]
        results["Step time"] = (f"{number(step_time * 1e3)} ms", "median")
    if sizes:
        size = sizes[-1]
        remark = "" if size.ratio == 1 else f"{times(size.ratio)} smaller than dense"
        if 0 < size.ratio < 1:
            remark = f"{times(1 / size.ratio)} larger than dense"
        results["Model"] = (f"{megabytes(size.total * run.element_bytes)} MB", remark)
        if size.ranks:
            tensorized = f"{megabytes(size.tensorized * run.element_bytes)} MB"
            results["Tensorized layers"] = (tensorized, f"{times(size.tensorized_ratio)} smaller than dense")
        for stage in run.stages[-1:]:
            met = "met" if size.tensorized <= stage.target_size else "not met yet"
            results["Target size"] = (f"{megabytes(stage.target_size * run.element_bytes)} MB", met)
        results["Parameters"] = (count(size.total), f"{size.total:,}")
    if summary and summary.peak_memory:
        results["Peak memory"] = (f"{megabytes(summary.peak_memory)} MB", "")
    return results


def _memory_table(run: RunData) -> Table:
    """Bytes of a training step by part, one row per method; their sum is an upper bound of the peak."""
    parts = list(next(iter(run.memory.values())))
    rows = [
        (method, *(megabytes(step.get(part, 0)) for part in parts), megabytes(sum(step.values())))
        for method, step in run.memory.items()
    ]
    return Table(("method", *(f"{part} MB" for part in parts), "total MB"), "l" + "r" * (1 + len(parts)), tuple(rows))


def _lead(run: RunData) -> str:
    if run.summary is None:
        return (
            '<p class="notice">This run has no summary: it is still running, or it was killed. '
            "The results are those logged so far.</p>"
        )
    ended = {
        "steps": f"Finished all {run.summary.steps:,} steps",
        "time": "Finished at its time limit",
        "interrupted": "Interrupted; it can be resumed",
    }
    how = ended.get(run.summary.stopped, f"Stopped: {run.summary.stopped}")
    return f'<p class="muted">{escape(how)}, after {duration(run.summary.time)} of training.</p>'


def layer_table(run: RunData) -> Table | None:
    """Every row of the conversion report, with the last logged ranks; None for a dense run."""
    if not run.layers:
        return None
    logged = run.sizes[-1].ranks if run.sizes else {}
    rows, dense_total, stored_total = [], 0, 0
    for layer in fold(run.layers):
        initial = join_ranks(layer.spec.inner_ranks) if layer.spec else ""
        ranks, stored = logged.get(f"{layer.name}.tt"), layer.stored
        if layer.spec is not None and ranks is not None:
            unpruned = layer.spec.with_ranks((1, *ranks, 1))
            stored = unpruned.numel + unpruned.rank_numel
        dense_total, stored_total = dense_total + layer.dense, stored_total + stored
        converted = layer.after != layer.before
        kind, modes = layer.after if converted else "dense", modes_of(layer.spec) if layer.spec else ""
        ratio = times(layer.dense / stored) if converted and layer.dense and stored else ""
        now = join_ranks(ranks or ()) if logged else initial
        rows.append((layer.name, kind, modes, initial, now, f"{layer.dense:,}", f"{stored:,}", ratio, layer.note))
    biases = sum(layer.bias for layer in run.layers if layer.layer)
    if biases:
        rows.append(("biases of the layers", "dense", "", "", "", f"{biases:,}", f"{biases:,}", "", ""))
    dense_total, stored_total = dense_total + biases, stored_total + biases
    ratio = times(dense_total / stored_total if stored_total else None)
    rows.append(("whole model", "", "", "", "", f"{dense_total:,}", f"{stored_total:,}", ratio, ""))
    header = ("layer", "type", "modes", "initial ranks", "ranks", "dense parameters", "parameters", "ratio", "note")
    return Table(header, "lllllrrrl", tuple(rows), total=True)
