"""Numbers are readable."""

import math

import pytest

from comera.report.tables import count, duration, megabytes, metric, number, times


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
