"""Chooses the format of each embedding table from a size budget for all tables together.

Small tables stay dense. Large ones share the rest of the budget in proportion to √rows, which is how the parameters of
two cores grow with the rows at fixed rank: larger tables are compressed more, and none takes all. Within its share, a
table takes the fewest cores that allow LEAST_RANK (two give the most accurate table and the fastest lookup), and then
the largest rank."""

from bisect import bisect_right
from collections.abc import Sequence
from math import floor, log10, sqrt

from comera.errors import ConfigError
from comera.tt.format import spec_size
from comera.tt.shapes import ttm_spec
from comera.tt.spec import TTMSpec

ORDERS = (2, 3, 4)
LEAST_RANK = 8


def fit_tables(
    sizes: Sequence[int], dim: int, *, ratio: float, min_rows: int, order: int | None = None
) -> list[TTMSpec | None]:
    """The TT-matrix of each table, or None if it stays dense; together they store at most 1/ratio of the parameters.
    sizes: rows of the tables, each `dim` wide. min_rows: smaller tables stay dense, and so do larger ones that fit into
    their share. order: cores of every TT-matrix; None chooses for each table. Raises ConfigError if no TT-matrix fits
    the budget, with the largest ratio at which all do."""
    orders = ORDERS if order is None else (order,)
    if max(sizes) < min_rows:
        raise ConfigError(
            f"compress.min_rows: no table has {min_rows:,} rows or more, the largest has {max(sizes):,}: lower it"
        )
    found = _allocate(sizes, dim, ratio, min_rows, orders)
    if isinstance(found, list):
        return found
    rows, share = found
    low, high = 1.0, ratio
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        fits = isinstance(_allocate(sizes, dim, middle, min_rows, orders), list)
        low, high = (middle, high) if fits else (low, middle)
    largest = _rounded_down(low)
    at_most = f"compress.ratio can be {largest:g} at most" if largest > 1 else "no compress.ratio leaves enough"
    raise ConfigError(
        f"compress.ratio {ratio:g} leaves {max(share, 0):,} parameters for the table of {rows:,} rows, too few for its "
        f"smallest TT-matrix: {at_most}; or lower compress.min_rows ({min_rows:,}), below which tables stay dense"
    )


def _rounded_down(ratio: float) -> float:
    """To three digits, which a message can show."""
    unit = 10.0 ** (floor(log10(ratio)) - 2)
    return floor(ratio / unit) * unit


def _allocate(
    sizes: Sequence[int], dim: int, ratio: float, min_rows: int, orders: Sequence[int]
) -> list[TTMSpec | None] | tuple[int, int]:
    """As `fit_tables`, or the rows and the share of the first table whose smallest TT-matrix does not fit."""
    specs: list[TTMSpec | None] = [None] * len(sizes)
    left = int(dim * sum(sizes) / ratio) - dim * sum(rows for rows in sizes if rows < min_rows)
    large = sorted((rows, table) for table, rows in enumerate(sizes) if rows >= min_rows)
    weight = sum(sqrt(rows) for rows, _ in large)
    for rows, table in large:  # the smallest first: the larger ones get what they leave
        share = int(left * sqrt(rows) / weight)
        weight -= sqrt(rows)
        if share >= rows * dim:
            left -= rows * dim
            continue
        spec = specs[table] = _fit(rows, dim, share, orders)
        if spec is None:
            return rows, share
        left -= spec_size(spec)
    return specs


def _fit(rows: int, dim: int, parameters: int, orders: Sequence[int]) -> TTMSpec | None:
    """The first order that reaches LEAST_RANK, else the last, at the largest rank with at most `parameters`."""
    found = None
    for order in orders:
        spec = ttm_spec(rows, dim, order=order, rank=1)
        ranks = range(1, max(spec.rank_limits) + 1)
        largest = bisect_right(ranks, parameters, key=lambda rank: spec_size(spec.with_ranks(rank)))  # 0 if none fits
        if largest:
            found = spec.with_ranks(largest)
        if largest >= LEAST_RANK:
            break
    return found
