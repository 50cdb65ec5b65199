"""What a compressed weight looks like: modes, ranks and counts, without any numbers.

Tensor train (TT), for a weight that maps ``in`` features to ``out`` features ([CoMERA] eq. 3)::

    core_k : (r_{k-1}, modes_k, r_k),  r_0 = r_order = 1,  modes = in_modes + out_modes
    W[i_1..i_p, j_1..j_q] = G_1[i_1] D_1 G_2[i_2] D_2 ... D_{order-1} G_order[j_q]

Tensor-train matrix (TTM), for an embedding table of V rows and D columns ([CoMERA] eq. 4)::

    core_k : (r_{k-1}, m_k, n_k, r_k),   row id -> mixed-radix digits (i_1, ..., i_order)
    E[id, (j_1..j_order)] = G_1[i_1, j_1] D_1 G_2[i_2, j_2] ... G_order[i_order, j_order]

``D_k = diag(d_k)`` are the rank parameters on the bonds. A product of modes may exceed the features: the
tail is padding, it is sliced away and never reached by an input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import Tensor

from comera.errors import SpecError


def _check_modes(what: str, modes: tuple[int, ...], features: int) -> None:
    if not isinstance(features, int) or features < 1:
        raise SpecError(f"the features behind {what} must be a positive integer, got {features!r}")
    if not modes or any(not isinstance(m, int) or m < 1 for m in modes):
        raise SpecError(f"{what} must be positive integers, got {modes}")
    if prod(modes) < features:
        raise SpecError(
            f"{what} {modes} hold {prod(modes)} entries but {features} are needed: "
            f"choose modes whose product is at least {features}, or leave them out to have them chosen"
        )


def _check_ranks(ranks: tuple[int, ...], limits: tuple[int, ...]) -> None:
    order = len(limits) - 1
    if len(ranks) != order + 1:
        raise SpecError(
            f"ranks must hold order+1 = {order + 1} entries with ones at both ends, got {ranks} ({len(ranks)} entries)"
        )
    if ranks[0] != 1 or ranks[-1] != 1:
        raise SpecError(f"the boundary ranks must be 1, got ranks {ranks}")
    for k, (rank, limit) in enumerate(zip(ranks, limits, strict=True)):
        if not isinstance(rank, int) or rank < 0:
            raise SpecError(f"ranks must be integers >= 0, got {rank} at bond {k} of {ranks}")
        if rank > limit:
            raise SpecError(
                f"rank {rank} at bond {k} is above {limit}, the largest that the modes on its two sides allow: "
                f"lower it, or give one integer rank, which is clipped bond by bond (limits: {limits})"
            )


def _join(separator: str, numbers: Sequence[int]) -> str:
    return separator.join(map(str, numbers))


def rank_limits(sizes: Sequence[int]) -> tuple[int, ...]:
    """Largest useful rank of every bond: the smaller of the products of `sizes` left and right of it.

    `sizes`: entries of each core's modes (TT: ``modes_k``; TTM: ``m_k * n_k``). Length order+1, ones at the ends.
    """
    return tuple(min(prod(sizes[:k]), prod(sizes[k:])) for k in range(len(sizes) + 1))


def clip_ranks(rank: int | Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Ranks tuple of length order+1 from one integer (clipped bond by bond) or from a full tuple (checked later)."""
    if isinstance(rank, int):
        if rank < 0:
            raise SpecError(f"rank must be >= 0, got {rank}")
        limits = rank_limits(sizes)
        return (1, *(min(rank, limit) for limit in limits[1:-1]), 1)
    return tuple(int(r) for r in rank)


class _Chain:
    """What TT and TTM share: a chain of cores joined by bonds."""

    ranks: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Entries of each core's modes: ``modes_k`` (TT) or ``m_k * n_k`` (TTM)."""
        raise AssertionError("defined by the formats")

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each core, both ranks included."""
        raise AssertionError("defined by the formats")

    @property
    def order(self) -> int:
        """Number of cores."""
        return len(self.sizes)

    @property
    def inner_ranks(self) -> tuple[int, ...]:
        """Ranks of the inner bonds, which carry the rank parameters: ``ranks[1:-1]``."""
        return self.ranks[1:-1]

    @property
    def rank_limits(self) -> tuple[int, ...]:
        """Largest useful rank of every bond, ones at the ends."""
        return rank_limits(self.sizes)

    @property
    def numel(self) -> int:
        """Numbers stored in the cores: the size S of METHOD, sum over k of r_{k-1} · modes_k · r_k."""
        return sum(r * n * s for r, n, s in zip(self.ranks[:-1], self.sizes, self.ranks[1:], strict=True))

    @property
    def rank_numel(self) -> int:
        """Numbers stored in the rank parameters."""
        return sum(self.inner_ranks)

    @property
    def dense_numel(self) -> int:
        """Numbers of the dense weight that the chain stands for."""
        rows, cols = self.shape
        return rows * cols

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the materialised weight: (in_features, out_features) or (num_embeddings, embedding_dim)."""
        raise AssertionError("defined by the formats")

    @property
    def padded_shape(self) -> tuple[int, int]:
        """Shape that the modes hold: `shape` before the padding is sliced away."""
        raise AssertionError("defined by the formats")

    @property
    def ratio(self) -> float:
        """Dense numbers per stored number (rank parameters counted); infinite for rank 0."""
        stored = self.numel + self.rank_numel
        return self.dense_numel / stored if stored else float("inf")


@dataclass(frozen=True)
class TTSpec(_Chain):
    """Shape of a tensor train for a weight (in_features, out_features).

    in_modes, out_modes: factored dimensions, products at least in_features, out_features.
    ranks: length len(in_modes) + len(out_modes) + 1, ones at both ends; inner ranks >= 0.
    Raises SpecError when they do not fit together.
    """

    in_features: int
    out_features: int
    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("in_modes", "out_modes", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_modes("in_modes", self.in_modes, self.in_features)
        _check_modes("out_modes", self.out_modes, self.out_features)
        _check_ranks(self.ranks, self.rank_limits)

    @property
    def modes(self) -> tuple[int, ...]:
        """All modes along the chain."""
        return self.in_modes + self.out_modes

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.modes

    @property
    def split(self) -> int:
        """Number of input cores p; bond p is the rank of the matrix."""
        return len(self.in_modes)

    @property
    def shape(self) -> tuple[int, int]:
        return (self.in_features, self.out_features)

    @property
    def padded_shape(self) -> tuple[int, int]:
        return (prod(self.in_modes), prod(self.out_modes))

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(self.ranks[:-1], self.modes, self.ranks[1:], strict=True))

    def with_ranks(self, ranks: int | Sequence[int]) -> TTSpec:
        """The same modes with other ranks (an integer is clipped bond by bond)."""
        return replace(self, ranks=clip_ranks(ranks, self.sizes))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready description; `spec_from_dict` reads it back."""
        return {"format": "tt", **{k: getattr(self, k) for k in self.__dataclass_fields__}}

    def __str__(self) -> str:
        return f"TT {_join('·', self.in_modes)} / {_join('·', self.out_modes)} ranks {_join('-', self.inner_ranks)}"


@dataclass(frozen=True)
class TTMSpec(_Chain):
    """Shape of a tensor-train matrix for a table (num_embeddings, embedding_dim).

    row_modes, col_modes: of equal length, products at least num_embeddings, embedding_dim.
    ranks: length order+1, ones at both ends; inner ranks >= 0.
    Raises SpecError when they do not fit together.
    """

    num_embeddings: int
    embedding_dim: int
    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("row_modes", "col_modes", "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_modes("row_modes", self.row_modes, self.num_embeddings)
        _check_modes("col_modes", self.col_modes, self.embedding_dim)
        if len(self.row_modes) != len(self.col_modes):
            raise SpecError(
                f"row_modes and col_modes must have one entry per core each, "
                f"got {self.row_modes} and {self.col_modes}: pad the shorter one with ones"
            )
        _check_ranks(self.ranks, self.rank_limits)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(m * n for m, n in zip(self.row_modes, self.col_modes, strict=True))

    @property
    def shape(self) -> tuple[int, int]:
        return (self.num_embeddings, self.embedding_dim)

    @property
    def padded_shape(self) -> tuple[int, int]:
        return (prod(self.row_modes), prod(self.col_modes))

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(self.ranks[:-1], self.row_modes, self.col_modes, self.ranks[1:], strict=True))

    def with_ranks(self, ranks: int | Sequence[int]) -> TTMSpec:
        """The same modes with other ranks (an integer is clipped bond by bond)."""
        return replace(self, ranks=clip_ranks(ranks, self.sizes))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready description; `spec_from_dict` reads it back."""
        return {"format": "ttm", **{k: getattr(self, k) for k in self.__dataclass_fields__}}

    def __str__(self) -> str:
        return f"TTM {_join('·', self.row_modes)} × {_join('·', self.col_modes)} ranks {_join('-', self.inner_ranks)}"


Spec = TTSpec | TTMSpec


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """Rebuild a spec from `to_dict`. Raises SpecError on an unknown format or missing and unknown fields."""
    kinds: dict[str, type[TTSpec] | type[TTMSpec]] = {"tt": TTSpec, "ttm": TTMSpec}
    rest = dict(fields)
    kind = kinds.get(str(rest.pop("format", None)))
    if kind is None:
        raise SpecError(f"expected a spec with format 'tt' or 'ttm', got {fields.get('format')!r}")
    if set(rest) != set(kind.__dataclass_fields__):
        raise SpecError(f"a {kind.__name__} needs the fields {sorted(kind.__dataclass_fields__)}, got {sorted(rest)}")
    try:
        return kind(**rest)
    except TypeError as error:
        raise SpecError(f"the fields of a {kind.__name__} are integers and lists of integers, got {rest}") from error


def check_cores(spec: Spec, cores: Sequence[Tensor]) -> None:
    """Raise SpecError unless the cores have the shapes of `spec`."""
    shapes = tuple(tuple(core.shape) for core in cores)
    if shapes != spec.core_shapes:
        raise SpecError(f"expected {spec.order} cores of shapes {spec.core_shapes} for {spec}, got {shapes}")
