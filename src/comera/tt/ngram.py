"""N-gram tables: a row for every n-gram of token ids, V^N of them, as a product of N small tables.

The ids t_i, t_{i-1}, ... before and at position i make features of the orders n = 2 … N in one chain of prefixes::

    CP:  e_1 = C_0[t_i]                                C_k : (V, R)
         e_n = ν(e_{n-1} ⊙ C_{n-1}[t_{i-n+1}])         f_n = g_n ⊙ e_n
    TT:  e_1 = C_0[t_i],  e_n = ν(e_{n-1} C_{n-1}[t_{i-n+1}])          C_0 : (V, h, r),  C_k : (V, h, r, r)
    row: P [f_2; …; f_N]                               P : (D, Σ_n |g_n|)

ν divides by the root mean square; a product of N random factors would have the scale of none of them. An id before the
start of a document multiplies by one (TT: by the identity). A CP is the TT of R heads of rank 1, and one code serves
both. With `inner` the tables have plain low rank, C_k[t] = [u_t, 1] W_k with W_k : (r_0 + 1, ·), where u_t are r_0
features that the tokens have anyway, so that V does not enter the size.

The gates g_n, one a feature and order, say what is stored. A head of C_k is needed while a gate of some order n > k is
unpruned on it; a column of P is one gate's::

    S = V · Σ_k c_k · |heads of ∪_{n>k} g_n|  +  D · Σ_n |g_n|          c_0 = r, c_k = r²

Heads are sorted by the longest order that needs them, so C_k has the first of those of C_{k-1}, and no index is stored
but that of the gates among the features of their order (`columns`). docs/method.md §1b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.format import Format, join

SPREAD = 0.5  # std of C_k around one, of a CP


@dataclass(frozen=True)
class NGramSpec(Format):
    """Sizes and gates of an n-gram table.

    Args:
        num_embeddings: token ids, V.
        embedding_dim: features of a row, D.
        longest: the longest n-gram, N.
        heads: columns R of a CP, heads of a TT.
        head_rank: r; 1 is CP.
        inner: r_0 where the tables have plain low rank over that many features of a token; None for tables of V rows.
        columns: for each order n = 2 … N the features, out of those of e_n, that have a gate, ascending; None for all.

    Raises:
        SpecError: sizes below their least, or columns that are not sorted by need.

    Example:
        >>> from comera.tt.ngram import NGramSpec
        >>> spec = NGramSpec(256, 128, longest=6, heads=160)
        >>> print(spec)
        n-grams to 6 of 256 as CP 160
        >>> spec.numel, spec.rank_numel, f"{spec.shape[0]:.0e} rows"
        (348160, 800, '3e+14 rows')
        >>> spec.core_shapes[0], spec.core_shapes[-1]
        ((256, 160), (128, 800))

    Source: docs/method.md §1b.
    """

    _format = "ngram"
    layout_name = "columns"
    num_embeddings: int
    embedding_dim: int
    longest: int
    heads: int
    head_rank: int = 1
    inner: int | None = None
    columns: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        least = {"num_embeddings": 1, "embedding_dim": 1, "longest": 2, "heads": 0, "head_rank": 1, "inner": 1}
        for name, low in least.items():
            value = getattr(self, name)
            if not (name == "inner" and value is None) and (not _is_integer(value) or value < low):
                raise SpecError(f"an n-gram table needs {name} to be an integer >= {low}, got {value!r}")
        whole = tuple(tuple(range(self.features)) for _ in range(self.longest - 1))
        columns = whole if self.columns is None else tuple(map(tuple, self.columns))
        if len(columns) != self.longest - 1:
            raise SpecError(f"columns: expected {self.longest - 1} lists, one an order from 2, got {len(columns)}")
        needed: set[int] = set()
        counts: list[int] = []
        for n in range(self.longest, 1, -1):
            own = columns[n - 2]
            if list(own) != sorted(set(own)) or any(not _is_integer(j) or j < 0 for j in own):
                raise SpecError(f"columns of order {n}: expected different features in ascending order, got {own}")
            needed |= {j // self.head_rank for j in own}
            if needed != set(range(len(needed))):
                raise SpecError(f"columns of order {n}: expected heads sorted by the longest order that needs them")
            counts.insert(0, len(needed))
        if counts[0] != self.heads:
            raise SpecError(f"expected columns on all {self.heads} heads, got some on {counts[0]}")
        object.__setattr__(self, "columns", None if columns == whole else columns)
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_counts", (counts[0], *counts))

    @property
    def gated(self) -> tuple[tuple[int, ...], ...]:
        """`columns`, all of them where that is None."""
        found: tuple[tuple[int, ...], ...] = vars(self)["_columns"]
        return found

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of each table C_k, k = 0 … N − 1."""
        found: tuple[int, ...] = vars(self)["_counts"]
        return found

    @property
    def features(self) -> int:
        """Features of e_2, the most of any order."""
        return self.heads * self.head_rank

    @property
    def rows(self) -> int:
        """Rows of each table: V, or r_0 + 1."""
        return self.num_embeddings if self.inner is None else self.inner + 1

    @property
    def ranks(self) -> tuple[int, ...]:  # type: ignore[override]  # a field of the others
        """Gates of each order from 2, between ones."""
        return (1, *map(len, self.gated), 1)

    @property
    def order(self) -> int:
        """Number of cores: N tables and P."""
        return self.longest + 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.core_shapes)

    @property
    def core_shapes(self) -> tuple[tuple[int, ...], ...]:
        first, *others = self.head_counts
        widths = [first * self.head_rank, *(count * self.head_rank**2 for count in others)]
        return (*((self.rows, width) for width in widths), (self.embedding_dim, self.rank_numel))

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table that is never made: V^N rows."""
        return (self.num_embeddings**self.longest, self.embedding_dim)

    @property
    def dense_numel(self) -> int:
        """Elements that a dense model stores in its place: none, as it has no such table."""
        return 0

    @property
    def padded_shape(self) -> tuple[int, int]:
        return self.shape

    @property
    def rank_limits(self) -> tuple[int, ...]:
        """Ones at both ends; more features than these are no use to any order."""
        return (1, *[self.features] * (self.longest - 1), 1)

    @property
    def numel(self) -> int:
        """S: elements of the tables and of P."""
        return sum(self.sizes)

    def with_ranks(self, ranks: int | Sequence[int]) -> Self:
        """The same table with the first so many heads, or with (1, gates of each order ..., 1): the first ones."""
        if isinstance(ranks, int):
            return replace(self, heads=ranks, columns=None)
        if len(ranks) != self.longest + 1 or any(not _is_integer(rank) or rank < 0 for rank in ranks):
            raise SpecError(f"expected {self.longest + 1} ranks >= 0 with ones at both ends, got {tuple(ranks)}")
        return self._with([tuple(range(rank)) for rank in ranks[1:-1]])

    def keeping(self, kept: Sequence[Tensor]) -> Self:
        """The spec that is left when of each order only these gates stay."""
        return self.cut(kept)[0]

    def cut(self, kept: Sequence[Tensor]) -> tuple[Self, list[Callable[[Tensor], Tensor]], list[Tensor]]:
        """What is left when of each order only these gates stay.

        kept: indices into the gates of each order, ascending.

        Returns:
            The spec; for each core, how to cut a tensor of its shape; for each order, the gates that stay in the order
            in which they are stored now. Heads are sorted by need, so they change places.
        """
        features = [[own[j] for j in each.tolist()] for own, each in zip(self.gated, kept, strict=True)]
        needs = [0] * self.heads  # the longest order that needs each head
        for n, own in enumerate(features, start=2):
            for j in own:
                needs[j // self.head_rank] = n
        stay = sorted((head for head in range(self.heads) if needs[head]), key=lambda head: (-needs[head], head))
        place = {head: at for at, head in enumerate(stay)}
        r = self.head_rank
        starts = [0, *accumulate(map(len, self.gated))]
        columns, gates, of_p = [], [], []
        for start, own, each in zip(starts, features, kept, strict=False):
            moved = [place[j // r] * r + j % r for j in own]
            order = sorted(range(len(moved)), key=moved.__getitem__)
            columns.append(tuple(moved[k] for k in order))
            gates.append(torch.tensor([each.tolist()[k] for k in order], dtype=torch.long))
            of_p += [start + int(k) for k in gates[-1]]
        left = self._with(columns)
        cuts = []
        for k, count in enumerate(left.head_counts):
            heads = torch.tensor(stay[:count], dtype=torch.long)
            cuts.append(_taking(heads, r if k == 0 else r * r))
        cuts.append(_taking(torch.tensor(of_p, dtype=torch.long), 1))
        return left, cuts, gates

    @property
    def layout_of(self) -> str:
        return f"the features of {self.longest - 1} orders, ascending and sorted by need, that fit"

    @property
    def layout(self) -> list[Any]:
        """The columns of all orders, one after the other."""
        return [j for own in self.gated for j in own]

    def with_layout(self, flat: Sequence[int]) -> Self:
        if len(flat) != self.rank_numel:
            raise SpecError(f"expected columns for {self.rank_numel} gates, got {len(flat)}")
        starts = [0, *accumulate(map(len, self.gated))]
        found = self._with([tuple(flat[a:b]) for a, b in pairwise(starts)])
        if found.core_shapes != self.core_shapes:
            raise SpecError(f"expected columns that need cores of shapes {self.core_shapes}, got {found.core_shapes}")
        return found

    def with_shapes(self, cores: Sequence[Sequence[int]], gates: Sequence[int]) -> Self:
        square = self.head_rank**2
        counts = [shape[1] // (self.head_rank if k == 0 else square) for k, shape in enumerate(cores[:-1])]
        most = [count * self.head_rank for count in counts[1:]]
        # the last features of each order, among them those that no longer one needs
        found = self._with([tuple(range(end - count, end)) for end, count in zip(most, gates, strict=True)])
        if found.core_shapes != tuple(map(tuple, cores)):
            raise SpecError(f"expected cores of shapes {found.core_shapes} for {gates} gates, got {tuple(cores)}")
        return found

    def _with(self, columns: Sequence[tuple[int, ...]]) -> Self:
        heads = {j // self.head_rank for own in columns for j in own}
        return replace(self, heads=len(heads), columns=tuple(columns))

    def __str__(self) -> str:
        form = f"CP {self.heads}" if self.head_rank == 1 else f"TT {self.heads}·{self.head_rank}"
        inner = "" if self.inner is None else f" over {self.inner} features"
        ranks = "" if self.columns is None else f" ranks {join('-', self.inner_ranks)}"
        return f"n-grams to {self.longest} of {self.num_embeddings} as {form}{inner}{ranks}"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _taking(units: Tensor, width: int) -> Callable[[Tensor], Tensor]:
    """Keep these units of `width` neighboring columns, in this order."""

    def cut(core_VW: Tensor) -> Tensor:
        index = (units[:, None] * width + torch.arange(width)).flatten().to(core_VW.device)
        return core_VW.index_select(1, index)

    return cut


def random_ngram_cores(spec: NGramSpec, draw: Callable[..., Tensor]) -> list[Tensor]:
    """Tables around one (CP) or of matrices that keep the scale (TT), and P as a dense layer."""
    *tables, last = spec.core_shapes
    cores = []
    for shape in tables:
        spread = SPREAD if spec.head_rank == 1 else 1 / math.sqrt(spec.head_rank)
        mean = 1.0 if spec.head_rank == 1 else 0.0
        core = draw(*shape)
        if spec.inner is None:
            cores.append(mean + spread * core)
        else:  # features of unit variance, and a one
            core *= spread / math.sqrt(spec.inner)
            core[-1] += mean
            cores.append(core)
    return [*cores, draw(*last) / math.sqrt(max(1, last[1]))]
