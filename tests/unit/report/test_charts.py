"""Charts and their parts: thinning, smoothing, short names, data that JSON can hold."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import DataError
from comera.report import read_run, render
from comera.report.charts import Chart, Line, plots, scripts, smooth, thin
from comera.report.confusion import Confusion, confusion_section
from comera.report.ranks import short_names
from comera.report.tables import count, duration, megabytes, metric, number, times

from ...helpers.run_folders import Page, assert_self_contained, write_run


def test_thinning_keeps_every_spike_and_both_ends() -> None:
    y = np.sin(np.arange(10_000.0))
    y[[1234, 8000]] = 50, -50
    y[5] = np.nan
    kept = thin(y, 200)
    assert len(kept) <= 200
    assert (np.diff(kept) > 0).all()
    assert {0, 1234, 8000, 9999} <= set(kept)
    assert len(thin(y[:200], 200)) == 200


def test_smoothing_is_a_mean_without_lag() -> None:
    line = np.arange(600.0)
    np.testing.assert_allclose(smooth(line)[10:-10], line[10:-10])
    holes = np.where(np.arange(600) % 7 == 0, np.nan, 3.0)
    np.testing.assert_allclose(smooth(holes), 3.0)
    np.testing.assert_array_equal(smooth(np.array([1.0, np.nan])), [1.0, np.nan])


def test_names_lose_their_common_prefix() -> None:
    assert short_names(["bert.encoder.0.up.tt", "bert.encoder.0.down.tt"]) == ["0.up", "0.down"]
    assert short_names(["bert.up.tt"]) == ["bert.up"]
    assert short_names(["a" * 30 + "b" * 30]) == ["a" * 23 + "…" + "b" * 24]


def test_data_of_a_chart_is_strict_json_that_no_text_can_leave() -> None:
    line = Line("</script>", "blue", {"steps": [1, 2, 3]}, [1.23456789, float("nan"), float("inf")])
    html = Chart("<b>", "<i>", {"steps": "steps"}, [line], {"</script>": 2.0}).html()
    assert html.count("<script") == html.count("</script>") == 1
    assert "<b>" not in html
    assert "<i>" not in html
    data = json.loads(html.partition('json">')[2].partition("</script>")[0], parse_constant=lambda name: 1 / 0)
    assert data["lines"][0]["y"] == [1.23457, None, None]
    assert data["lines"][0]["name"] == "</script>"


def test_the_choice_of_an_axis_is_there_where_charts_have_one() -> None:
    line = Line("a", "blue", {"steps": [1], "time": [2]}, [3])
    one, two = (Chart("t", "", axes, [line]) for axes in ({"steps": "steps"}, {"steps": "steps", "time": "s"}))
    assert "fieldset" not in plots([one])
    assert plots([one, two]).count('type="radio"') == 2
    assert plots([]) == ""


def test_the_library_comes_with_its_license() -> None:
    text = scripts()
    assert "Copyright (c) 2022 Leon Sorokin" in text
    assert "uPlot (v1.6.32)" in text
    assert text.count("<script>") == text.count("</script>") == 2


# --- the confusion matrix ---------------------------------------------------------------------------------------------


COUNTS = {"held-out": [[8, 2], [0, 10]], "test": [[120_000, 0], [1, 2_500_000]]}


def write(folder: Path, content: Any) -> Path:
    run = write_run(folder / "run")
    (run / "confusion.json").write_text(json.dumps(content))
    return run


def test_the_page_shows_counts_shares_and_what_follows_for_each_label(tmp_path: Path) -> None:
    run = write(tmp_path, {"labels": ["<b>bad", "good"], "counts": COUNTS})
    page = Page(render(run))
    assert_self_contained(page)
    assert page.source.count('<svg class="confusion" role="img"') == 2
    assert "<b>bad" not in page.source
    for shown in ("<b>bad answered as good: 2, 20.0 %", "120k", "2.5M", "20 examples: a row for each label"):
        assert shown in page.text
    # of label 0: 8 answers, all right, of 10 examples; of label 1: 10 of 12 answers are right
    assert "<b>bad10810080.088.9" in page.text.replace("\n", "")
    assert "good101283.310090.9" in page.text.replace("\n", "")


def test_of_many_labels_the_most_mistaken_are_drawn() -> None:
    matrix = np.diag(np.full(40, 5))
    matrix[39, 38] = 3
    text = confusion_section(Confusion(tuple(f"label {k}" for k in range(40)), {"held-out": matrix}))
    assert text.count("<rect ") == 25 * 25
    assert "Of 40 labels, the 25 that are mistaken most often." in text
    assert "label 39 answered as label 38: 3, 37.5 %" in text
    assert text.count("<tr>") == 41  # every label has a row in the table
    empty = confusion_section(Confusion(("a", "b"), {"test": np.array([[0, 0], [0, 3]])}))
    assert "a answered as a: 0, 0.0 %" in empty
    assert "–" in empty  # neither asked for nor answered: no precision


@pytest.mark.parametrize(
    "content",
    [[], {}, {"labels": ["a"], "counts": {"test": [[1, 2]]}}, {"labels": ["a"], "counts": {"test": [[-1]]}},
     {"labels": ["a"], "counts": {"test": [["x"]]}}, {"labels": 3, "counts": {}}],
)  # fmt: skip
def test_a_damaged_matrix_is_said(content: Any, tmp_path: Path) -> None:
    run = write(tmp_path, content)
    with pytest.raises(DataError, match=r"confusion\.json: expected the counts of a confusion matrix"):
        read_run(run)
    assert "expected the counts of a confusion matrix" in Page(render(run)).text


# --- numbers are readable ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "∞"),
        (0, "0.00"),
        (0.0567, "0.0567"),
        (1e-9, "0.00000"),
        (6.7, "6.70"),
        (43.21, "43.2"),
        (361.2, "361"),
        (12345.6, "12,346"),
        (-2.5, "-2.50"),
    ],
)
def test_number(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_units() -> None:
    assert [count(n) for n in (7, 1500, 66.9e6, 2e9)] == ["7", "1.50 k", "66.9 M", "2.00 G"]
    assert [megabytes(n) for n in (0, 256 * 2**20)] == ["–", "256"]
    assert [times(r) for r in (None, 99.4, math.inf)] == ["–", "99.4×", "∞×"]
    assert [metric("accuracy", 0.625, " %"), metric("auc", 0.7501), metric("accuracy", None)] == [
        "62.5 %",
        "0.750",
        "–",
    ]
    assert [duration(s) for s in (59.94, 1800, 36000)] == ["59.9 s", "30.0 min", "10.0 h"]
