"""A narrower dense model that costs as much as the compressed one: what a user without compression would pick.

It is another model and not a conversion: a recipe builds it with fewer channels, in the width that `widest` finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from comera.baselines.common import Applied, Baseline
from comera.errors import ConfigError, check_fields, is_integer

WIDTH_STEP = 8  # widths are multiples of it, as kernels like them
GUESSES = 8  # of `widest`, which bisects from then on


@dataclass(frozen=True)
class Narrow(Baseline):
    """The dense model with fewer channels, at the dense learning rate.

    Example:
        >>> from comera.baselines import BaselineConfig, Narrow
        >>> settings = BaselineConfig(narrow=Narrow(hidden=96))  # comera train lm --baselines.narrow.hidden 96
        >>> settings.identity("narrow")  # such a run resumes in this width alone
        {'baselines.narrow.hidden': 96}
    """

    dense_layers = True
    rate = 1.0

    hidden: int | None = None
    """Width of the model; default: the widest whose training FLOPs per token do not exceed the compressed model's."""

    def __post_init__(self) -> None:
        valid = self.hidden is None or is_integer(self.hidden)
        check_fields(self, "narrow.", {"hidden": (valid, "an integer >= 1 or nothing")})

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        raise ConfigError(
            f"method narrow: expected a recipe that builds its model narrower, got a finished {type(model).__name__}: "
            "build one with fewer channels and train it dense"
        )


def nearest_heads(hidden: int, size: float, even: int = 1) -> int:
    """The number of attention heads at which a model `hidden` wide has heads of about `size`, a multiple of `even`."""
    return min(
        (n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n % even == 0),
        key=lambda n: max(hidden / n / size, size * n / hidden),
    )


def widest(limit: float, flops: Callable[[int], float]) -> int:
    """The widest of the multiples of WIDTH_STEP that costs at most `limit`; the narrowest one if all cost more.

    Args:
        limit: FLOPs.
        flops: width -> FLOPs, growing.

    Returns:
        A width.

    Example:
        >>> from comera.baselines import widest
        >>> widest(10_000, lambda width: 6 * width**2)  # 6 * 48**2 would be 13,824
        40
    """
    costs: dict[int, float] = {}
    low, high = 1, 0  # in steps; high: 0 until one is known
    while high - low != 1:
        middle = (low + high) // 2 if high else 2 * low
        # each cost takes as long as a step of the model on the meta device; a curve through few of them comes close
        tried = _estimate(limit, costs) if 0 < len(costs) < GUESSES else None
        tried = middle if tried is None else max(low + 1, min(tried, high - 1 if high else 32 * low))
        costs[tried] = flops(tried * WIDTH_STEP)
        low, high = (tried, high) if costs[tried] <= limit else (low, tried)
    return low * WIDTH_STEP


def _estimate(limit: float, costs: Mapping[int, float]) -> int | None:
    """About the last width that costs `limit`, by a parabola through nothing at 0 and the two costs next to the limit,
    or the only one. costs: by width."""
    (width, cost), *others = sorted(costs.items(), key=lambda item: abs(item[1] - limit))
    square = cost / width**2
    if others:
        square = (cost / width - others[0][1] / others[0][0]) / (width - others[0][0])
    linear = cost / width - square * width
    root = linear**2 + 4 * square * limit
    below = linear + math.sqrt(root) if root >= 0 else 0.0
    return int(2 * limit / below) if below > 0 else None
