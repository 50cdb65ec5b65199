"""Charts and their parts: thinning, smoothing, short names, data that JSON can hold."""

import json

import numpy as np

from comera.report.charts import Chart, Line, plots, scripts, smooth, thin
from comera.report.ranks import short_names


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
