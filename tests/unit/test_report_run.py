"""Run folders, whole and partial, become typed values, figures, one page, and a comparison."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

import comera.report
from comera.convert import LayerRow
from comera.errors import DataError
from comera.report import compare, read_run, render
from comera.report.layers import layer_table
from comera.report.plots import loss_over_time, ranks_over_time, size_over_steps
from comera.report.style import styled
from comera.train.metrics import Summary, to_json
from comera.tt.shapes import tt_spec, ttm_spec

TT = tt_spec(64, 48, order=4, rank=6)
TTM = ttm_spec(500, 64, order=3, rank=5)
NUMBERS = TT.numel + TT.rank_numel + TTM.numel + TTM.rank_numel
DENSE = TT.dense_numel + TTM.dense_numel


def write_run(folder: Path, *, method: str = "comera", steps: int = 60, evals: bool = True, ended: bool = True) -> Path:
    """A small run as `fit` leaves it: ranks of the first chain fall to half, one prune in the middle."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"recipe: code-lm\nmethod: {method}\ntrain:\n  steps: {steps}\n")
    chains = {"embed.tt": TTM, "blocks.0.up.tt": TT} if method == "comera" else {}
    stored = NUMBERS if chains else DENSE
    rows: list[dict[str, Any]] = []
    for step in range(steps + 1):
        at = {"step": step, "time": 20.0 * step}
        loss, tokens = 4 + 5 * 0.95**step, 1000 * step
        if step:
            rows.append(
                {"kind": "train", **at, "loss": loss, "tokens": tokens, "step_time": 20.0, "lr": {"dense": 0.1}}
            )
        if step == steps // 2 and step and chains:
            rows.append({"kind": "prune", **at, "before": stored + 9, "after": stored})
        if evals and step % 20 == 0 and step:
            rows.append({"kind": "eval", **at, "loss": loss + 0.1, "tokens": tokens})
        if step % 20 == 0:
            ranks = {name: [max(1, r - r * step // (2 * max(steps, 1))) for r in s.bonds] for name, s in chains.items()}
            size = {"total": stored + 100, "tensorized": stored if chains else 0, "active": stored // 2}
            rows.append({"kind": "size", **at, **size, "ratio": 7.5, "tensorized_ratio": 8.0, "ranks": ranks})
    (folder / "metrics.jsonl").write_text("".join(f"{to_json(row)}\n" for row in rows))
    layers = [
        LayerRow(name.removesuffix(".tt"), "Linear", "TTLinear", s, s.dense_numel, s.numel + s.rank_numel, None, "")
        for name, s in chains.items()
    ]
    if chains:
        layers.append(LayerRow("head", "Linear", "TTMProjection", TTM, 0, 0, None, "tied to embed"))
        layers.append(LayerRow("position", "Embedding", "Embedding", None, 100, 100, None, "left dense by an override"))
    (folder / "layers.json").write_text(json.dumps([layer.to_dict() for layer in layers]))
    if ended:
        Summary(
            method=method,
            recipe="code-lm",
            steps=steps,
            time=20.0 * steps,
            tokens=1000 * steps,
            step_time=0.25 if chains else 1.0,
            peak_memory=2**28,
            held_out_loss=4.5 if evals else None,
            best_held_out_loss=4.5 if evals else None,
            parameters=stored + 100,
            size_bytes=4 * (stored + 100),
            tensorized=stored if chains else 0,
            tensorized_ratio=8.0 if chains else 1.0,
            ratio=7.5,
            stopped="time",
        ).write(folder / "summary.json")
    return folder


class Page(HTMLParser):
    """What a page holds; raises on tags that do not match."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data") and value]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_self_contained(page: Page) -> None:
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in page.source
    assert page.source.count("url(") == page.source.count("url(#")


def png_size(path: Path) -> tuple[int, ...]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, with its report."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run")
    assert render(run) == run / "report.html"
    return run


def test_page_of_a_whole_run_shows_everything_and_needs_nothing(whole: Path) -> None:
    page = Page(whole / "report.html")
    assert_self_contained(page)
    assert page.tags.count("svg") == page.tags.count("figcaption") == 4
    shown = ["code-lm, comera", "Held-out loss", "4.330", "60.0 k", "250 ms", "256 MB", "7.50× smaller", "time was up"]
    assert [text for text in shown if text not in page.text] == []
    assert "steps: 60" in page.text
    assert page.tags.count("tr") == 1 + 4 + 1  # head, layers, total
    for name in ("loss_steps", "loss_time", "size_steps", "ranks"):
        assert png_size(whole / f"{name}.png") > (800, 300)
    assert not list(whole.glob(".*"))


def test_page_follows_dark_mode_on_screen_and_phones(whole: Path) -> None:
    source = Page(whole / "report.html").source
    assert "@media screen and (prefers-color-scheme: dark)" in source
    assert "@media print" in source
    assert 'name="viewport"' in source
    used = {part.split(")")[0] for part in source.split("var(")[1:]} - {"--sans", "--mono"}
    assert {"--ink", "--blue", "--orange"} <= used
    assert {source.count(f"{variable}:") for variable in used} == {2}  # defined for light and for dark


def test_page_escapes_what_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: <script>alert(1)</script>\n")
    page = Page(render(tmp_path))
    assert "script" not in page.tags
    assert page.text.count("<script>alert(1)</script>") == 3  # title, heading, configuration


def test_killed_run_with_a_torn_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", evals=False, ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 61, "ti')
    data = read_run(run)
    assert (len(data.train), data.evals, data.summary, data.method) == (60, (), None, "comera")
    page = Page(render(run))
    assert "no summary" in page.text
    assert "Held-out loss" not in page.text
    assert page.tags.count("svg") == 4


def test_dense_run_has_no_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", method="dense")
    page = Page(render(run))
    assert page.tags.count("svg") == 3
    assert not (run / "ranks.png").exists()
    assert "No layer is compressed" in page.text
    assert "Tensorized layers" not in page.text


@pytest.mark.parametrize("method", ["comera", "dense"])
def test_single_step(tmp_path: Path, method: str) -> None:
    page = Page(render(write_run(tmp_path / "run", method=method, steps=1, ended=False)))
    assert_self_contained(page)
    assert "8.75" in page.text


def test_run_killed_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: code-lm\n")
    assert "No step was logged yet" in Page(render(tmp_path)).text


def test_loss_that_is_not_finite_is_left_out_of_the_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 61, "time": 1220.0, "loss": null, "tokens": 1, "step_time": 1.0}\n')
    data = read_run(run)
    assert np.isnan(data.train[-1].loss)
    with styled():
        figure = loss_over_time(data)
    assert figure is not None
    assert all(np.isfinite(figure.axes[0].get_ylim()))


def _no_folder(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


def _foreign(run: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (run / name).unlink()


def _append(text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(text)

    return damage


def _write(name: str, text: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        (run / name).write_text(text)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_folder, "expected a run folder at .* found nothing"),
        (_foreign, "neither config.yaml nor metrics.jsonl"),
        (_append("garbage\n{}\n"), "line 69 is not JSON"),
        (_append('{"step": 1}\n'), "line 69: expected a record with a 'kind', got dict"),
        (_append('{"kind": "eval", "step": 1}\n'), "expected the field 'time' in a 'eval' record"),
        (_append('{"kind": "prune", "step": "x", "time": 1, "before": 1, "after": 1}\n'), "value of another kind"),
        (_write("config.yaml", "a: [1"), "is not YAML"),
        (_write("config.yaml", "- 1"), "expected a mapping of settings, got list"),
        (
            _write("layers.json", '[{"name": "x"}]'),
            r"as .comera train. writes it \(KeyError\('spec'\)\)",
        ),
        (_write("layers.json", "{"), "expected a list of layers"),
        (_write("summary.json", '{"steps": 1}'), "expected the summary of a run"),
    ],
)
def test_malformed_folders_say_where_and_get_no_page(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    run = write_run(tmp_path / "run")
    damage(run)
    with pytest.raises(DataError, match=message):
        render(run)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".png", ".html")]


def test_records_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = read_run(run).points
    _append('{"kind": "weather", "step": 1}\n')(run)
    assert read_run(run).points == before


def test_matplotlib_stays_as_it_was(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    with styled():
        assert dict(matplotlib.rcParams) != before
        ranks_over_time(read_run(write_run(tmp_path / "run")))
    assert dict(matplotlib.rcParams) == before
    modules = Path(comera.report.__file__).parent.glob("*.py")
    assert not any("pyplot" in path.read_text("utf-8") for path in modules)


def test_heatmap_holds_the_shares_of_the_ranks(tmp_path: Path) -> None:
    with styled():
        figure = ranks_over_time(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    over_time, bonds = (np.asarray(axes.images[0].get_array()) for axes in figure.axes[:2])
    assert np.all(over_time[:, 0] == 1)
    last = [sum(r - r // 2 for r in spec.bonds) / sum(spec.bonds) for spec in (TTM, TT)]
    np.testing.assert_allclose(over_time[:, -1], last)
    assert np.all(np.diff(over_time) <= 0)
    cells = [int(text.get_text()) for text in figure.axes[1].texts]
    assert cells == [r - r // 2 for spec in (TTM, TT) for r in spec.bonds]
    assert np.isnan(bonds[0, len(TTM.bonds) :].astype(float)).all()
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["embed", "blocks.0.up"]


def test_size_is_drawn_in_megabytes(tmp_path: Path) -> None:
    with styled():
        figure = size_over_steps(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    first = [np.asarray(line.get_ydata(), float)[0] * 2**20 for line in figure.axes[0].lines[:3]]
    np.testing.assert_allclose(first, [4 * (NUMBERS + 100), 4 * NUMBERS, 4 * (NUMBERS // 2)])


def test_time_axis_takes_the_unit_that_reads_well(tmp_path: Path) -> None:
    with styled():
        figure = loss_over_time(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xlabel() == "training time, min"
    assert axes.get_xlim()[1] == pytest.approx(20.0, rel=0.02)  # 60 steps of 20 s
    assert [text.get_text().split()[0] for text in axes.texts] == ["▾", "train", "held-out"]


def test_layers_are_counted_with_the_ranks_of_now(tmp_path: Path) -> None:
    table = layer_table(read_run(write_run(tmp_path / "run")))
    assert table is not None
    half = TTM.with_ranks((1, *(r - r // 2 for r in TTM.bonds), 1))
    embed, _, head, position, total = table.rows
    assert embed[3:5] == ("-".join(map(str, TTM.bonds)), "-".join(map(str, half.bonds)))
    assert embed[6] == f"{half.numel + half.rank_numel:,}"
    assert head[6:] == ("0", "", "tied to embed")
    assert position[1:] == ("dense", "", "", "", "100", "100", "", "left dense by an override")
    assert total[5] == f"{DENSE + 100:,}"


def cells(table: str) -> list[dict[str, str]]:
    """The first Markdown table of a text: a dictionary a row."""
    lines = table.split("\n\n")[0].splitlines()
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| --")
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_compare_writes_table_figure_and_page(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    text = compare(runs, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.html", "compare.json", "compare.md", "compare.png"}
    dense, comera = cells(text)
    assert {"accuracy %", "epoch", "examples"}.isdisjoint(dense)  # columns that no run fills
    assert [dense[c] for c in ("method", "tensorized ratio", "step ms", "speed", "peak MB")] == [
        *("dense", "–", "1,000", "1.00×", "256")
    ]
    assert [comera[c] for c in ("method", "tensorized ratio", "step ms", "speed", "peak MB")] == [
        *("comera", "8.00×", "250", "4.00×", "256")
    ]
    assert [comera[c] for c in ("steps", "tokens", "held-out loss")] == ["60", "60.0 k", "4.500"]
    assert text in (tmp_path / "out" / "compare.md").read_text("utf-8")
    rows = json.loads((tmp_path / "out" / "compare.json").read_text("utf-8"))
    assert [(row["name"], row["held_out_loss"]) for row in rows] == [("dense", 4.5), ("comera", 4.5)]
    assert png_size(tmp_path / "out" / "compare.png") == (1600, 600)
    page = Page(tmp_path / "out" / "compare.html")
    assert_self_contained(page)
    assert (page.tags.count("svg"), page.tags.count("table")) == (1, 2)


def test_compare_shows_accuracy_epochs_ranks_of_a_block_and_the_trade_of_size(tmp_path: Path) -> None:
    runs = {name: write_run(tmp_path / name, method=name) for name in ("dense", "comera")}
    for name, accuracy in (("dense", 0.622), ("comera", 0.633)):
        summary = Summary.read(runs[name] / "summary.json")
        assert summary is not None
        more = replace(summary, metrics={"accuracy": accuracy}, epoch_time=90.0, examples=1200)
        more.write(runs[name] / "summary.json")
    text = compare(runs, tmp_path / "out")
    dense, comera = cells(text)
    assert (dense["accuracy %"], comera["accuracy %"]) == ("62.2", "63.3")
    assert (comera["epoch"], comera["examples"]) == ("90.0 s", "1,200")
    _, title, ranks = text.split("\n\n")
    assert title == "Ranks of one block, blocks.0:"
    (row,) = cells(ranks)
    half = "-".join(str(r - r // 2) for r in TT.bonds)
    assert row == {"chain": "up", "at first": "-".join(map(str, TT.bonds)), "after comera": half}
    assert png_size(tmp_path / "out" / "pareto.png")[0] > 500
    assert Page(tmp_path / "out" / "compare.html").tags.count("svg") == 2


def test_compare_works_without_a_dense_run_and_without_evaluations(tmp_path: Path) -> None:
    (row,) = cells(compare({"only": write_run(tmp_path / "run", evals=False)}, tmp_path / "out"))
    assert row["method"] == "only"
    assert {"held-out loss", "speed"}.isdisjoint(row)
    assert "| a\\|b " in compare({"a|b": tmp_path / "run"}, tmp_path / "out")


def test_compare_of_a_run_that_has_not_ended_writes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    with pytest.raises(DataError, match=r"'b' in .* has no summary.json"):
        compare({"a": write_run(tmp_path / "whole"), "b": run}, tmp_path / "out")
    summary = Summary.read(tmp_path / "whole" / "summary.json")
    assert summary is not None
    replace(summary, stopped="interrupted").write(run / "summary.json")
    with pytest.raises(DataError, match=r"'b' in .* was interrupted: resume it"):
        compare({"b": run}, tmp_path / "out")
    with pytest.raises(DataError, match="at least one run"):
        compare({}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
