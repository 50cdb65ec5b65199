"""Modes for any number of features, and specs built from them.

The numbers that a chain stores grow with the sum of its modes, so modes are balanced; where only a larger product
can be balanced (primes!), features are padded. Padding has a price, so that it is taken only where it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import isfinite, prod
from typing import NamedTuple

from comera.errors import SpecError
from comera.tt.spec import TTMSpec, TTSpec, clip_ranks

# Orders that the layers are tested for; a spec built directly may have any.
TT_ORDERS = range(2, 9)
TTM_ORDERS = range(1, 9)

# A padded product must be this much cheaper than an exact one (as a fraction, so that prices stay integers): the
# merged factors have to be sliced, and lose the alignment of their rows.
_PADDED, _EXACT = 11, 10


class _Choice(NamedTuple):
    """Modes with their price; compared field by field, so ties go to less padding, then to the smaller largest mode."""

    price: int
    product: int
    largest: int
    modes: tuple[int, ...]


@lru_cache(maxsize=4096)
def balanced_modes(features: int, count: int, *, max_padding: float = 0.1) -> tuple[int, ...]:
    """`count` modes, descending, whose product is at least `features`, at the lowest price

        price = sum(modes) · product / features · (1.1 if padded else 1),   product <= (1 + max_padding) · features.

    An exact product wins ties; `max_padding=0` forces one (a prime then gives itself and ones).
    Raises SpecError for features or count below 1 and for a negative max_padding.
    """
    if features < 1 or count < 1:
        raise SpecError(f"expected features >= 1 and count >= 1, got features={features} and count={count}")
    if not (isfinite(max_padding) and max_padding >= 0):
        raise SpecError(f"max_padding must be a fraction >= 0 of the features, such as 0.1, got {max_padding}")
    trivial = (1,) * (count - 1) + (features,)
    best = _Choice(_EXACT * features * sum(trivial), features, features, trivial)
    best = _cheapest(features, count, features, best)
    limit = int(features * (1 + max_padding))
    return (best if limit == features else _cheapest(features, count, limit, best)).modes[::-1]


def _cheapest(features: int, count: int, limit: int, best: _Choice) -> _Choice:
    """The cheapest choice with a product in [features, limit], by branch and bound from the balanced modes outwards.

    Modes are chosen in ascending order. The modes still to choose have at least the sum of equal ones (inequality of
    the arithmetic and geometric means), which bounds the price from below and grows with the distance from balance.
    """
    exact = limit == features
    factor = _EXACT if exact else _PADDED

    def extend(modes: tuple[int, ...], held: int, total: int) -> None:
        nonlocal best
        left = count - len(modes)
        lowest = modes[-1] if modes else 1
        if left == 1:
            last = max(lowest, -(-features // held))
            full = held * last
            if full <= limit:
                price = full * (total + last) * (_EXACT if full == features else _PADDED)
                best = min(best, _Choice(price, full, last, (*modes, last)))
            return
        balance = (features / held) ** (1 / left)
        highest = int((limit / held) ** (1 / left) + 1e-9)
        for mode in range(highest, lowest - 1, -1):
            if exact and features // held % mode:
                continue
            rest = (features / (held * mode)) ** (1 / (left - 1))
            if factor * features * (total + mode + (left - 1) * rest) > best.price * (1 + 1e-9):
                if mode <= balance:
                    return
                continue
            extend((*modes, mode), held * mode, total + mode)

    extend((), 1, 0)
    return best


def tt_spec(
    in_features: int,
    out_features: int,
    *,
    order: int = 6,
    rank: int | Sequence[int] = 30,
    in_modes: Sequence[int] | None = None,
    out_modes: Sequence[int] | None = None,
) -> TTSpec:
    """A TTSpec with balanced modes, big ones outside: 768 -> 3072 is 12·8·8 / 12·16·16 at order 6.

    order: number of cores, 2 to 8, split evenly; an odd one goes to the bigger side. Given modes are kept as they are
    and the other side gets the rest of the order.
    rank: one integer, clipped bond by bond to what the modes allow, or all order+1 ranks with ones at both ends.
    Raises SpecError when order, modes, ranks and features do not fit together.
    """
    _check_order("TT", order, TT_ORDERS)
    if in_modes is not None:
        split = len(in_modes)
    elif out_modes is not None:
        split = order - len(out_modes)
    else:
        split = (order + (in_features >= out_features)) // 2
    rest = order - split
    if min(split, rest) < 1 or (out_modes is not None and len(out_modes) != rest):
        raise SpecError(
            f"order {order} does not fit in_modes={in_modes} and out_modes={out_modes}: it counts the modes of both "
            "sides, at least one each; change the order or leave one side out to have it chosen"
        )
    ins = tuple(in_modes) if in_modes is not None else balanced_modes(in_features, split)
    outs = tuple(out_modes) if out_modes is not None else balanced_modes(out_features, rest)[::-1]
    return TTSpec(in_features, out_features, ins, outs, clip_ranks(rank, ins + outs))


def ttm_spec(
    num_embeddings: int,
    embedding_dim: int,
    *,
    order: int = 4,
    rank: int | Sequence[int] = 32,
    row_modes: Sequence[int] | None = None,
    col_modes: Sequence[int] | None = None,
) -> TTMSpec:
    """A TTMSpec with balanced modes: 30,522 × 768 at order 4 is 14·12·13·14 × 8·4·4·6.

    Big modes stand outside, where a core has one bond only, and columns are turned so that the two halves of the
    chain, which a look-up merges, are about equally large.
    order: number of cores, 1 to 8. Given modes are kept as they are.
    rank: one integer, clipped bond by bond to what the modes allow, or all order+1 ranks with ones at both ends.
    Raises SpecError when order, modes, ranks and features do not fit together.
    """
    _check_order("TTM", order, TTM_ORDERS)
    for name, modes in (("row_modes", row_modes), ("col_modes", col_modes)):
        if modes is not None and len(modes) != order:
            raise SpecError(
                f"order {order} does not fit {name}={tuple(modes)}: a core takes one row mode and one column mode; "
                f"pass order={len(modes)}, or {order} modes"
            )
    row_options = _arrangements(num_embeddings, order) if row_modes is None else [tuple(row_modes)]
    col_options = _arrangements(embedding_dim, order) if col_modes is None else [tuple(col_modes)]
    rows, cols = min(product(row_options, col_options), key=lambda pair: _imbalance(*pair))
    sizes = [m * n for m, n in zip(rows, cols, strict=True)]
    return TTMSpec(num_embeddings, embedding_dim, rows, cols, clip_ranks(rank, sizes))


def _arrangements(features: int, order: int) -> list[tuple[int, ...]]:
    """Balanced modes placed from both ends inwards (1st left, 2nd and 3rd right, 4th and 5th left, ...), both ways."""
    modes = balanced_modes(features, order)
    left = [mode for k, mode in enumerate(modes) if k % 4 in (0, 3)]
    right = [mode for k, mode in enumerate(modes) if k % 4 in (1, 2)]
    return [(*left, *right[::-1]), (*right, *left[::-1])]


def _imbalance(rows: Sequence[int], cols: Sequence[int]) -> float:
    """Rows times columns of the larger half of the chain over those of the smaller one, a middle core left out."""
    half = len(rows) // 2
    first = prod(rows[:half]) * prod(cols[:half])
    second = prod(rows[len(rows) - half :]) * prod(cols[len(cols) - half :])
    return max(first, second) / min(first, second)


def _check_order(kind: str, order: int, allowed: range) -> None:
    if order not in allowed:
        raise SpecError(f"a {kind} needs an order (number of cores) from {allowed[0]} to {allowed[-1]}, got {order}")
