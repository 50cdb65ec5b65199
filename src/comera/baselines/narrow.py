"""A narrower dense model that costs as much as the compressed one: what a user without compression would pick.

It is another model and not a conversion: a recipe builds it with fewer channels, in the width that `widest` finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from comera.baselines.common import Applied, Baseline, is_integer
from comera.errors import ConfigError, check_fields

WIDTH_STEP = 8  # widths are multiples of it, as kernels like them


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
    low, high = 1, 2  # in steps
    while flops(high * WIDTH_STEP) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if flops(middle * WIDTH_STEP) <= limit else (low, middle)
    return low * WIDTH_STEP
