"""Specs by their modes and one rank, as the tests of operations list them, and products by a forced plan."""

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from comera.ops.block_product import btt_linear
from comera.ops.linear import tt_linear
from comera.ops.planner.plan import plan_linear, plan_projection
from comera.ops.projection import ttm_linear
from comera.tt.format import clip_ranks
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec

Modes = tuple[int, ...]


def tt(in_modes: Modes, out_modes: Modes, rank: int, *, pad_in: int = 0, pad_out: int = 0) -> TTSpec:
    """A tensor train; `pad_in`, `pad_out`: entries of padding."""
    shape = prod(in_modes) - pad_in, prod(out_modes) - pad_out
    return TTSpec(*shape, in_modes, out_modes, clip_ranks(rank, (*in_modes, *out_modes)))


def ttm(row_modes: Modes, col_modes: Modes, rank: int, *, pad_rows: int = 0, pad_cols: int = 0) -> TTMSpec:
    """A TT-matrix; `pad_rows`, `pad_cols`: entries of padding."""
    sizes = [m * n for m, n in zip(row_modes, col_modes, strict=True)]
    shape = prod(row_modes) - pad_rows, prod(col_modes) - pad_cols
    return TTMSpec(*shape, row_modes, col_modes, clip_ranks(rank, sizes))


def ragged(features: int, out_features: int, in_modes: Modes, out_modes: Modes, most: int) -> BTTSpec:
    """A block tensor train whose blocks have ranks from 0 to `most`, in no order."""
    (a, _), (c, _) = in_modes, out_modes
    ranks = tuple(tuple((5 * i + 3 * j + i * j) % (most + 1) for j in range(c)) for i in range(a))
    return BTTSpec(features, out_features, in_modes, out_modes, ranks)  # type: ignore[arg-type]


def btt(in_modes: Modes, out_modes: Modes, rank: int | Sequence[int], *, pad_in: int = 0, pad_out: int = 0) -> BTTSpec:
    """A block tensor train; `rank`: of every block, or of each, in the order of (input block, output block)."""
    shape = prod(in_modes) - pad_in, prod(out_modes) - pad_out
    spec = BTTSpec(*shape, in_modes, out_modes, rank if isinstance(rank, int) else 0)  # type: ignore[arg-type]
    return spec if isinstance(rank, int) else spec.with_block_ranks(rank)


def force(spec: Spec, choice: str | Sequence[int], batch: int = 8) -> Callable[..., Tensor]:
    """The product of (x, bias, cores...) with a weight by one strategy, or by groups with these ends; that of blocks
    has one way."""
    if isinstance(spec, BTTSpec):
        return lambda x, bias, *cores: btt_linear(x, spec, cores, bias)
    if isinstance(spec, TTSpec):
        plan = plan_linear(spec, batch).using(choice)  # type: ignore[arg-type]
        return lambda x, bias, *cores: tt_linear(x, spec, cores, bias, plan=plan)
    plan = plan_projection(spec, batch).using(choice)  # type: ignore[arg-type]
    return lambda x, bias, *cores: ttm_linear(x, spec, cores, bias, plan=plan)
