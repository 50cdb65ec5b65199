"""Which TT-matrix each table gets from a budget: it fits, large tables give most, and nothing stays unused."""

from __future__ import annotations

import pytest

from comera.errors import ConfigError
from comera.recipes.dlrm.criteo import KAGGLE_TABLES
from comera.recipes.dlrm.table_budget import LEAST_RANK, fit_tables
from comera.tt.format import spec_size
from comera.tt.spec import TTMSpec


def stored(specs: list[TTMSpec | None], sizes: tuple[int, ...], dim: int) -> int:
    return sum(spec_size(spec) if spec else rows * dim for spec, rows in zip(specs, sizes, strict=True))


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("ratio", [2.0, 20.0, 200.0, 1000.0])
@pytest.mark.parametrize("order", [None, 2, 3])
def test_the_budget_holds_and_is_used(dim: int, ratio: float, order: int | None) -> None:
    specs = fit_tables(KAGGLE_TABLES, dim, ratio=ratio, min_rows=10_000, order=order)
    budget = dim * sum(KAGGLE_TABLES) / ratio
    least = 0.9 if ratio <= 200 else 0.8  # steps of a rank are large where ranks are small
    assert least * budget < stored(specs, KAGGLE_TABLES, dim) <= budget
    for spec, rows in zip(specs, KAGGLE_TABLES, strict=True):
        assert spec is None or (spec.shape == (rows, dim) and spec_size(spec) < rows * dim)
        assert spec is None or order is None or spec.order == order
        assert (spec is None) >= (rows < 10_000)


def test_two_cores_at_a_common_rank_where_the_budget_allows_them() -> None:
    specs = [spec for spec in fit_tables(KAGGLE_TABLES, 128, ratio=200, min_rows=10_000) if spec]
    assert len(specs) == 10
    assert {spec.order for spec in specs} == {2}
    ranks = [spec.inner_ranks[0] for spec in specs]
    assert max(ranks) - min(ranks) <= 2


def test_a_tight_budget_takes_more_cores_before_it_takes_ranks_below_the_least() -> None:
    specs = [spec for spec in fit_tables(KAGGLE_TABLES, 16, ratio=1000, min_rows=10_000) if spec]
    assert all(spec.order > 2 for spec in specs)
    assert all(min(spec.inner_ranks) >= LEAST_RANK for spec in specs if spec.order == 3)


def test_a_table_that_its_share_covers_stays_dense_and_leaves_the_rest_to_others() -> None:
    sizes = (100, 90_000)
    small, large = fit_tables(sizes, 8, ratio=2, min_rows=10)
    assert small is None
    assert large is not None
    assert stored([small, large], sizes, 8) == pytest.approx(8 * sum(sizes) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "ratio", "said"),
    [
        ((900, 5000), 10.0, r"compress.ratio 10 leaves 0 parameters for the table of 5,000 rows"),
        ((100, 5000), 50.0, r"or lower compress.min_rows \(1,000\), below which tables stay dense"),
        ((*(999,) * 1000, 1000), 2.0, r"no compress.ratio leaves enough; or lower compress.min_rows"),
        ((100, 900), 2.0, r"compress.min_rows: no table has 1,000 rows or more, the largest has 900"),
    ],
)
def test_a_budget_that_cannot_hold_is_an_error(sizes: tuple[int, ...], ratio: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_tables(sizes, 16, ratio=ratio, min_rows=1000)


@pytest.mark.parametrize(("sizes", "ratio"), [((900, 5000), 10.0), ((100, 5000), 50.0), (KAGGLE_TABLES, 1e6)])
def test_a_budget_that_is_too_small_names_the_largest_ratio(sizes: tuple[int, ...], ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"compress\.ratio can be [\d.]+ at most") as refused:
        fit_tables(sizes, 16, ratio=ratio, min_rows=1000)
    largest = float(str(refused.value).split("can be ")[1].split()[0])
    assert 1 < largest < ratio
    assert any(fit_tables(sizes, 16, ratio=largest, min_rows=1000))
    with pytest.raises(ConfigError, match="can be"):
        fit_tables(sizes, 16, ratio=1.05 * largest, min_rows=1000)
