"""Helpers of the figures: thinning, smoothing, short names."""

import numpy as np

from comera.report.adaptation import short_names, smooth
from comera.report.plots import thin


def test_thinning_keeps_every_spike() -> None:
    y = np.sin(np.arange(10_000.0))
    y[[1234, 8000]] = 50, -50
    y[5] = np.nan
    x, kept = thin(np.arange(10_000.0), y, bins=100)
    assert len(x) <= 200
    assert (np.diff(x) > 0).all()
    assert {50.0, -50.0} <= set(kept)


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
