"""Compares finished runs: one table, one page, and figures for Markdown."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from textwrap import fill
from urllib.parse import quote

from comera.errors import DataError
from comera.files import replace_file
from comera.report.charts import plots
from comera.report.curves import WATT_HOUR, charts_of_runs
from comera.report.html import facts, page, section, tiles
from comera.report.run import RunData, read_run
from comera.report.tables import SHARES, count, duration, join_ranks, label, megabytes, metric, number, times
from comera.report.verdict import of_comparison
from comera.tables import Table
from comera.trainer.energy import is_estimated, total
from comera.trainer.metrics import Summary


def compare(runs: Mapping[str, str | Path], out: str | Path) -> str:
    """Write compare.md, .json and .html into `out` and return the tables in Markdown.

    Compressed runs add a table of the ranks of one block. runs: name -> run folder, in display order; step times are
    compared with the run named "dense", or else with the first run of that method. Raises DataError without runs, or
    for one that is missing, malformed or unfinished; nothing is written then.

    Example:
        >>> from comera.report import compare
        >>> runs = {name: f"runs/compare/{name}" for name in ("dense", "comera")}  # of `comera compare lm`
        >>> print(compare(runs, "runs/compare"))  # and as a page, runs/compare/compare.html
        | method | held-out loss | parameters | size MB | ratio | ...
    """
    data = {name: read_run(folder) for name, folder in runs.items()}
    summaries = _summaries(data)
    tables = _tables(data, summaries)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"name": name, "run": str(data[name].folder), **asdict(summary)} for name, summary in summaries.items()]
    replace_file(out / "compare.json", json.dumps(rows, indent=1) + "\n")
    title = f"{next(iter(summaries.values())).recipe}: comparison of runs"
    verdict = of_comparison(data)
    text = "\n\n".join(
        table.markdown() if name == "Results" else f"{name}:\n\n{table.markdown()}" for name, table in tables.items()
    )
    curves = "[Curves, links and provenance](compare.html)"
    replace_file(out / "compare.md", f"# {title}\n\n{' '.join(verdict)}\n\n{text}\n\n{curves}\n")
    kinds = ["verdict", *["muted"] * len(verdict)]
    lead = "".join(f'<p class="{kind}">{escape(sentence)}</p>' for kind, sentence in zip(kinds, verdict, strict=False))
    pages = {name: run.folder / "report.html" for name, run in data.items()}
    # relative, so that they hold when the folder of all is moved
    links = {
        name: quote(os.path.relpath(page, out).replace(os.sep, "/")) for name, page in pages.items() if page.is_file()
    }
    body = [tiles({name: _tile(run, summaries[name]) for name, run in data.items()})]
    body += [section("Curves", drawn)] if (drawn := plots(charts_of_runs(data))) else []
    for name, table in tables.items():
        body.append(section(name, table.transposed().html(links) if name == "Results" else table.html()))
    body.append(section("Provenance", _provenance(data, links)))
    replace_file(out / "compare.html", page(title, lead, body))
    return text


def _tile(run: RunData, summary: Summary) -> tuple[str, str]:
    """What a run has reached, and at what size and speed."""
    costs = f"{megabytes(summary.size_bytes)} MB, {number(summary.step_time * 1e3)} ms a step"
    if not run.evals:
        return "–", costs
    name = run.judged_by
    return metric(name, run.evals[-1].value(name), " %"), f"held-out {label(name)}, {costs}"


def results(runs: Mapping[str, str | Path]) -> str:
    """The tables of `compare` as text that fits a terminal, and its verdict. Raises DataError as `compare` does.

    Example:
        >>> from comera.report import results
        >>> runs = {name: f"runs/compare/{name}" for name in ("dense", "comera")}  # of `comera compare lm`
        >>> print(results(runs))
        method               dense    comera
        ────────────────  ────────  ────────
        held-out loss        4.500     4.500
        parameters          35,172     1,628
        ...
    """
    data = {name: read_run(folder) for name, folder in runs.items()}
    tables = _tables(data, _summaries(data))
    shown = [table.fitted() if name == "Results" else f"{name}:\n\n{table.fitted()}" for name, table in tables.items()]
    return "\n\n".join([*shown, *(fill(sentence, 100) for sentence in of_comparison(data))])


def _tables(data: Mapping[str, RunData], summaries: Mapping[str, Summary]) -> dict[str, Table]:
    """The tables of a comparison by title."""
    tables = {"Results": _results(data, summaries)}
    for name, values in {name: values for run in data.values() for name, values in run.references.items()}.items():
        cells = tuple(metric(name, value) for value in values.values())
        tables[f"For comparison, {label(name)}"] = Table(tuple(values), "r" * len(values), (cells,))
    block, ranks = _ranks_of_a_block(data)
    if ranks:
        tables[f"Ranks of {block}"] = ranks
    return tables


def _provenance(runs: Mapping[str, RunData], links: Mapping[str, str]) -> str:
    """Where the runs come from: what is the same for all, then what is not. Times compare on equal machines only."""
    last = [run.provenance[-1] if run.provenance else {} for run in runs.values()]
    rows = {}
    for name in ("started", "machine", "threads", "processes", "comera", "torch", "python", "commit", "data"):
        values = [str(entry.get(name) or "–") for entry in last]
        rows[name] = [value[:16].replace("T", " ") for value in values] if name == "started" else values
    shared = [(name, values[0]) for name, values in rows.items() if {*values} == {values[0]} != {"–"}]
    own = tuple((name, *values) for name, values in rows.items() if len({*values}) > 1)
    table = Table(("run", *runs), "l" * (1 + len(runs)), own).html(links) if own else ""
    return facts(shared) + table if shared or own else "<p>Not recorded.</p>"


def _summaries(runs: Mapping[str, RunData]) -> dict[str, Summary]:
    """The summaries of the runs; raises DataError without runs or for an unfinished one."""
    if not runs:
        raise DataError("expected at least one run to compare, got none")
    for name, run in runs.items():
        if run.summary is None or not run.summary.finished:
            reason = "was interrupted" if run.summary else "has no summary.json"
            raise DataError(f"expected finished runs, but {name!r} in {run.folder} {reason}: resume it first")
    return {name: run.summary for name, run in runs.items() if run.summary}


def _results(runs: Mapping[str, RunData], summaries: Mapping[str, Summary]) -> Table:
    """One row per run; columns that every run leaves empty are omitted."""
    dense = summaries.get("dense") or next((s for s in summaries.values() if s.method == "dense"), None)
    columns: dict[str, list[str]] = {}
    known = [summary.energy for summary in summaries.values() if summary.energy]

    def header(name: str) -> str:
        return f"{label(name)} %" if name in SHARES else label(name)

    energy, mark = ("estimated Wh", "") if all(map(is_estimated, known)) else ("Wh", " (estimated)")
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary.metrics):
        columns[header(name)] = [metric(name, summary.metrics.get(name)) for summary in summaries.values()]
    for name in dict.fromkeys(name for run in runs.values() for name in run.test if name != "loss"):
        columns[f"test {header(name)}"] = [metric(name, run.test.get(name)) for run in runs.values()]
    for run, summary in zip(runs.values(), summaries.values(), strict=True):
        faster = dense.step_time / summary.step_time if dense and summary.step_time else None
        joules = total(summary.energy)
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
            energy: number(None if joules is None else joules / WATT_HOUR)
            + (mark if is_estimated(summary.energy) else ""),
            "CO₂ g": number(summary.co2),
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


def _ranks_of_a_block(runs: Mapping[str, RunData]) -> tuple[str, Table | None]:
    """The middle one of the repeated blocks, and its ranks before and after each compressed run."""
    compressed = {name: run.sizes for name, run in runs.items() if run.sizes and run.sizes[-1].ranks}
    if not compressed:
        return "", None
    initial = next(iter(compressed.values()))[0].ranks
    blocks = list(dict.fromkeys(match[0] for name in initial if (match := re.match(r".*?\.\d+(?=\.)", name))))
    block = f"{blocks[len(blocks) // 2]}." if blocks else ""
    shown = {"initial": initial, **{f"after {name}": sizes[-1].ranks for name, sizes in compressed.items()}}
    specs = {name: spec for run in runs.values() for name, spec in run.specs.items()}
    rows = [
        (
            name.removeprefix(block).removesuffix(".tt"),
            *(join_ranks(ranks.get(name, ()), specs.get(name)) for ranks in shown.values()),
        )
        for name in initial
        if name.startswith(block)
    ]
    header = ("tensor train", *shown)
    return block.removesuffix(".") or "all tensor trains", Table(header, "l" * len(header), tuple(rows))
