"""The shape of a compressed weight: modes, ranks and counts, without parameters.

Tensor train (TT), for a weight that maps ``in`` features to ``out`` features ([CoMERA] eq. 3)::

    core_k : (r_{k-1}, modes_k, r_k),  r_0 = r_order = 1,  modes = in_modes + out_modes
    W[i_1..i_p, j_1..j_q] = G_1[i_1] D_1 G_2[i_2] D_2 ... D_{order-1} G_order[j_q]

Tensor-train matrix (TTM), for an embedding table of V rows and D columns ([CoMERA] eq. 4)::

    core_k : (r_{k-1}, m_k, n_k, r_k),   row id -> mixed-radix digits (i_1, ..., i_order)
    E[id, (j_1..j_order)] = G_1[i_1, j_1] D_1 G_2[i_2, j_2] ... G_order[i_order, j_order]

``D_k = diag(d_k)`` holds the gates d_k (paper: rank parameters) between cores k and k+1. A product of modes may exceed
the features: the tail is padding, which is sliced away and which no input reaches. docs/method.md §1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import Field, dataclass, replace
from math import prod
from typing import Any, ClassVar, Self

from torch import Tensor

from comera.errors import SpecError


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


class _Format(ABC):
    """What both formats share: a train of cores that are joined by ranks."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _format: ClassVar[str]
    ranks: tuple[int, ...]

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
    def numel(self) -> int:
        """Parameters in the cores: the size S of docs/method.md §2, the sum over k of r_{k-1} · modes_k · r_k."""
        return sum(r * n * s for r, n, s in zip(self.ranks[:-1], self.sizes, self.ranks[1:], strict=True))

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

    def with_ranks(self, ranks: int | Sequence[int]) -> Self:
        """The same modes with other ranks: all of them, or one integer that is clipped to `rank_limits`."""
        return replace(self, ranks=clip_ranks(ranks, self.sizes))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready description; `spec_from_dict` reads it back."""
        return {"format": self._format, **vars(self)}

    def _validate(self, rows: str, cols: str) -> None:
        """Convert lists to tuples and check modes (fields `rows` and `cols`) and ranks."""
        for name in (rows, cols, "ranks"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, features in zip((rows, cols), self.shape, strict=True):
            _check_modes(name, getattr(self, name), features)


@dataclass(frozen=True)
class TTSpec(_Format):
    """Modes and ranks of a tensor train (TT): a compressed weight for a linear layer.

    The first cores carry the input features, one mode each, the others the output features. `tt_spec` chooses balanced
    modes for given features; build a spec directly for full control.

    Args:
        in_features, out_features: sizes of the last axes of input and output.
        in_modes: factors of the input features; where their product is larger, inputs are padded with zeros.
        out_modes: factors of the output features; where their product is larger, outputs are sliced.
        ranks: ``len(in_modes) + len(out_modes) + 1`` ranks, ones at both ends, inner ranks >= 0. Each is at most the
            product of all modes on either side of it (`rank_limits`). Rank 0 makes a weight of zeros.

    Raises:
        SpecError: features, modes and ranks that do not fit together.

    Example:
        >>> spec = TTSpec(768, 3072, in_modes=(12, 8, 8), out_modes=(12, 16, 16), ranks=(1, 12, 30, 30, 30, 16, 1))
        >>> print(spec)
        TT 12·8·8 / 12·16·16 ranks 12-30-30-30-16
        >>> spec.core_shapes
        ((1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 12, 30), (30, 16, 16), (16, 16, 1))
        >>> spec.numel, spec.rank_numel, f"{spec.ratio:.0f} times smaller than dense"
        (28960, 118, '81 times smaller than dense')

    Source: [CoMERA] eq. 3, docs/method.md §1.
    """

    _format = "tt"
    in_features: int
    out_features: int
    in_modes: tuple[int, ...]
    out_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        self._validate("in_modes", "out_modes")
        _check_ranks(self.ranks, self.rank_limits)

    @property
    def modes(self) -> tuple[int, ...]:
        """The mode of each core: the input modes, then the output modes."""
        return self.in_modes + self.out_modes

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.modes

    @property
    def split(self) -> int:
        """Number of input cores p; ``ranks[p]`` is the rank of the weight as a matrix."""
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

    def __str__(self) -> str:
        return f"TT {_join('·', self.in_modes)} / {_join('·', self.out_modes)} ranks {_join('-', self.inner_ranks)}"


@dataclass(frozen=True)
class TTMSpec(_Format):
    """Modes and ranks of a tensor-train matrix (TTM): a compressed embedding table.

    Every core carries one row mode and one column mode: the digits of an id select a slice of each core, and the
    product of the slices is the row. `ttm_spec` chooses balanced modes for a given table.

    Args:
        num_embeddings, embedding_dim: rows and columns of the table.
        row_modes: factors of the rows, one for each core; rows beyond `num_embeddings` are padding that no id reaches.
        col_modes: factors of the columns, one for each core; columns beyond `embedding_dim` are sliced away.
        ranks: ``order + 1`` ranks, ones at both ends, inner ranks >= 0. Each is at most the product of all modes on
            either side of it (`rank_limits`). Rank 0 makes a table of zeros.

    Raises:
        SpecError: sizes, modes and ranks that do not fit together.

    Example:
        >>> spec = TTMSpec(30_522, 768, row_modes=(16, 20, 10, 10), col_modes=(4, 4, 8, 6), ranks=(1, 30, 30, 30, 1))
        >>> print(spec)
        TTM 16·20·10·10 × 4·4·8·6 ranks 30-30-30
        >>> spec.core_shapes
        ((1, 16, 4, 30), (30, 20, 4, 30), (30, 10, 8, 30), (30, 10, 6, 1))
        >>> spec.padded_shape, f"{spec.ratio:.0f} times smaller than dense"
        ((32000, 768), '159 times smaller than dense')

    Source: [CoMERA] eq. 4, docs/method.md §1.
    """

    _format = "ttm"
    num_embeddings: int
    embedding_dim: int
    row_modes: tuple[int, ...]
    col_modes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        self._validate("row_modes", "col_modes")
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

    def __str__(self) -> str:
        return f"TTM {_join('·', self.row_modes)} × {_join('·', self.col_modes)} ranks {_join('-', self.inner_ranks)}"


Spec = TTSpec | TTMSpec


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """The spec that `to_dict` described. Raises SpecError for an unknown format and for missing or unknown fields."""
    rest = dict(fields)
    name = rest.pop("format", None)
    kind = next((kind for kind in (TTSpec, TTMSpec) if kind._format == name), None)
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


def _check_modes(what: str, modes: tuple[int, ...], features: int) -> None:
    if not isinstance(features, int) or features < 1:
        raise SpecError(f"the features behind {what} must be a positive integer, got {features!r}")
    if not modes or any(not isinstance(m, int) or m < 1 for m in modes):
        raise SpecError(f"{what} must be positive integers, got {modes}")
    if prod(modes) < features:
        raise SpecError(
            f"{what} {modes} hold {prod(modes)} entries but {features} are needed: "
            f"choose modes whose product is at least {features}, or omit them to have them chosen"
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
            raise SpecError(f"ranks must be integers >= 0, got {rank} at ranks[{k}] of {ranks}")
        if rank > limit:
            raise SpecError(
                f"rank {rank} at ranks[{k}] is above {limit}, the largest that the modes on its two sides allow: "
                f"lower it, or give one integer rank, which is clipped to the limits {limits}"
            )


def _join(separator: str, values: Sequence[int]) -> str:
    return separator.join(map(str, values))
