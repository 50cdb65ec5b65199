"""Run folders, finished or not, become typed values, figures and a page."""

from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import comera.report
from comera.errors import DataError
from comera.report import read_run, render
from comera.report.adaptation import objectives, pareto, ranks_over_time
from comera.report.html import layer_table
from comera.report.plots import loss_over_time, size_over_steps
from comera.report.style import styled

from ...helpers.run_folders import (
    DENSE,
    PARAMETERS,
    TT,
    TTM,
    Page,
    assert_self_contained,
    late_run,
    png_size,
    write_run,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with its report."""
    run = write_run(tmp_path_factory.mktemp("whole") / "run")
    assert render(run) == run / "report.html"
    return run


def test_page_of_a_finished_run_is_complete_and_self_contained(finished: Path) -> None:
    page = Page(finished / "report.html")
    assert_self_contained(page)
    assert page.tags.count("svg") == page.tags.count("figcaption") == 4
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
    assert page.tags.count("tr") == 1 + 4 + 1  # head, layers, total
    for name in ("loss_steps", "loss_time", "size_steps", "ranks"):
        assert png_size(finished / f"{name}.png") > (800, 300)
    assert not list(finished.glob(".*"))


def test_page_follows_dark_mode_on_screen_and_phones(finished: Path) -> None:
    source = Page(finished / "report.html").source
    assert "@media screen and (prefers-color-scheme: dark)" in source
    assert "@media print" in source
    assert 'name="viewport"' in source
    used = {part.split(")")[0] for part in source.split("var(")[1:]} - {"--sans", "--mono"}
    assert {"--ink", "--blue", "--orange"} <= used
    assert {source.count(f"{variable}:") for variable in used} == {2}  # defined for light and for dark


def test_page_escapes_text_of_the_run(tmp_path: Path) -> None:
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
    assert "No steps yet" in Page(render(tmp_path)).text


def test_figures_skip_a_loss_that_is_not_finite(tmp_path: Path) -> None:
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
        (_append('{"kind": "prune", "step": "x", "time": 1, "before": 1, "after": 1}\n'), "value that cannot be"),
        (_write("config.yaml", "a: [1"), "is not valid YAML"),
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


def test_records_of_other_kinds_are_skipped(tmp_path: Path) -> None:
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


def test_rank_figure_shows_each_inner_rank_over_time(tmp_path: Path) -> None:
    with styled():
        figure = ranks_over_time(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    positions = max(len(TT.inner_ranks), len(TTM.inner_ranks))
    for k, axes in enumerate(figure.axes[:positions]):
        share = np.asarray(axes.images[0].get_array())
        shown = [(row, spec.inner_ranks[k]) for row, spec in enumerate((TTM, TT)) if k < len(spec.inner_ranks)]
        for row, rank in shown:
            assert share[row, 0] == 1
            assert share[row, -1] == (rank - rank // 2) / rank
            assert np.all(np.diff(share[row]) <= 0)
        assert [int(text.get_text()) for text in axes.texts] == [rank - rank // 2 for _, rank in shown]
    missing = np.asarray(figure.axes[positions - 1].images[0].get_array())[0]
    assert np.isnan(missing).all() or len(TTM.inner_ranks) == positions


def test_a_late_stage_is_read_and_drawn(tmp_path: Path) -> None:
    run = read_run(late_run(tmp_path / "run"))
    (stage,), (rounding,) = run.stages, run.rounds
    assert (stage.step, stage.target_size, stage.target_loss, stage.size) == (40, PARAMETERS // 2, 4.6, PARAMETERS)
    assert (rounding.after, rounding.error) == (PARAMETERS // 2, 0.1)
    assert run.train[-1].stage == "late"
    assert run.evals[-1].metrics == {"accuracy": 0.46}
    with styled():
        figure, quality = objectives(run), pareto(run)
    assert figure is not None
    top, bottom = figure.axes
    mega = run.element_bytes / 2**20
    assert [line.get_ydata()[0] for line in top.lines if len(set(line.get_ydata())) == 1] == [4.6]
    drawn = bottom.lines[0]
    np.testing.assert_allclose(drawn.get_ydata(), [point.size * mega for point in run.train])
    assert any(np.allclose(line.get_ydata(), PARAMETERS // 2 * mega) for line in bottom.lines[1:])
    assert quality is not None
    x, y = quality.axes[0].lines[0].get_data()
    np.testing.assert_allclose(y, [0.42, 0.44, 0.46])
    assert x[-1] < x[0]
    page = Page(render(tmp_path / "run"))
    assert_self_contained(page)
    assert "46.0 %" in page.text
    assert "Target size" in page.text


def test_without_sizes_there_are_no_objectives_and_no_pareto(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", method="dense"))
    with styled():
        assert objectives(run) is None
        assert pareto(run) is None


def test_size_is_drawn_in_megabytes(tmp_path: Path) -> None:
    with styled():
        figure = size_over_steps(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    first = [np.asarray(line.get_ydata(), float)[0] * 2**20 for line in figure.axes[0].lines[:3]]
    np.testing.assert_allclose(first, [4 * (PARAMETERS + 100), 4 * PARAMETERS, 4 * (PARAMETERS // 2)])


def test_time_axis_has_a_readable_unit(tmp_path: Path) -> None:
    with styled():
        figure = loss_over_time(read_run(write_run(tmp_path / "run")))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_xlabel() == "training time, min"
    assert axes.get_xlim()[1] == pytest.approx(20.0, rel=0.02)  # 60 steps of 20 s
    assert [text.get_text().split()[0] for text in axes.texts] == ["▾", "train", "held-out"]


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
