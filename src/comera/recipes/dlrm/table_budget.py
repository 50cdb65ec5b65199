"""What each embedding table becomes when all of them together have to be so many times smaller.

Small tables stay as they are. What the budget leaves is shared among the large ones in proportion to √rows, which is
how the numbers of a chain of two cores grow with the rows at one and the same rank: so large tables are compressed more
than small ones, and none takes all. Within its share a table takes the fewest cores that allow a rank of LEAST_RANK
(two give the most exact table and the fastest look-up), and then the largest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from comera.errors import ConfigError
from comera.rank.size import spec_size
from comera.tt.shapes import ttm_spec
from comera.tt.spec import TTMSpec

ORDERS = (2, 3, 4)
LEAST_RANK = 8


def fit_tables(
    sizes: Sequence[int], dim: int, *, ratio: float, min_rows: int, order: int | None = None
) -> list[TTMSpec | None]:
    """For each table its chain, or None for one that stays dense; together they store at most 1/ratio of the numbers.

    sizes: rows of the tables, each `dim` wide. min_rows: smaller tables stay dense, as larger ones do whose share of
    the budget is no less than they are. order: cores of every chain; None chooses by table.
    Raises ConfigError where no chain is small enough for the budget.
    """
    specs: list[TTMSpec | None] = [None] * len(sizes)
    left = int(dim * sum(sizes) / ratio) - dim * sum(rows for rows in sizes if rows < min_rows)
    large = sorted((rows, table) for table, rows in enumerate(sizes) if rows >= min_rows)
    if not large:
        raise ConfigError(
            f"compress.min_rows: no table has {min_rows:,} rows or more, the largest has {max(sizes):,}: lower it"
        )
    weight = sum(sqrt(rows) for rows, _ in large)
    for rows, table in large:  # the smallest first: what they leave over goes to the larger ones
        share = int(left * sqrt(rows) / weight)
        weight -= sqrt(rows)
        if share >= rows * dim:
            left -= rows * dim
            continue
        spec = specs[table] = _fit(rows, dim, share, ORDERS if order is None else (order,))
        if spec is None:
            raise ConfigError(
                f"compress.ratio {ratio:g} leaves {max(share, 0):,} numbers for the table of {rows:,} rows, where its "
                f"smallest chain takes more: lower compress.ratio, or compress.min_rows ({min_rows:,}), below which "
                f"tables stay dense"
            )
        left -= spec_size(spec)
    return specs


def _fit(rows: int, dim: int, numbers: int, orders: Sequence[int]) -> TTMSpec | None:
    """The first order with LEAST_RANK or more, or else the last, at the largest rank that takes at most `numbers`."""
    found = None
    for order in orders:
        spec = ttm_spec(rows, dim, order=order, rank=1)
        low, high = 0, max(spec.rank_limits)  # of a rank that fits, and of the largest there is
        while low < high:
            middle = (low + high + 1) // 2
            if spec_size(spec.with_ranks(middle)) <= numbers:
                low = middle
            else:
                high = middle - 1
        if low:
            found = spec.with_ranks(low)
        if low >= LEAST_RANK:
            break
    return found
