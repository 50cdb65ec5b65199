"""What the formats share: a train of cores that are joined by ranks, and the checks of modes and ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Self

from torch import Tensor

from comera.errors import ComeraError, SpecError


def rank_limits(sizes: Sequence[int]) -> tuple[int, ...]:
    """The order+1 largest useful ranks: at each k the smaller of the products of `sizes` left and right of it."""
    return tuple(min(prod(sizes[:k]), prod(sizes[k:])) for k in range(len(sizes) + 1))


def clip_ranks(rank: int | Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """All order+1 ranks, from one integer that is clipped to the limits, or from all of them (checked by the spec)."""
    if isinstance(rank, int):
        if rank < 0:
            raise SpecError(f"rank must be >= 0, got {rank}")
        limits = rank_limits(sizes)
        return (1, *(min(rank, limit) for limit in limits[1:-1]), 1)
    return tuple(int(r) for r in rank)


class Format(ABC):
    """Modes and ranks of a compressed weight."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _format: ClassVar[str]
    layout_name: ClassVar[str] = ""
    """Under which name a state holds what the shapes of cores and gates do not show; "" where they show all."""
    ranks: tuple[int, ...]
    activation: str | None = None
    """What stands between the two factors of the weight; None for a weight, which is linear."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Entries of each core's modes: ``modes_k`` (TT) or ``m_k * n_k`` (TTM)."""

    @property
    @abstractmethod
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each core: left rank, modes, right rank."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Shape of the dense weight: (in_features, out_features) or (num_embeddings, embedding_dim)."""

    @property
    @abstractmethod
    def padded_shape(self) -> tuple[int, int]:
        """Products of the modes: `shape` before the padding is sliced away."""

    @property
    def order(self) -> int:
        """Number of cores."""
        return len(self.sizes)

    @property
    def inner_ranks(self) -> tuple[int, ...]:
        """Ranks between cores, each with as many gates: ``ranks[1:-1]``."""
        return self.ranks[1:-1]

    @property
    def rank_limits(self) -> tuple[int, ...]:
        """Largest useful ranks, ones at both ends."""
        return rank_limits(self.sizes)

    @property
    def reach(self) -> tuple[int, ...]:
        """By what factor the rank on one side of each core can exceed that on its other side, after SVD rounding."""
        return self.sizes

    @property
    def numel(self) -> int:
        """Parameters in the cores: the size S of docs/method.md §2, the sum over k of r_{k-1} · modes_k · r_k."""
        return core_size(self, self.inner_ranks)

    @property
    def rank_numel(self) -> int:
        """Number of gates."""
        return sum(self.inner_ranks)

    @property
    def dense_numel(self) -> int:
        """Elements of the dense weight."""
        rows, cols = self.shape
        return rows * cols

    @property
    def ratio(self) -> float:
        """Elements of the dense weight per stored parameter, gates included; infinite for rank 0."""
        stored = self.numel + self.rank_numel
        return self.dense_numel / stored if stored else float("inf")

    @property
    def levels(self) -> range:
        """What one integer can choose for the ranks, from the smallest to the largest useful: see `ranks_at`."""
        return range(1, max(self.rank_limits) + 1)

    def ranks_at(self, level: int) -> tuple[int, ...]:
        """Inner ranks at one of the `levels`: that rank, clipped to `rank_limits`."""
        return clip_ranks(level, self.sizes)[1:-1]

    def with_ranks(self, ranks: int | Sequence[int]) -> Self:
        """The same modes with other ranks: all of them, or one integer that is clipped to `rank_limits`."""
        return replace(self, ranks=clip_ranks(ranks, self.sizes))

    def keeping(self, kept: Sequence[Tensor]) -> Self:
        """The spec that is left when at each inner rank only the slices of these indices stay."""
        return self.with_ranks((1, *map(len, kept), 1))

    @property
    def layout_of(self) -> str:
        """What the layout is, for errors."""
        return "nothing"

    @property
    def layout(self) -> list[Any]:
        """What the shapes of cores and gates do not show: integers, nested as a state holds them."""
        return []

    def with_layout(self, flat: Sequence[int]) -> Self:
        """The spec of this layout, its integers in a row. Raises SpecError where they do not fit the ranks."""
        return self

    def with_shapes(self, cores: Sequence[Sequence[int]], gates: Sequence[int]) -> Self:
        """A spec with cores of these shapes and so many gates; where there are several, their `layout` says which.

        Raises SpecError where there is none.
        """
        spec = self.with_ranks((1, *gates, 1))
        if spec.core_shapes != tuple(map(tuple, cores)):
            raise SpecError(f"expected cores of shapes {spec.core_shapes} for {spec}, got {tuple(cores)}")
        return spec

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready description; `spec_from_dict` reads it back."""
        values = {"format": self._format} | {field.name: getattr(self, field.name) for field in fields(self)}
        return values if self.activation else {name: value for name, value in values.items() if name != "activation"}

    def _validate(self, rows: str, cols: str) -> None:
        """Convert lists to tuples and check modes (fields `rows` and `cols`) and ranks."""
        for name in {rows, cols, "ranks"} & set(self.__dataclass_fields__):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, features in zip((rows, cols), self.shape, strict=True):
            check_modes(name, getattr(self, name), features)


def core_size(spec: Format, inner_ranks: Sequence[int]) -> int:
    """Parameters in the cores of `spec` with these inner ranks; of a format in which these alone decide it."""
    assert spec._format != "ngram", "which gates of an order are kept decides, not only how many"
    ranks = (1, *inner_ranks, 1)
    return sum(left * size * right for (left, right), size in zip(pairwise(ranks), spec.sizes, strict=True))


def spec_size(spec: Format, inner_ranks: Sequence[int] | None = None) -> int:
    """Parameters that a tensor train of `spec` stores in cores and gates; with other `inner_ranks` if given."""
    if inner_ranks is None:
        return spec.numel + spec.rank_numel
    return core_size(spec, inner_ranks) + sum(inner_ranks)


class LinearFormat(Format):
    """Modes and ranks of a compressed weight that maps input to output features."""

    in_features: int
    out_features: int
    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return (self.in_features, self.out_features)

    @property
    def padded_shape(self) -> tuple[int, int]:
        return (prod(self.in_modes), prod(self.out_modes))


def check_linear(spec: Format, what: str, error: type[ComeraError] = SpecError) -> None:
    """Raise `error` for a spec that is no weight of a product, for which there is no `what`."""
    if spec._format == "ngram":
        raise error(f"{spec} stands for {spec.shape[0]:.0e} rows: it has no {what}")
    if spec.activation:
        raise error(f"{spec} computes {spec.activation}(x A) B, which is no product with a weight: it has no {what}")


def check_modes(what: str, modes: tuple[int, ...], features: int) -> None:
    """Raise SpecError unless `modes`, named `what`, hold all features."""
    if not isinstance(features, int) or features < 1:
        raise SpecError(f"the features behind {what} must be a positive integer, got {features!r}")
    if not modes or any(not isinstance(m, int) or m < 1 for m in modes):
        raise SpecError(f"{what} must be positive integers, got {modes}")
    if prod(modes) < features:
        raise SpecError(
            f"{what} {modes} hold {prod(modes)} entries but {features} are needed: "
            f"choose modes whose product is at least {features}, or omit them to have them chosen"
        )


def check_ranks(ranks: tuple[int, ...], limits: tuple[int, ...]) -> None:
    """Raise SpecError unless these are ranks within the limits, with ones at both ends."""
    order = len(limits) - 1
    if len(ranks) != order + 1:
        raise SpecError(
            f"ranks must hold order+1 = {order + 1} entries with ones at both ends, got {ranks} ({len(ranks)} entries)"
        )
    if ranks[0] != 1 or ranks[-1] != 1:
        raise SpecError(f"the boundary ranks must be 1, got ranks {ranks}")
    for k, (rank, limit) in enumerate(zip(ranks, limits, strict=True)):
        if not isinstance(rank, int) or rank < 0:
            raise SpecError(f"ranks must be integers >= 0, got {rank} at ranks[{k}] of {ranks}")
        if rank > limit:
            raise SpecError(
                f"rank {rank} at ranks[{k}] is above {limit}, the largest that the modes on its two sides allow: "
                f"lower it, or give one integer rank, which is clipped to the limits {limits}"
            )


def join(separator: str, values: Sequence[int]) -> str:
    """Modes or ranks as text."""
    return separator.join(map(str, values))
