"""Finished runs side by side: one table, one figure, one page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from comera.errors import DataError
from comera.files import replace_file
from comera.report.html import figure_html, page
from comera.report.run import RunData, read_run
from comera.report.tables import MEGA, Table, count, duration, megabytes, number, times
from comera.trainer.metrics import Summary

PARETO = (
    "Every finished run as a point: what its model stores, against what it reaches on held-out data. Up and left is "
    "better."
)
READING = (
    "Left, loss on held-out data against the seconds that each run has trained: lower and further left is better (a "
    "late stage counts from its own start). "
    "Right, what the trained model stores, and how much each method has seen meanwhile."
)


def compare(runs: Mapping[str, Path], out: Path) -> str:
    """Write compare.md, .json, .png and .html into `out` and return the tables as text.

    runs: name -> run folder, in the order in which to show them; a run named "dense", or else the first one of that
        method, is what step times are compared with. Runs with a metric besides the loss give a second figure,
        pareto.png; compressed ones a table of the ranks of one block.
    Raises DataError without runs, or for one that is missing, malformed or has not ended; nothing is written then.
    """
    from comera.report.plots import compare_runs  # matplotlib, only when something is drawn
    from comera.report.style import export, styled

    ended = _read(runs)
    tables = {"Figures": _table(ended)}
    block, ranks = _ranks_table({name: run for name, (run, _) in ended.items()})
    if ranks:
        tables[f"Ranks of one block, {block}"] = ranks
    images = {}
    with styled():
        figure = compare_runs({name: run for name, (run, _) in ended.items()})
        images["compare"] = (*export(figure, "compare", "Held-out loss over training time, size, data seen"), READING)
        if pareto := _pareto({name: summary for name, (_, summary) in ended.items()}):
            images["pareto"] = (*export(pareto, "pareto", "Size and held-out quality of every run"), PARETO)
    recipe = next(iter(ended.values()))[1].recipe
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"name": name, "run": str(run.folder), **asdict(summary)} for name, (run, summary) in ended.items()]
    replace_file(out / "compare.json", json.dumps(rows, indent=1) + "\n")
    for name, (png, _, _) in images.items():
        replace_file(out / f"{name}.png", png)
    title = f"{recipe}: runs side by side"
    text = "\n\n".join(
        f"{'' if name == 'Figures' else f'{name}:' + chr(10) * 2}{t.markdown()}" for name, t in tables.items()
    )
    pictures = "\n\n".join(f"![{reading}]({name}.png)" for name, (_, _, reading) in images.items())
    replace_file(out / "compare.md", f"# {title}\n\n{text}\n\n{pictures}\n")
    lead = f'<p class="muted">{escape(", ".join(ended))}</p>'
    body = [figure_html(svg, reading, wide=True) for name, (_, svg, reading) in images.items()]
    body += [f"<section><h2>{escape(name)}</h2>{table.html()}</section>" for name, table in tables.items()]
    replace_file(out / "compare.html", page(title, lead, body))
    return text


def _read(runs: Mapping[str, Path]) -> dict[str, tuple[RunData, Summary]]:
    if not runs:
        raise DataError("expected at least one run to compare, got none")
    ended: dict[str, tuple[RunData, Summary]] = {}
    for name, folder in runs.items():
        run = read_run(folder)
        if run.summary is None or not run.summary.finished:
            how = "was interrupted" if run.summary else "has no summary.json"
            raise DataError(f"expected runs that have ended, but {name!r} in {folder} {how}: resume it first")
        ended[name] = (run, run.summary)
    return ended


def _table(ended: Mapping[str, tuple[RunData, Summary]]) -> Table:
    """One row a run; columns that no run fills are left out."""
    summaries = {name: summary for name, (_, summary) in ended.items()}
    dense = summaries.get("dense") or next((s for s in summaries.values() if s.method == "dense"), None)
    columns: dict[str, list[str]] = {}
    for metric in _metrics(summaries):
        columns[f"{metric} %" if metric == "accuracy" else metric] = [
            _metric(metric, s.metrics.get(metric)) for s in summaries.values()
        ]
    tested = dict.fromkeys(name for run, _ in ended.values() for name in run.test if name != "loss")
    for metric in tested:
        columns[f"test {metric} %" if metric == "accuracy" else f"test {metric}"] = [
            _metric(metric, run.test.get(metric)) for run, _ in ended.values()
        ]
    for run, summary in ended.values():
        loss, stored = summary.held_out_loss, summary.parameters
        number_bytes = summary.size_bytes / stored if stored else 0.0
        faster = dense.step_time / summary.step_time if dense and summary.step_time else None
        cells = {
            "held-out loss": f"{loss:.3f}" if loss is not None else "–",
            "parameters": f"{stored:,}",
            "size MB": megabytes(summary.size_bytes),
            "ratio": times(summary.ratio) if summary.method != "dense" else "–",
            "tensorized MB": megabytes(summary.tensorized * number_bytes),
            "tensorized ratio": times(summary.tensorized_ratio) if summary.tensorized else "–",
            "epoch": duration(summary.epoch_time) if summary.epoch_time else "–",
            f"{run.counted}/s": count(summary.tokens / summary.steps / summary.step_time)
            if summary.steps and summary.step_time
            else "–",
            "step ms": number(summary.step_time * 1e3),
            "speed": times(faster),
            "peak MB": megabytes(summary.peak_memory),
            "time": duration(summary.time),
            "steps": f"{summary.steps:,}",
            "examples": f"{summary.examples:,}" if summary.examples else "–",
            "tokens": "–" if run.counted == "samples" else count(summary.tokens),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"–"}}
    rows = zip(summaries, *columns.values(), strict=True)
    return Table(("method", *columns), "l" + "r" * len(columns), tuple(rows))


def _metrics(summaries: Mapping[str, Summary]) -> list[str]:
    """Names of what the runs measure besides the loss, in their order."""
    return list(dict.fromkeys(name for summary in summaries.values() for name in summary.metrics))


def _metric(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}" if name == "accuracy" else number(value)


def _ranks_table(runs: Mapping[str, RunData]) -> tuple[str, Table | None]:
    """Ranks of the middle one of the repeated blocks, before and after each compressed run; its name, and the table."""
    compressed = {name: run.sizes for name, run in runs.items() if run.sizes and run.sizes[-1].ranks}
    if not compressed:
        return "", None
    first = next(iter(compressed.values()))[0].ranks
    blocks = dict.fromkeys(match[0] for chain in first if (match := re.match(r".*?\.\d+(?=\.)", chain)))
    block = list(blocks)[len(blocks) // 2] if blocks else ""
    chains = [chain for chain in first if chain.startswith(f"{block}." if block else "")]
    shown = {"at first": first, **{f"after {name}": sizes[-1].ranks for name, sizes in compressed.items()}}
    rows = [
        (
            chain.removeprefix(f"{block}.").removesuffix(".tt"),
            *("-".join(map(str, r.get(chain, ()))) for r in shown.values()),
        )
        for chain in chains
    ]
    return block or "all chains", Table(("chain", *shown), "l" * (1 + len(shown)), tuple(rows))


def _pareto(summaries: Mapping[str, Summary]) -> Any:
    """Size on a log axis against the runs' first metric, a point a run; None without one, or without two sizes."""
    from matplotlib.figure import Figure

    from comera.report.style import GREY, ORANGE, TEAL

    metrics = _metrics(summaries)
    points = {
        name: (s.size_bytes / MEGA, s.metrics[metrics[0]]) for name, s in summaries.items() if metrics and s.metrics
    }
    if len({size for size, _ in points.values()}) < 2:
        return None
    figure = Figure(figsize=(8, 3))
    axes = figure.add_subplot(title=f"Size and {metrics[0]}", xlabel="model size, MB", ylabel=metrics[0], xscale="log")
    for name, (size, value) in points.items():
        colour = {"dense": GREY, "comera": TEAL}.get(summaries[name].method, ORANGE)
        axes.plot(size, value, marker="o", color=colour, linestyle="")
        axes.annotate(name, (size, value), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.margins(x=0.15, y=0.25)
    for formatted in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        formatted(lambda x, _: f"{x:.3g}")
    return figure
