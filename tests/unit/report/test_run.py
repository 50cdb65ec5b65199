"""Run folders, finished or not, become typed values, charts and a page."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from comera.errors import DataError
from comera.report import read_run, render
from comera.report.curves import charts_of
from comera.report.html import layer_table
from comera.report.ranks import ranks_section

from ...helpers.run_folders import DENSE, PARAMETERS, TT, TTM, Page, assert_self_contained, late_run, records, write_run

RATES, ENERGY = ("Learning rates", "Gradient norm"), "Energy, estimated, Wh"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with its report."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run")
    assert render(run) == run / "report.html"
    return run


def test_page_of_a_finished_run_is_complete_and_self_contained(finished: Path) -> None:
    page = Page(finished / "report.html")
    assert_self_contained(page)
    assert list(page.charts) == ["Loss", "Size, MB", *RATES, "Time of a step, ms", "Peak memory, MB", ENERGY]
    assert page.tags.count("svg") == len(TTM.inner_ranks) + len(TT.inner_ranks)
    shown = [
        "code-lm, comera",
        "Held-out loss",
        "4.330",
        "60.0 k",
        "250 ms",
        "256 MB",
        "7.50× smaller",
        "Finished at its time limit",
    ]
    assert [text for text in shown if text not in page.text] == []
    assert "steps: 60" in page.text
    rows = {
        "layers": 1 + 4 + 1,
        "ranks": 1 + 2,
        "time": 1 + 3 + 1,
        "memory": 1 + 3 + 1,
        "energy": 1 + 1 + 1,
    }  # head, rows, total
    assert page.tags.count("tr") == sum(rows.values())
    assert "details" in page.tags
    assert page.text.count("1.20 Wh (estimated)") == 2  # source, sum
    assert "Energy1.20 Whestimated" in page.text
    assert [path.name for path in finished.iterdir() if path.suffix in (".png", ".html")] == ["report.html"]
    assert not list(finished.glob(".*"))


def test_the_page_begins_with_one_sentence_and_a_row_of_tiles_and_folds_the_configuration(finished: Path) -> None:
    source = Page(finished / "report.html").source
    (verdict,) = re.findall(r'<p class="verdict">(.*?)</p>', source)
    assert verdict == "Held-out loss is 4.33 after 60 steps, with no simpler model to hold it against."
    (tiles,) = re.findall(r'<dl class="tiles">(.*?)</dl>', source, re.DOTALL)
    names = re.findall("<dt>(.*?)</dt>", tiles)
    assert names == ["Held-out loss", "Steps", "Tokens seen", "Step time", "Model", "Peak memory", "Energy"]
    assert "7.50× smaller than dense, its compressed layers 8.00×" in tiles
    first = [source.index(mark) for mark in ('class="verdict"', 'class="tiles"', "<h2>")]
    assert first == sorted(first)
    folded = re.findall(r"<details><summary>([^<]*)</summary>\n?<pre>(.*?)</pre></details>", source, re.DOTALL)
    assert folded == [("config.yaml, 4 lines", "recipe: code-lm\nmethod: comera\ntrain:\n  steps: 60")]


def test_page_follows_dark_mode_on_screen_and_phones(finished: Path) -> None:
    source = Page(finished / "report.html").source
    assert "@media screen and (prefers-color-scheme: dark)" in source
    assert "@media print" in source
    assert 'name="viewport"' in source
    used = {part.split(")")[0] for part in source.partition("<script")[0].split("var(")[1:]} - {"--sans", "--mono"}
    used |= {
        f"--{line['color']}" for chart in Page(finished / "report.html").charts.values() for line in chart["lines"]
    }
    assert {"--ink", "--blue", "--orange"} <= used
    assert {source.count(f"{variable}:") for variable in used} == {2}  # defined for light and for dark


def test_page_escapes_text_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    evil = "</script><script>alert(1)</script>"
    (run / "config.yaml").write_text(f"recipe: {evil}\ndata: {{path: '{evil}'}}\n")
    (run / "summary.json").unlink()
    (run / "references.json").write_text(json.dumps({"loss": {evil: 3.0}}))
    (run / "provenance.json").write_text(json.dumps([{"command": evil, "energy": {"cpu": evil}, "machine": evil}]))
    page = Page(render(run))
    assert evil not in page.source
    assert page.text.count(evil) >= 6  # title, heading, verdict, provenance, configuration
    assert page.charts["Loss"]["levels"] == {evil: 3.0}


def test_killed_run_with_a_torn_last_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", evals=False, ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 61, "ti')
    data = read_run(run)
    assert (len(data.train), data.evals, data.summary, data.method) == (60, (), None, "comera")
    page = Page(render(run))
    assert "no summary" in page.text
    assert "There was no evaluation on held-out data yet" in page.text
    assert [line["name"] for line in page.charts["Loss"]["lines"]] == ["train, each step logged", "train, moving mean"]


def test_dense_run_has_no_ranks(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", method="dense")
    page = Page(render(run))
    assert (page.tags.count("svg"), page.tags.count("details")) == (0, 1)  # the configuration
    assert "No layer is compressed" in page.text
    assert "compressed layers" not in page.text


@pytest.mark.parametrize("method", ["comera", "dense"])
def test_single_step(tmp_path: Path, method: str) -> None:
    page = Page(render(write_run(tmp_path / "run", method=method, steps=1, ended=False)))
    assert_self_contained(page)
    assert "8.75" in page.text


def test_run_killed_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: code-lm\n")
    assert "No steps yet" in Page(render(tmp_path)).text


def test_charts_skip_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ended=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 61, "time": 1220.0, "loss": null, "tokens": 1, "step_time": 1.0}\n')
    assert np.isnan(read_run(run).train[-1].loss)
    assert Page(render(run)).charts["Loss"]["lines"][0]["y"][-1] is None


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
    [(_no_folder, "expected a run folder at .* found nothing"), (_foreign, "neither config.yaml")],
)
def test_folders_without_a_run_get_no_page(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    run = write_run(tmp_path / "run")
    damage(run)
    with pytest.raises(DataError, match=message):
        render(run)
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_append("garbage\n{}\n"), "line 69 is not JSON"),
        (_append('{"step": 1}\n'), "line 69: expected a record with a 'kind', got dict"),
        (_append('{"kind": "eval", "step": 1}\n'), "expected the field 'time' in a 'eval' record"),
        (_append('{"kind": "prune", "step": "x", "time": 1, "before": 1, "after": 1}\n'), "value that cannot be"),
        (_write("config.yaml", "a: [1"), "is not valid YAML"),
        (_write("config.yaml", "- 1"), "expected a mapping of settings, got list"),
        (_write("layers.json", '[{"name": "x"}]'), "as `comera train` writes it (KeyError('spec'))"),
        (_write("layers.json", "{"), "expected a list of layers"),
        (_write("summary.json", '{"steps": 1}'), "expected the summary of a run"),
        (_write("provenance.json", "{}"), "expected a list of objects, got dict"),
        (_write("provenance.json", "[["), "provenance.json is not JSON"),
    ],
)
def test_a_damaged_run_shows_what_is_left_and_what_is_not(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    run = write_run(tmp_path / "run")
    damage(run)
    with pytest.raises(DataError, match=re.escape(message)):
        read_run(run)
    page = Page(render(run))
    assert "Not shown, because it cannot be read: " in page.text
    assert message in page.text
    assert next(iter(page.charts)) == "Loss"
    assert len(page.charts["Loss"]["lines"][0]["y"]) == 60
    assert_self_contained(page)


def test_every_unreadable_line_of_the_metrics_is_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    _append("x\n" * 5 + '{"kind": "train", "step": 61, "time": 1, "loss": 1, "tokens": 1, "step_time": 1}\n')(run)
    page = Page(render(run))
    assert "4 further lines cannot be read" in page.text
    assert "61" in page.text


def test_records_of_other_kinds_are_skipped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    before = read_run(run).points
    _append('{"kind": "weather", "step": 1}\n')(run)
    assert read_run(run).points == before


def test_rank_strips_show_each_inner_rank_over_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    strips = re.findall(r'<svg class="strip".*?</svg> ([^<]*)</td>', section := ranks_section(read_run(run)))
    halved = [f"{r} → {r - r // 2}" for spec in (TTM, TT) for r in spec.inner_ranks]
    assert strips == halved
    for strip in re.findall(r'<svg class="strip".*?</svg>', section):
        widths = [int(width) for width in re.findall(r'width="(\d+)"', strip)]
        shares = [float(share) for share in re.findall(r'fill-opacity="([\d.]+)"', strip)]
        assert sum(widths) == 60
        assert shares[0] == 0.9
        assert shares == sorted(shares, reverse=True)
    total = sum(sum(spec.inner_ranks) for spec in (TTM, TT))
    assert f"Ranks of 2 tensor trains: their sum went from {total} to " in section
    assert "<details open>" in section
    assert ranks_section(read_run(write_run(tmp_path / "dense", method="dense"))) == ""


@pytest.mark.parametrize(
    ("late", "begins", "why"),
    [
        ({"target_size": None}, False, "no target size was set (train.late.target_size)."),
        ({"target_size": 0.5}, False, "the late stage towards train.late.target_size = 0.5 did not begin."),
        ({"target_size": 0.5}, True, "although the late stage towards train.late.target_size = 0.5 began at step 40."),
        (None, False, ""),  # a configuration that is lost
    ],
)
def test_ranks_that_stay_are_a_line_instead_of_a_chart(
    tmp_path: Path, late: dict[str, object] | None, begins: bool, why: str
) -> None:
    run = (late_run if begins else write_run)(tmp_path / "run")
    (run / "config.yaml").write_text(json.dumps({"recipe": "lm", "train": {"late": late} if late else {}}))
    rows = records(run)

    def shown(last: int) -> str:
        for row in rows:
            if row["kind"] == "size":
                row["ranks"] = {"a.tt": [1000], "b.tt": [1000 if row["step"] < 60 else last]}
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return ranks_section(read_run(run))

    link = ", " if why.startswith("although") else ": " if why else "."
    assert shown(980) == f"<p>Ranks stayed at 2,000 → 1,980{link}{why}</p>"
    assert "<svg" in shown(979)


def test_many_tensor_trains_are_folded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=20)
    rows = records(run)
    for row in rows:
        if row["kind"] == "size":
            row["ranks"] = {f"blocks.{k}.up.tt": [8, 12, 8 - row["step"] // 10] for k in range(38)}
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    section = ranks_section(read_run(run))
    assert "<details><summary>Ranks of 38 tensor trains: their sum went from 1,064 to 988" in section
    assert section.count("<tr>") == 39


def test_a_late_stage_is_read_and_drawn(tmp_path: Path) -> None:
    run = read_run(late_run(tmp_path / "run"))
    (stage,), (rounding,) = run.stages, run.rounds
    assert (stage.step, stage.target_size, stage.target_loss, stage.size) == (40, PARAMETERS // 2, 4.6, PARAMETERS)
    assert (rounding.after, rounding.error) == (PARAMETERS // 2, 0.1)
    assert run.train[-1].stage == "late"
    assert run.evals[-1].metrics == {"accuracy": 0.46}
    charts = {chart.title: chart for chart in charts_of(run)}
    mega = run.element_bytes / 2**20
    assert charts["Loss"].levels == {"L₀, loss to keep": 4.6}
    assert [mark.name for mark in charts["Loss"].marks] == ["prune", "late stage"]
    size = charts["Size, MB"]
    assert size.levels == {"S₀, size to reach": PARAMETERS // 2 * mega}
    np.testing.assert_allclose(size.lines[-1].y, [point.size * mega for point in run.train])
    quality = charts["Size and held-out accuracy"].lines[0]
    np.testing.assert_allclose(quality.y, [0.42, 0.44, 0.46])
    assert quality.x["size"][-1] < quality.x["size"][0]
    page = Page(render(tmp_path / "run"))
    assert_self_contained(page)
    assert "46.0 %" in page.text
    assert "Target size" in page.text


def test_without_a_change_of_size_quality_over_size_is_not_drawn(tmp_path: Path) -> None:
    titles = [chart.title for chart in charts_of(read_run(write_run(tmp_path / "run", method="dense")))]
    assert "Loss" in titles
    assert not any(title.startswith("Size and") for title in titles)


def test_sizes_are_in_megabytes_and_times_in_a_readable_unit(tmp_path: Path) -> None:
    loss, size, *_ = charts_of(read_run(write_run(tmp_path / "run")))
    first = [line.y[0] * 2**20 for line in size.lines]
    np.testing.assert_allclose(first, [4 * (PARAMETERS + 100), 4 * PARAMETERS, 4 * (PARAMETERS // 2)])
    assert loss.axes == {"steps": "steps", "time": "training time, min"}
    assert loss.lines[0].x["time"][-1] == pytest.approx(20.0)  # 60 steps of 20 s
    assert [line.name for line in loss.lines] == ["train, each step logged", "train, moving mean", "held-out"]


def test_layers_are_counted_with_their_present_ranks(tmp_path: Path) -> None:
    table = layer_table(read_run(write_run(tmp_path / "run")))
    assert table is not None
    pruned = TTM.with_ranks((1, *(r - r // 2 for r in TTM.inner_ranks), 1))
    embed, _, head, position, total = table.rows
    assert embed[3:5] == ("-".join(map(str, TTM.inner_ranks)), "-".join(map(str, pruned.inner_ranks)))
    assert embed[6] == f"{pruned.numel + pruned.rank_numel:,}"
    assert head[6:] == ("0", "", "tied to embed")
    assert position[1:] == ("dense", "", "", "", "100", "100", "", "left dense by an override")
    assert total[5] == f"{DENSE + 100:,}"
