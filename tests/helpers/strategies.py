"""Hypothesis strategies for specs: every format, order, split, padding and rank (0 and 1 too), of small dense size."""

from collections.abc import Sequence
from math import prod

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from comera.tt.format import rank_limits
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec

# A busy machine makes single examples slow, and a property says nothing about time.
settings.register_profile("comera", deadline=None)
settings.load_profile("comera")

# Largest mode by order, so that the dense weight stays below some ten thousand elements.
_LARGEST_TT = {2: 12, 3: 9, 4: 6, 5: 5, 6: 4, 7: 3, 8: 3}
_LARGEST_TTM = {1: 12, 2: 8, 3: 4, 4: 3, 5: 2, 6: 2}


@st.composite
def tt_specs(
    draw: st.DrawFn, *, min_order: int = 2, max_order: int = 8, min_rank: int = 0, max_rank: int = 6
) -> TTSpec:
    """Any TTSpec: uneven splits, modes of 1, padding on both sides, ranks from `min_rank` up."""
    order = draw(st.integers(min_order, max_order))
    modes = draw(st.lists(st.integers(1, _LARGEST_TT[order]), min_size=order, max_size=order))
    split = draw(st.integers(1, order - 1))
    in_modes, out_modes = tuple(modes[:split]), tuple(modes[split:])
    in_features, out_features = draw(_features(in_modes)), draw(_features(out_modes))
    return TTSpec(in_features, out_features, in_modes, out_modes, draw(_ranks(modes, min_rank, max_rank)))


@st.composite
def ttm_specs(
    draw: st.DrawFn, *, min_order: int = 1, max_order: int = 6, min_rank: int = 0, max_rank: int = 6
) -> TTMSpec:
    """Any TTMSpec: modes of 1, padding on both sides, ranks from `min_rank` up."""
    order = draw(st.integers(min_order, max_order))
    modes = st.lists(st.integers(1, _LARGEST_TTM[order]), min_size=order, max_size=order)
    rows, cols = tuple(draw(modes)), tuple(draw(modes))
    sizes = [m * n for m, n in zip(rows, cols, strict=True)]
    return TTMSpec(draw(_features(rows)), draw(_features(cols)), rows, cols, draw(_ranks(sizes, min_rank, max_rank)))


@st.composite
def btt_specs(draw: st.DrawFn, *, min_rank: int = 0, max_rank: int = 6) -> BTTSpec:
    """Any BTTSpec: blocks of one feature, padding on both sides (of whole blocks too), equal ranks or one each, 0 among
    them; `min_rank` of all blocks together."""
    in_modes, out_modes = (draw(st.tuples(st.integers(1, 5), st.integers(1, 6))) for _ in range(2))
    limit, blocks = min(in_modes[1], out_modes[1], max_rank), in_modes[0] * out_modes[0]
    rank = st.integers(0, limit)
    flat = draw(rank.map(lambda equal: [equal] * blocks) | st.lists(rank, min_size=blocks, max_size=blocks))
    flat = flat if sum(flat) >= min_rank else [min_rank, *flat[1:]]
    features = draw(_features(in_modes)), draw(_features(out_modes))
    return BTTSpec(*features, in_modes, out_modes, 0).with_block_ranks(flat)


def train_specs(*, min_rank: int = 0, max_rank: int = 6) -> st.SearchStrategy[TTSpec | TTMSpec]:
    """A spec of either format whose cores are merged one after the other."""
    return tt_specs(min_rank=min_rank, max_rank=max_rank) | ttm_specs(min_rank=min_rank, max_rank=max_rank)


def specs(*, min_rank: int = 0, max_rank: int = 6) -> st.SearchStrategy[Spec]:
    """A spec of any format."""
    return train_specs(min_rank=min_rank, max_rank=max_rank) | btt_specs(min_rank=min_rank, max_rank=max_rank)


def random_cores(spec: Spec, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gaussian cores whose dense weight has entries of order one."""
    generator = torch.Generator().manual_seed(seed)
    cores = [torch.randn(shape, generator=generator, dtype=dtype) for shape in spec.core_shapes]
    return [core / max(1, core.shape[0]) ** 0.5 for core in cores]


def _features(modes: Sequence[int]) -> st.SearchStrategy[int]:
    # exact first, so that a failing example shrinks to no padding
    full = prod(modes)
    return st.integers(0, min(full - 1, full // 3)).map(lambda padding: full - padding)


@st.composite
def _ranks(draw: st.DrawFn, sizes: Sequence[int], smallest: int, largest: int) -> tuple[int, ...]:
    # one zero makes the whole weight zero: so a fifth of the examples has one, not every example
    limits = rank_limits(sizes)[1:-1]
    low = max(1, smallest)
    ranks = [draw(st.integers(min(low, limit), min(largest, limit))) for limit in limits]
    if ranks and smallest == 0 and draw(st.integers(0, 4)) == 4:
        ranks[draw(st.integers(0, len(ranks) - 1))] = 0
    return (1, *ranks, 1)
