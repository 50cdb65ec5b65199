"""Modes for any number of features, and specs built from them.

The number of parameters grows with the sum of the modes, so the modes are balanced. Where only a larger product can be
balanced (a prime number of features), features are padded, at a price: padding is chosen only where it pays.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import ceil, floor, isfinite, isqrt, prod, sqrt
from typing import NamedTuple

from comera.errors import SpecError
from comera.tt.format import clip_ranks
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

# Orders that the layers are tested with; a spec that is built directly may have any.
TT_ORDERS = range(2, 9)
TTM_ORDERS = range(1, 9)

# A padded product must be this much cheaper than an exact one (as a fraction, so that prices stay integers): padding
# makes the merged factors slices, whose rows are not aligned.
_PADDED, _EXACT = 11, 10

_VECTOR, _MOST_PADDED = 8, 1.05  # of blocks


class _Choice(NamedTuple):
    """Modes and their price; compared field by field: ties go to less padding, then to the smaller largest mode."""

    price: int
    product: int
    largest: int
    modes: tuple[int, ...]


@lru_cache(maxsize=4096)
def balanced_modes(features: int, count: int, *, max_padding: float = 0.1) -> tuple[int, ...]:
    """The `count` modes with the lowest price whose product holds all features:

        price = sum(modes) · product / features · (1.1 if padded else 1),   product <= (1 + max_padding) · features

    The modes come in descending order. max_padding=0 forces an exact product (a prime then gives itself and ones); an
    exact product wins ties. Raises SpecError for features or count below 1, or a negative max_padding.

        >>> from comera.tt.shapes import balanced_modes
        >>> balanced_modes(768, 3), balanced_modes(30_522, 4)
        ((12, 8, 8), (14, 14, 13, 12))
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

    Modes are chosen in ascending order. The sum of the remaining modes is at least that of equal ones (inequality of
    the arithmetic and geometric means). This bounds the price from below and grows with the distance from balance.
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
    kernel_size: Sequence[int] = (),
) -> TTSpec:
    """A TTSpec with balanced modes, the largest ones outside.

    order: number of cores, 2 to 8, split evenly between both sides; the larger side gets an odd one. rank: one integer,
    clipped to what the modes allow, or all order+1 ranks with ones at both ends. in_modes, out_modes: modes to use; a
    side without any gets the remaining cores. kernel_size: of a convolution, whose input features are channels ×
    kernel positions: from two input cores on, the last ones are the kernel's, one core for all of its sizes or one for
    each, whichever makes the smaller sum of modes.
    Raises SpecError for order, modes, ranks and features that do not fit together.

    Example:
        >>> from comera.tt import tt_spec
        >>> print(tt_spec(768, 3072))
        TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16
        >>> print(tt_spec(768, 3072, order=2, rank=64))
        TT 768 / 3072 ranks 64
        >>> print(tt_spec(128 * 9, 256, rank=16, kernel_size=(3, 3)))
        TT 16·8·9 / 4·8·8 ranks 16-16-16-16-8
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
            "sides, at least one each; change the order, or omit one side to have it chosen"
        )
    ins = tuple(in_modes) if in_modes is not None else _in_modes(in_features, split, kernel_size)
    outs = tuple(out_modes) if out_modes is not None else balanced_modes(out_features, rest)[::-1]
    return TTSpec(in_features, out_features, ins, outs, clip_ranks(rank, ins + outs))


def _in_modes(features: int, count: int, kernel_size: Sequence[int]) -> tuple[int, ...]:
    """Modes of the input features: for a convolution those of the channels, which may be padded, then the kernel's."""
    sizes = tuple(size for size in kernel_size if size > 1)
    positions = prod(sizes)
    if features % positions:
        raise SpecError(f"expected a kernel whose positions divide {features} input features, got {tuple(kernel_size)}")
    channels = features // positions
    endings = [ending for ending in ((positions,), sizes) if sizes and len(ending) < count]
    options = [balanced_modes(channels, count - len(ending)) + ending for ending in endings]
    return min(options, key=sum) if options else balanced_modes(features, count)


def ttm_spec(
    num_embeddings: int,
    embedding_dim: int,
    *,
    order: int = 4,
    rank: int | Sequence[int] = 32,
    row_modes: Sequence[int] | None = None,
    col_modes: Sequence[int] | None = None,
) -> TTMSpec:
    """A TTMSpec with balanced modes, the largest ones outside.

    There a core has only one inner rank. The columns are arranged so that the left and the right part of the cores,
    which a lookup merges, are of about the same size.

    order: number of cores, 1 to 8. rank: as for `tt_spec`. row_modes, col_modes: `order` modes each to use.
    Raises SpecError for order, modes, ranks and features that do not fit together.

    Example:
        >>> from comera.tt import ttm_spec
        >>> print(ttm_spec(30_522, 768))
        TTM 14·12·13·14 × 8·4·4·6 ranks 32-32-32
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


def btt_spec(
    in_features: int, out_features: int, *, rank: int = 1, blocks: tuple[int, int] | None = None, experts: int = 1
) -> BTTSpec:
    """A BTTSpec with about as many blocks as features in each.

    blocks: number of input and of output blocks. By default there are about as many as features in each, fewer of the
    input and more of the output, and the features of a block fill whole vectors of 8, if that takes 5 % of padding or
    less; else the number of blocks is the divisor nearest to the square root.
    rank: of every block, clipped to what they allow.
    experts: how many matrices in_features -> out_features it holds, each with output blocks of its own that have
    no padding; the spec's output features are those of all (comera.tt.experts).
    Raises SpecError for blocks, rank and features that do not fit together.

    Example:
        >>> from comera.tt import btt_spec
        >>> print(btt_spec(768, 3072, rank=2))
        BTT 24·32 / 64·48 rank 2
        >>> print(btt_spec(768, 50_257))
        BTT 24·32 / 225·224 rank 1
    """
    if min(in_features, out_features) < 1:
        raise SpecError(f"expected features >= 1, got {in_features} and {out_features}")
    if blocks is not None and (len(blocks) != 2 or min(blocks) < 1):
        raise SpecError(f"blocks must be the numbers of input and output blocks, two integers >= 1, got {blocks}")
    if blocks is not None and (blocks[0] > in_features or blocks[1] > out_features):
        raise SpecError(f"expected at most one block per feature of {in_features} and {out_features}, got {blocks}")
    ins, outs = _blocks(in_features, above=True), _blocks(out_features, above=False)
    if blocks is not None:
        ins, outs = (blocks[0], -(-in_features // blocks[0])), (blocks[1], -(-out_features // blocks[1]))
    elif experts > 1 and prod(outs) != out_features:
        size = max(size for size in range(1, isqrt(out_features) + 1) if out_features % size == 0)
        outs = out_features // size, size
    if rank < 0:
        raise SpecError(f"rank must be >= 0, got {rank}")
    outs = experts * outs[0], outs[1]
    return BTTSpec(in_features, experts * out_features, ins, outs, min(rank, ins[1], outs[1]))


def _blocks(features: int, *, above: bool) -> tuple[int, int]:
    """Number of blocks, and features in each: whole vectors, as many as the square root or more (`above`) or fewer."""
    root = sqrt(features)
    size = (ceil(root / _VECTOR) if above else floor(root / _VECTOR)) * _VECTOR
    count = -(-features // max(1, size))
    if size and count * size <= _MOST_PADDED * features:
        return count, size
    small, large = _near_root(features)
    return (small, large) if above else (large, small)


def _near_root(features: int) -> tuple[int, int]:
    """Two near-equal numbers, the smaller first, whose product holds all features: exactly where divisors are near."""
    root = isqrt(features)
    for small in range(root, max(1, root // 2) - 1, -1):
        if features % small == 0:
            return small, features // small
    return root, -(-features // root)


def _arrangements(features: int, order: int) -> list[tuple[int, ...]]:
    """Balanced modes from both ends inwards (1st left, 2nd and 3rd right, 4th and 5th left, ...), and mirrored."""
    modes = balanced_modes(features, order)
    left = [mode for k, mode in enumerate(modes) if k % 4 in (0, 3)]
    right = [mode for k, mode in enumerate(modes) if k % 4 in (1, 2)]
    return [(*left, *right[::-1]), (*right, *left[::-1])]


def _imbalance(rows: Sequence[int], cols: Sequence[int]) -> float:
    """Size of the larger of both sides of the train over that of the smaller one, not counting a core in the middle."""
    half = len(rows) // 2
    first = prod(rows[:half]) * prod(cols[:half])
    second = prod(rows[len(rows) - half :]) * prod(cols[len(cols) - half :])
    return max(first, second) / min(first, second)


def _check_order(kind: str, order: int, allowed: range) -> None:
    if order not in allowed:
        raise SpecError(f"a {kind} needs an order (number of cores) from {allowed[0]} to {allowed[-1]}, got {order}")
