"""The shape of a compressed weight: modes, ranks and counts, without parameters.

Tensor train (TT), for a weight that maps ``in`` features to ``out`` features ([CoMERA] eq. 3)::

    core_k : (r_{k-1}, modes_k, r_k),  r_0 = r_order = 1,  modes = in_modes + out_modes
    W[i_1..i_p, j_1..j_q] = G_1[i_1] D_1 G_2[i_2] D_2 ... D_{order-1} G_order[j_q]

Tensor-train matrix (TTM), for an embedding table of V rows and D columns ([CoMERA] eq. 4)::

    core_k : (r_{k-1}, m_k, n_k, r_k),   row id -> mixed-radix digits (i_1, ..., i_order)
    E[id, (j_1..j_order)] = G_1[i_1, j_1] D_1 G_2[i_2, j_2] ... G_order[i_order, j_order]

Block tensor train (BTT), also for linear layers: no parameter is shared between blocks. With in = a·b and out = c·d,
each of the a·c blocks of b × d features has a rank of its own, and K is the sum of these block ranks::

    R : (1, b, K),  L : (K, d, 1),   block (A, C) of W = Σ R[:, k] d_k L[k, :] over its own components k

``D_k = diag(d_k)`` holds the gates d_k (paper: rank parameters) between cores k and k+1. A product of modes may exceed
the features: the tail is padding, which is sliced away and which no input reaches. docs/method.md §1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.activations import SECOND_MOMENTS
from comera.tt.format import Format, LinearFormat, check_ranks, join
from comera.tt.ngram import NGramSpec


@dataclass(frozen=True)
class TTSpec(LinearFormat):
    """Modes and ranks of a tensor train (TT): a compressed weight for a linear layer.

    The first cores carry the input features, one mode each, the others the output features. `tt_spec` chooses balanced
    modes for given features; build a spec directly for full control.

    Args:
        in_features, out_features: sizes of the last axes of input and output.
        in_modes: factors of the input features; where their product is larger, inputs are padded with zeros.
        out_modes: factors of the output features; where their product is larger, outputs are sliced.
        ranks: ``len(in_modes) + len(out_modes) + 1`` ranks, ones at both ends, inner ranks >= 0. Each is at most the
            product of all modes on either side of it (`rank_limits`). Rank 0 makes a weight of zeros.
        activation: "silu", "gelu", "gelu_tanh" or "relu" between the last input core and the first output core: then
            the layer computes y = act(x A) B, and there is no dense weight. None for a product with a weight.

    Raises:
        SpecError: features, modes and ranks that do not fit together, or an unknown activation.

    Example:
        >>> from comera.tt import TTSpec
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
    activation: str | None = None

    def __post_init__(self) -> None:
        self._validate("in_modes", "out_modes")
        check_ranks(self.ranks, self.rank_limits)
        check_activation("a TTSpec", self.activation)

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
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(zip(self.ranks[:-1], self.modes, self.ranks[1:], strict=True))

    def __str__(self) -> str:
        modes = f"TT {join('·', self.in_modes)} / {join('·', self.out_modes)} ranks {join('-', self.inner_ranks)}"
        return f"{modes} {self.activation}" if self.activation else modes


@dataclass(frozen=True)
class TTMSpec(Format):
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
        >>> from comera.tt import TTMSpec
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
        check_ranks(self.ranks, self.rank_limits)

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
        return f"TTM {join('·', self.row_modes)} × {join('·', self.col_modes)} ranks {join('-', self.inner_ranks)}"


@dataclass(frozen=True)
class BTTSpec(LinearFormat):
    """Blocks of a block tensor train (BTT) and their ranks: a compressed weight for a linear layer.

    Input and output features are cut into blocks of equal size. The part of the weight between an input block and an
    output block is a matrix of a rank of its own; nothing is shared between them. `btt_spec` chooses the blocks.

    Args:
        in_features, out_features: sizes of the last axes of input and output.
        in_modes: number of input blocks a and features in each b; where a·b is larger, inputs are padded with zeros.
        out_modes: number of output blocks c and features in each d; where c·d is larger, outputs are sliced.
        block_ranks: one rank for all blocks, or a row of c ranks for each of the a input blocks; none above min(b, d).

    Raises:
        SpecError: features, modes and ranks that do not fit together.

    Example:
        >>> from comera.tt import BTTSpec
        >>> spec = BTTSpec(768, 3072, in_modes=(24, 32), out_modes=(64, 48), block_ranks=2)
        >>> print(spec)
        BTT 24·32 / 64·48 rank 2
        >>> spec.core_shapes
        ((1, 32, 3072), (3072, 48, 1))
        >>> spec.numel, f"{spec.ratio:.1f} times smaller than dense"
        (245760, '9.5 times smaller than dense')

    Source: Qiu et al. 2024 (arXiv:2406.06248), docs/method.md §1.
    """

    _format = "btt"
    in_features: int
    out_features: int
    in_modes: tuple[int, int]
    out_modes: tuple[int, int]
    block_ranks: int | tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        self._validate("in_modes", "out_modes")
        if (len(self.in_modes), len(self.out_modes)) != (2, 2):
            raise SpecError(f"blocks need in_modes (a, b) and out_modes (c, d), got {self.in_modes}, {self.out_modes}")
        ranks = self.block_ranks if isinstance(self.block_ranks, int) else tuple(map(tuple, self.block_ranks))
        rows, (a, c) = ((ranks,),) if isinstance(ranks, int) else ranks, self.blocks
        if not isinstance(ranks, int) and (len(rows) != a or any(len(row) != c for row in rows)):
            raise SpecError(f"block_ranks must be one integer or {a} rows of {c}, got rows of {[*map(len, rows)]}")
        found = {rank for row in rows for rank in row}
        for rank in found:
            if not isinstance(rank, int) or not 0 <= rank <= self.block_limit:
                raise SpecError(f"the rank of a {self.sizes} block must be from 0 to {self.block_limit}, got {rank!r}")
        object.__setattr__(self, "block_ranks", rows[0][0] if len(found) == 1 else ranks)
        object.__setattr__(self, "_count", a * c * rows[0][0] if len(found) == 1 else sum(map(sum, rows)))

    @property
    def blocks(self) -> tuple[int, int]:
        """Number of input blocks and of output blocks, (a, c)."""
        return self.in_modes[0], self.out_modes[0]

    @property
    def block_limit(self) -> int:
        """The largest useful rank of a block."""
        return min(self.sizes)

    layout_name = "block_ranks"

    @property
    def layout_of(self) -> str:
        a, c = self.blocks
        return f"{a} x {c} ranks from 0 to {self.block_limit} whose sum is that of"

    @property
    def layout(self) -> list[Any]:
        return [list(row) for row in self.rows_of_ranks]

    def with_layout(self, flat: Sequence[int]) -> Self:
        found = self.with_block_ranks(flat)
        if found.ranks != self.ranks:
            raise SpecError(f"expected block ranks of {self.ranks[1]} in all, got {found.ranks[1]}")
        return found

    @property
    def rows_of_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The rank of each block, a row for each input block."""
        ranks, (a, c) = self.block_ranks, self.blocks
        return ((ranks,) * c,) * a if isinstance(ranks, int) else ranks

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]  # a field of the others
        """Ones at both ends, and between them K, the sum of all block ranks."""
        return (1, vars(self)["_count"], 1)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.in_modes[1], self.out_modes[1])

    @property
    def reach(self) -> tuple[int, ...]:
        return (self.rank_limits[1],) * 2

    @property
    def split(self) -> int:
        """Number of input cores."""
        return 1

    @property
    def rank_limits(self) -> tuple[int, ...]:
        return (1, prod(self.blocks) * self.block_limit, 1)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        (b, d), count = self.sizes, self.ranks[1]
        return ((1, b, count), (count, d, 1))

    @property
    def levels(self) -> range:
        return range(prod(self.blocks), self.rank_limits[1] + 1)

    def ranks_at(self, level: int) -> tuple[int, ...]:
        """That number of components; every block has at least one."""
        return (level,)

    def with_ranks(self, ranks: int | Sequence[int]) -> Self:
        """The same blocks with another rank, clipped to `block_limit`; or with (1, K, 1), spread evenly over them."""
        if isinstance(ranks, int):
            return replace(self, block_ranks=min(ranks, self.block_limit))
        check_ranks(tuple(ranks), self.rank_limits)
        if tuple(ranks) == self.ranks:
            return self
        a, c = self.blocks
        each, more = divmod(ranks[1], a * c)
        flat = [each + (k < more) for k in range(a * c)]
        return self.with_block_ranks(flat)

    def keeping(self, kept: Sequence[Tensor]) -> Self:
        flat = torch.tensor(self.rows_of_ranks, device="cpu").flatten()
        owner = torch.repeat_interleave(flat)[kept[0].cpu()]
        return self.with_block_ranks(torch.bincount(owner, minlength=len(flat)).tolist())

    def with_block_ranks(self, flat: Sequence[int]) -> Self:
        """The same blocks with these ranks, in the order of (input block, output block)."""
        c = self.blocks[1]
        return replace(self, block_ranks=tuple(tuple(flat[k : k + c]) for k in range(0, len(flat), c)))

    def __str__(self) -> str:
        modes = f"BTT {join('·', self.in_modes)} / {join('·', self.out_modes)}"
        if isinstance(self.block_ranks, int):
            return f"{modes} rank {self.block_ranks}"
        flat = [rank for row in self.block_ranks for rank in row]
        return f"{modes} ranks {min(flat)} to {max(flat)}, mean {sum(flat) / len(flat):.2f}"


Spec = TTSpec | TTMSpec | BTTSpec | NGramSpec
"""Modes and ranks of a weight in any format."""


def spec_from_dict(fields: dict[str, Any]) -> Spec:
    """The spec that `to_dict` described. Raises SpecError for an unknown format and for missing or unknown fields."""
    rest = dict(fields)
    name = rest.pop("format", None)
    kinds: tuple[type[Spec], ...] = (TTSpec, TTMSpec, BTTSpec, NGramSpec)
    kind = next((kind for kind in kinds if kind._format == name), None)
    if kind is None:
        raise SpecError(f"expected a spec with format 'tt', 'ttm', 'btt' or 'ngram', got {fields.get('format')!r}")
    if set(rest) | ({"activation"} & set(kind.__dataclass_fields__)) != set(kind.__dataclass_fields__):
        raise SpecError(f"a {kind.__name__} needs the fields {sorted(kind.__dataclass_fields__)}, got {sorted(rest)}")
    try:
        return kind(**rest)
    except TypeError as error:
        raise SpecError(f"the fields of a {kind.__name__} are integers and lists of integers, got {rest}") from error


def check_activation(what: str, activation: object) -> None:
    """Raise SpecError unless it is the name of an activation or None."""
    if activation is not None and activation not in SECOND_MOMENTS:
        raise SpecError(f"{what} needs activation to be one of {', '.join(SECOND_MOMENTS)} or None, got {activation!r}")


def check_cores(spec: Spec, cores: Sequence[Tensor]) -> None:
    """Raise SpecError unless the cores have the shapes of `spec`."""
    shapes = tuple(tuple(core.shape) for core in cores)
    if shapes != spec.core_shapes:
        raise SpecError(f"expected {spec.order} cores of shapes {spec.core_shapes} for {spec}, got {shapes}")
