"""Finished runs side by side: one table, one figure, one page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path

from comera.errors import DataError
from comera.files import replace_file
from comera.report.html import figure_html, page
from comera.report.run import RunData, read_run
from comera.report.tables import Table, count, duration, megabytes, number, times
from comera.train.metrics import Summary

READING = (
    "Left, loss on held-out data against the seconds that each method has trained: lower and further left is better. "
    "Right, what the trained model stores, and how much text each method has seen meanwhile."
)


def compare(runs: Mapping[str, Path], out: Path) -> str:
    """Write compare.md, .json, .png and .html into `out` and return the table as text.

    runs: name of the method -> run folder, in the order in which to show them; a run named "dense", or else the first
        one whose model is dense, is what step times are compared with.
    Raises DataError without runs, or for one that is missing, malformed or has not ended; nothing is written then.
    """
    from comera.report.plots import compare_runs  # matplotlib, only when something is drawn
    from comera.report.style import export, styled

    ended = _read(runs)
    table = _table(ended)
    with styled():
        figure = compare_runs({name: run for name, (run, _) in ended.items()})
        png, svg = export(figure, "compare", "Held-out loss over training time, model size and tokens seen")
    recipe = next(iter(ended.values()))[1].recipe
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"name": name, "run": str(run.folder), **asdict(summary)} for name, (run, summary) in ended.items()]
    replace_file(out / "compare.json", json.dumps(rows, indent=1) + "\n")
    replace_file(out / "compare.png", png)
    title = f"{recipe}: methods side by side"
    replace_file(out / "compare.md", f"# {title}\n\n{table.markdown()}\n\n![{READING}](compare.png)\n")
    lead = f'<p class="muted">{escape(", ".join(ended))}</p>'
    body = [figure_html(svg, READING, wide=True), f"<section><h2>Figures</h2>{table.html()}</section>"]
    replace_file(out / "compare.html", page(title, lead, body))
    return table.markdown()


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
    header = (
        *("method", "parameters", "size MB", "tensorized ratio", "step ms", "speed", "peak MB"),
        *("time", "steps", "tokens", "held-out loss"),
    )
    summaries = {name: summary for name, (_, summary) in ended.items()}
    dense = summaries.get("dense") or next((s for s in summaries.values() if not s.tensorized), None)
    rows = []
    for name, summary in summaries.items():
        faster = dense.step_time / summary.step_time if dense and summary.step_time else None
        loss = summary.held_out_loss
        rows.append(
            (
                name,
                f"{summary.parameters:,}",
                megabytes(summary.size_bytes),
                times(summary.tensorized_ratio) if summary.tensorized else "–",
                number(summary.step_time * 1e3),
                times(faster),
                megabytes(summary.peak_memory),
                duration(summary.time),
                f"{summary.steps:,}",
                count(summary.tokens),
                f"{loss:.3f}" if loss is not None else "–",
            )
        )
    return Table(header, "l" + "r" * (len(header) - 1), tuple(rows))
