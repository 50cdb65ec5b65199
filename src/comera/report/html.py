"""The report of a run: one HTML page that loads nothing."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from comera._version import __version__
from comera.convert.report import fold
from comera.files import replace_file
from comera.report.charts import plots, scripts
from comera.report.confusion import confusion_section
from comera.report.curves import charts_of
from comera.report.ranks import ranks_section
from comera.report.run import RunData, read_run
from comera.report.tables import count, duration, join_ranks, label, megabytes, metric, modes_of, number, times
from comera.report.verdict import energy_text, of_run
from comera.tables import Table
from comera.trainer.metrics import Summary

_FOOTER = f"Made by comera {__version__}. 1 MB = 2<sup>20</sup> bytes."


def render(run: str | Path) -> Path:
    """Write report.html of a run, one page that loads nothing; returns its path.

    Of a run that is unfinished or damaged, the page shows what can be read and says what cannot. Raises DataError for a
    folder that is missing or not a run.

    Example:
        >>> from comera.report import render
        >>> page = render("runs/compare/comera")  # after `comera compare lm --out runs/compare`
        >>> page.name, "Training curves" in page.read_text()
        ('report.html', True)
    """
    data = read_run(run, damaged=True)
    table, charts = layer_table(data), charts_of(data)
    without = "No layers are listed: layers.json is empty, missing or damaged."
    without = "No layer is compressed: this is a dense run." if data.method == "dense" else without
    sections = [
        tiles(_headline(data)),
        section("Training curves", plots(charts) or "<p>No steps yet.</p>"),
        section("Confusion matrix", confusion_section(data.confusion)) if data.confusion else "",
        section("Ranks", strips) if (strips := ranks_section(data)) else "",
        f'<div class="plots">{costs}</div>' if (costs := _costs(data)) else "",
        section("Energy", _energy(data)) if data.train else "",
        section("Memory of a training step, estimated", _memory_table(data).html()) if data.memory else "",
        section("Layers", table.html() if table else f"<p>{without}</p>"),
        section("Provenance", _provenance(data)),
        section("Configuration", _configuration(data.config_text.rstrip())) if data.config_text else "",
    ]
    heading = f"{data.recipe}, {data.method}"
    lead = f'<p class="verdict">{escape(of_run(data))}</p>{_lead(data)}'
    return replace_file(data.folder / "report.html", page(heading, lead, [*filter(None, sections)]))


def page(heading: str, lead: str, sections: Sequence[str]) -> str:
    """A complete page. heading: text; lead and sections: HTML."""
    template = Template(files("comera.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        title=escape(heading),
        heading=escape(heading),
        lead=lead,
        main="\n".join(sections),
        footer=_FOOTER,
        scripts=scripts() if any('class="chart"' in each for each in sections) else "",
    )


def section(title: str, body: str) -> str:
    """A section of a page. title: text; body: HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{body}\n</section>"


def _costs(run: RunData) -> str:
    """What a finished run took, in narrow sections."""
    summary = run.summary
    spent = section("Time by part", _time_table(run).html()) if summary and summary.parts else ""
    held = section("Memory by part", _held_table(summary).html()) if summary and summary.memory else ""
    return spent + held


def tiles(values: Mapping[str, tuple[str, str]]) -> str:
    """A row of headline results, name -> (value, remark); "" without any."""
    shown = ""
    for name, (value, remark) in values.items():
        small = f"<small>{escape(remark)}</small>" if remark else ""
        shown += f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>"
    return f'<dl class="tiles">{shown}</dl>' if shown else ""


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
        results[f"Test {label(name)}"] = (metric(name, value, " %"), "of the final model")
    if train:
        last = train[-1]
        results["Steps"] = (f"{last.step:,}", f"in {duration(last.time)} of training")
        rate = f"{count(last.tokens / max(last.time, 1e-9))}/s"
        results[f"{run.unit.capitalize()} seen"] = (count(last.tokens), rate)
        step_time = summary.step_time if summary else sorted(point.step_time for point in train)[len(train) // 2]
        results["Step time"] = (f"{number(step_time * 1e3)} ms", "median")
    if sizes:
        size = sizes[-1]
        smaller = "" if size.ratio == 1 else f"{times(size.ratio)} smaller than dense"
        remark = f"{times(1 / size.ratio)} larger than dense" if 0 < size.ratio < 1 else smaller
        if size.ranks:
            remark = f"{remark}, its compressed layers {times(size.tensorized_ratio)}".removeprefix(", ")
        results["Model"] = (f"{megabytes(size.total * run.element_bytes)} MB", remark)
        for stage in run.stages[-1:]:
            met = "met" if size.tensorized <= stage.target_size else "not met yet"
            results["Target size"] = (f"{megabytes(stage.target_size * run.element_bytes)} MB", met)
    if summary and summary.peak_memory:
        results["Peak memory"] = (f"{megabytes(summary.peak_memory)} MB", "")
    if run.energy:
        co2 = summary.co2 if summary else None
        energy, guess, _ = energy_text(run.energy).partition(" (estimated)")
        remarks = ["estimated"] * bool(guess) + ([] if co2 is None else [f"{number(co2)} g of CO₂"])
        results["Energy"] = (energy, ", ".join(remarks))
    return results


def _held_table(summary: Summary) -> Table:
    """What the process held at its peak."""
    rest = summary.peak_memory - sum(summary.memory.values())
    rows = {**summary.memory, "gradients, activations, rest": rest} if rest > 0 else summary.memory
    cells = tuple((name, megabytes(each)) for name, each in rows.items())
    return Table(("part", "MB"), "lr", (*cells, ("peak", megabytes(summary.peak_memory))), total=True)


def _memory_table(run: RunData) -> Table:
    """Bytes of a training step by part, one row per method; their sum is an upper bound of the peak."""
    parts = list(next(iter(run.memory.values())))
    rows = [
        (method, *(megabytes(step.get(part, 0)) for part in parts), megabytes(sum(step.values())))
        for method, step in run.memory.items()
    ]
    return Table(("method", *(f"{part} MB" for part in parts), "total MB"), "l" + "r" * (1 + len(parts)), tuple(rows))


def _lead(run: RunData) -> str:
    """How the run ended, and what is missing."""
    missing = [f"{name} is missing." for name in ("config.yaml", "metrics.jsonl") if not (run.folder / name).is_file()]
    notices = [*missing, *(f"Not shown, because it cannot be read: {problem}" for problem in run.problems)]
    html = "".join(f'<p class="notice">{escape(text)}</p>' for text in notices)
    if run.summary is None:
        still = "This run has no summary: it is still running, or it was killed. The results are those logged so far."
        return f'<p class="notice">{escape(still)}</p>{html}'
    ended = {
        "steps": f"Finished all {run.summary.steps:,} steps",
        "time": "Finished at its time limit",
        "interrupted": "Interrupted; it can be resumed",
    }
    how = ended.get(run.summary.stopped, f"Stopped: {run.summary.stopped}")
    return f'<p class="muted">{escape(how)}, after {duration(run.summary.time)} of training.</p>{html}'


def _configuration(text: str) -> str:
    lines = text.count("\n") + 1
    return f"<details><summary>config.yaml, {lines:,} lines</summary><pre>{escape(text)}</pre></details>"


def _time_table(run: RunData) -> Table:
    """Seconds by part of the run, and their shares."""
    assert run.summary is not None
    parts = dict(run.summary.parts)
    batches = parts.pop("batches", 0.0)
    seconds = {"batches": batches, "steps": max(0.0, run.summary.time - batches), **parts}
    whole = sum(seconds.values())
    rows = [(name, duration(each), f"{100 * each / max(whole, 1e-9):.1f} %") for name, each in seconds.items()]
    return Table(("part", "time", "share"), "lrr", (*rows, ("sum", duration(whole), "100.0 %")), total=True)


def _energy(run: RunData) -> str:
    """Energy by source, and where each comes from."""
    noted = run.provenance[-1].get("energy") if run.provenance else None
    if not run.energy:
        why = noted if isinstance(noted, str) and noted else "the run has not recorded it"
        return f"<p>Not known: {escape(why)}.</p>"
    basis: dict[str, Any] = {}
    for entry in run.provenance:  # a resumed run may have had other counters
        basis |= entry["energy"] if isinstance(entry.get("energy"), dict) else {}
    rows = [
        (name.replace("_", ", "), energy_text({name: joules}), f"{joules:,.0f}", str(basis.get(name, "")))
        for name, joules in run.energy.items()
    ]
    rows.append(("sum", energy_text(run.energy), f"{sum(run.energy.values()):,.0f}", ""))
    table = Table(("source", "energy", "joules", "basis"), "lrrl", tuple(rows), total=True).html()
    co2 = run.summary.co2 if run.summary else None
    grid = "Set train.energy.grid_intensity for the emissions." if co2 is None else ""
    about = "Of training: evaluation and saving are not in it, nor fans, disks and losses of the power supply."
    emitted = f"<p>{number(co2)} g of CO₂ equivalent, from the stated grid intensity.</p>" if co2 is not None else ""
    return f'{table}{emitted}<p class="muted">{about} {grid}</p>'


def _provenance(run: RunData) -> str:
    """Where the run comes from, as it was last started, and when it was resumed."""
    if not run.provenance:
        return "<p>Not recorded.</p>"
    last = run.provenance[-1]
    names = {"kernels": "kernels", "commit": "commit of the folder", "data": "prepared data"}
    skipped = ("energy", "step", "start_from")
    rows = [(names.get(name, name), str(value)) for name, value in last.items() if name not in skipped and value]
    data = run.config.get("data")
    if isinstance(data, dict) and data.get("path"):
        rows.append(("data.path", str(data["path"])))
    if isinstance(last.get("start_from"), dict):
        rows.append(("starts from", ", ".join(f"{name} {value}" for name, value in last["start_from"].items())))
    if resumed := [str(entry.get("step")) for entry in run.provenance[1:]]:
        rows.append(("resumed", f"at step {', '.join(resumed)}; first started {run.provenance[0].get('started')}"))
    return facts((str(name), value) for name, value in rows)


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line."""
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="facts">{cells}</dl>'


def layer_table(run: RunData) -> Table | None:
    """Every row of the conversion report, with the last logged ranks; None for a dense run."""
    if not run.layers:
        return None
    logged = run.sizes[-1].ranks if run.sizes else {}
    rows, dense_total, stored_total = [], 0, 0
    for layer in fold(run.layers):
        initial = join_ranks(layer.spec.inner_ranks, layer.spec) if layer.spec else ""
        ranks, stored = logged.get(f"{layer.name}.tt"), layer.stored
        if layer.spec is not None and ranks is not None:
            unpruned = layer.spec.with_ranks((1, *ranks, 1))
            stored = unpruned.numel + unpruned.rank_numel
        dense_total, stored_total = dense_total + layer.dense, stored_total + stored
        converted = layer.after != layer.before
        kind, modes = layer.after if converted else "dense", modes_of(layer.spec) if layer.spec else ""
        ratio = times(layer.dense / stored) if converted and layer.dense and stored else ""
        now = join_ranks(ranks or (), layer.spec) if logged else initial
        rows.append((layer.name, kind, modes, initial, now, f"{layer.dense:,}", f"{stored:,}", ratio, layer.note))
    biases = sum(layer.bias for layer in run.layers if layer.layer)
    if biases:
        rows.append(("biases of the layers", "dense", "", "", "", f"{biases:,}", f"{biases:,}", "", ""))
    dense_total, stored_total = dense_total + biases, stored_total + biases
    ratio = times(dense_total / stored_total if stored_total else None)
    rows.append(("whole model", "", "", "", "", f"{dense_total:,}", f"{stored_total:,}", ratio, ""))
    header = ("layer", "type", "modes", "initial ranks", "ranks", "dense parameters", "parameters", "ratio", "note")
    return Table(header, "lllllrrrl", tuple(rows), total=True)
