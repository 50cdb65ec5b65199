"""What an adapter is."""

from dataclasses import dataclass
from math import isfinite

from comera.errors import SpecError, check_fields, is_integer
from comera.tt.shapes import tt_spec
from comera.tt.spec import TTSpec


@dataclass(frozen=True)
class TTAdapter:
    """A tensor train Δ beside a linear layer: y = x W + bias + s · x Δ.

    Args:
        order: number of cores, 2 or more. With order 2 the adapter is LoRA, with gates between its two factors.
        rank: of every inner rank, clipped to what the modes allow; where training lowers it is for `RankController`.
        scale: s.

    Raises:
        SpecError: values out of range.

    Example:
        >>> from comera.adapters import TTAdapter
        >>> spec = TTAdapter(order=4, rank=8).spec(768, 3072)
        >>> print(spec, spec.numel + spec.rank_numel)
        TT 32·24 / 48·64 ranks 8-8-8 5400

    Source: docs/method.md §1.
    """

    order: int = 4
    rank: int = 8
    scale: float = 1.0

    def __post_init__(self) -> None:
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        checks = {
            "order": (is_integer(self.order, 2), "an integer >= 2 (cores)"),
            "rank": (is_integer(self.rank, 0), "an integer >= 0"),
            "scale": (number and isfinite(self.scale) and self.scale != 0, "a finite number other than 0"),
        }
        check_fields(self, "TTAdapter: ", checks, SpecError)

    def spec(self, in_features: int, out_features: int) -> TTSpec:
        """Modes and ranks beside a layer of these sizes."""
        return tt_spec(in_features, out_features, order=self.order, rank=self.rank)
