"""Compares finished runs: one table, one figure, one page."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path

from comera.errors import DataError
from comera.files import replace_file
from comera.report.html import figure_html, page
from comera.report.run import RunData, read_run
from comera.report.tables import Table, count, duration, join_ranks, megabytes, metric, number, times
from comera.trainer.metrics import Summary

_CURVES = (
    "Left: held-out loss against training time; lower and further left is better. A late stage counts from its own "
    "start. Right: the size of the trained model, and how much data each method has seen in that time."
)
_PARETO = "Model size against held-out quality, one point per run. Up and to the left is better."


def compare(runs: Mapping[str, Path], out: Path) -> str:
    """Write compare.md, .json, .png and .html into `out` and return the tables in Markdown.

    Runs with a metric besides the loss add a second figure, pareto.png; compressed runs add a table of the ranks of one
    block. runs: name -> run folder, in display order; step times are compared with the run named "dense", or else with
    the first run of that method. Raises DataError without runs, or for one that is missing, malformed or unfinished;
    nothing is written then.
    """
    from comera.report.plots import compare_runs, pareto_of_runs  # matplotlib, only to draw
    from comera.report.style import png_and_svg, styled

    data = _read(runs)
    summaries = {name: summary for name, (_, summary) in data.items()}
    tables = {"Results": _results(data)}
    block, ranks = _ranks_of_a_block({name: run for name, (run, _) in data.items()})
    if ranks:
        tables[f"Ranks of {block}"] = ranks
    images = {}
    with styled():
        figure = compare_runs({name: run for name, (run, _) in data.items()})
        images["compare"] = (*png_and_svg(figure, "compare", "Held-out loss over time, size, data seen"), _CURVES)
        if pareto := pareto_of_runs(summaries):
            images["pareto"] = (*png_and_svg(pareto, "pareto", "Size and held-out quality of every run"), _PARETO)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"name": name, "run": str(run.folder), **asdict(summary)} for name, (run, summary) in data.items()]
    replace_file(out / "compare.json", json.dumps(rows, indent=1) + "\n")
    for name, (png, _, _) in images.items():
        replace_file(out / f"{name}.png", png)
    title = f"{next(iter(summaries.values())).recipe}: comparison of runs"
    text = "\n\n".join(
        table.markdown() if name == "Results" else f"{name}:\n\n{table.markdown()}" for name, table in tables.items()
    )
    pictures = "\n\n".join(f"![{caption}]({name}.png)" for name, (_, _, caption) in images.items())
    replace_file(out / "compare.md", f"# {title}\n\n{text}\n\n{pictures}\n")
    lead = f'<p class="muted">{escape(", ".join(data))}</p>'
    body = [figure_html(svg, caption, wide=True) for _, svg, caption in images.values()]
    body += [f"<section><h2>{escape(name)}</h2>{table.html()}</section>" for name, table in tables.items()]
    replace_file(out / "compare.html", page(title, lead, body))
    return text


def _read(runs: Mapping[str, Path]) -> dict[str, tuple[RunData, Summary]]:
    if not runs:
        raise DataError("expected at least one run to compare, got none")
    data: dict[str, tuple[RunData, Summary]] = {}
    for name, folder in runs.items():
        run = read_run(folder)
        if run.summary is None or not run.summary.finished:
            reason = "was interrupted" if run.summary else "has no summary.json"
            raise DataError(f"expected finished runs, but {name!r} in {folder} {reason}: resume it first")
        data[name] = (run, run.summary)
    return data


def _results(data: Mapping[str, tuple[RunData, Summary]]) -> Table:
    """One row per run; columns that every run leaves empty are omitted."""
    summaries = {name: summary for name, (_, summary) in data.items()}
    dense = summaries.get("dense") or next((s for s in summaries.values() if s.method == "dense"), None)
    columns: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary.metrics):
        columns[_header(name)] = [metric(name, summary.metrics.get(name)) for summary in summaries.values()]
    for name in dict.fromkeys(name for run, _ in data.values() for name in run.test if name != "loss"):
        columns[f"test {_header(name)}"] = [metric(name, run.test.get(name)) for run, _ in data.values()]
    for run, summary in data.values():
        faster = dense.step_time / summary.step_time if dense and summary.step_time else None
        timed = summary.steps and summary.step_time
        cells = {
            "held-out loss": f"{summary.held_out_loss:.3f}" if summary.held_out_loss is not None else "–",
            "parameters": f"{summary.parameters:,}",
            "size MB": megabytes(summary.size_bytes),
            "ratio": times(summary.ratio) if summary.method != "dense" else "–",
            "tensorized MB": megabytes(summary.tensorized * run.element_bytes),
            "tensorized ratio": times(summary.tensorized_ratio) if summary.tensorized else "–",
            "epoch": duration(summary.epoch_time) if summary.epoch_time else "–",
            f"{run.unit}/s": count(summary.tokens / summary.steps / summary.step_time) if timed else "–",
            "step ms": number(summary.step_time * 1e3),
            "speed": times(faster),
            "peak MB": megabytes(summary.peak_memory),
            "time": duration(summary.time),
            "steps": f"{summary.steps:,}",
            "examples": f"{summary.examples:,}" if summary.examples else "–",
            "tokens": "–" if run.unit == "samples" else count(summary.tokens),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"–"}}
    rows = zip(summaries, *columns.values(), strict=True)
    return Table(("method", *columns), "l" + "r" * len(columns), tuple(rows))


def _header(name: str) -> str:
    return f"{name} %" if name == "accuracy" else name


def _ranks_of_a_block(runs: Mapping[str, RunData]) -> tuple[str, Table | None]:
    """The middle one of the repeated blocks, and its ranks before and after each compressed run."""
    compressed = {name: run.sizes for name, run in runs.items() if run.sizes and run.sizes[-1].ranks}
    if not compressed:
        return "", None
    initial = next(iter(compressed.values()))[0].ranks
    blocks = list(dict.fromkeys(match[0] for name in initial if (match := re.match(r".*?\.\d+(?=\.)", name))))
    block = f"{blocks[len(blocks) // 2]}." if blocks else ""
    shown = {"initial": initial, **{f"after {name}": sizes[-1].ranks for name, sizes in compressed.items()}}
    rows = [
        (name.removeprefix(block).removesuffix(".tt"), *(join_ranks(ranks.get(name, ())) for ranks in shown.values()))
        for name in initial
        if name.startswith(block)
    ]
    header = ("tensor train", *shown)
    return block.removesuffix(".") or "all tensor trains", Table(header, "l" * len(header), tuple(rows))
