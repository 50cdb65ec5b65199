"""Features of all n-grams of a sequence of token ids, from a chain of prefixes (tt/ngram.py; docs/method.md §1b).

    e_1 = C_0[t_i],   x_n = e_{n-1} ⊙ C_{n-1}[t_{i-n+1}]  (TT: e_{n-1} C_{n-1}[·]),   e_n = ν(x_n)

    ν(x) = x / √(Σ_j w_j x_j² + ε),   w_j = 1/count on the features of the heads that order n needs, 0 elsewhere

A head is needed while a gate of this order or of a longer one is unpruned on it; others are zero. So features are the
same whether pruned gates are zero or cut out. An id that an n-gram may not reach multiplies by one (TT: by the
identity). The gates themselves multiply the columns of P, which are fewer than the features of a batch. The kernel for
heads of rank 1: kernels/cpp/csrc/ngrams.cpp.

B sequences, T positions, L ids of a sequence, those before it included; V ids, W columns of a table, F all gates.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import DataError, IdError
from comera.kernels import select
from comera.kernels.cpp import ngrams as cpp
from comera.kernels.tracing import transformed
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.tt.ngram import NGramSpec

EPS = 1e-6


class NGramIds(NamedTuple):
    """The ids that n-grams are made of.

    ids: (B, L) int64, the T ids of the sequence and before them L − T earlier ones; any valid id where none is reached.
    reach: (B, T) int64, how many ids before each position belong to its document.

    Example:
        >>> import torch
        >>> from comera.nn import NGramIds
        >>> ids = NGramIds.of(torch.tensor([[7, 8, 9]]), longest=3)
        >>> ids.ids.tolist(), ids.reach.tolist(), ids.before(1).tolist()
        ([[0, 0, 7, 8, 9]], [[0, 1, 2]], [[0, 7, 8]])
    """

    ids: Tensor
    reach: Tensor

    @classmethod
    def of(cls, ids_BT: Tensor, longest: int, padding_idx: int | None = None) -> Self:
        """Ids of whole documents, one a row; no n-gram reaches the id of padding, or across it."""
        ids_BL = F.pad(ids_BT, (longest - 1, 0))
        positions = ids_BT.shape[1]
        reach_BT = torch.arange(positions, device=ids_BT.device).expand_as(ids_BT)
        if padding_idx is not None:
            reached_BT = torch.ones_like(ids_BT, dtype=torch.bool)
            reach_BT, known_BT = torch.zeros_like(ids_BT), reach_BT
            for n in range(1, longest):
                before_BT = ids_BL[:, longest - 1 - n :][:, :positions]
                reached_BT = reached_BT & (known_BT >= n) & (before_BT != padding_idx)
                reach_BT = reach_BT + reached_BT
        return cls(ids_BL, reach_BT)

    def before(self, n: int) -> Tensor:
        """The ids n positions earlier, (B, T)."""
        length, positions = self.ids.shape[1], self.reach.shape[1]
        return self.ids[:, length - positions - n : length - n]


def ngram_features(
    ids: NGramIds, spec: NGramSpec, tables: Sequence[Tensor], gates: Sequence[Tensor], tokens_BLI: Tensor | None = None
) -> Tensor:
    """The features e_2 … e_N of each position that have gates, before these.

    Args:
        ids: of the sequences, with at least N − 1 earlier ones.
        tables: C_0 … C_{N-1} as in `spec.core_shapes`, (V, W) or (r_0 + 1, W).
        gates: g_2 … g_N, of which only matters which are pruned, exactly zero.
        tokens_BLI: u of each of the ids, for a spec with `inner`.

    Returns:
        (B, T, F) in the dtype of the tables.

    Raises:
        DataError: ids that are no (B, T) batch, or too few earlier ones.

    Source: docs/method.md §1b.
    """
    check_ids(ids, spec)
    dtype = tables[0].dtype
    wide = [table.to(merge_dtype(dtype)) for table in tables]
    with without_autocast(wide[0]):
        if tokens_BLI is not None:  # a table with a row for each of the ids
            u_ZI = tokens_BLI.flatten(0, 1).to(wide[0].dtype)
            wide = [torch.addmm(table[-1], u_ZI, table[:-1]) for table in wide]
            places_BL = torch.arange(u_ZI.shape[0], device=u_ZI.device).view(tokens_BLI.shape[:2])
            ids = NGramIds(places_BL, ids.reach)
        needed = needed_features(spec, gates, wide[0].dtype)
        if spec.head_rank == 1 and select.supports("ngrams", *wide) and not transformed():
            made: Tensor = _Products.apply(ids, needed, *wide)
        else:
            made = _chain(spec.head_rank, ids, needed, wide)
        if spec.columns is not None:
            widths = [0, *(len(own) for own in needed)]
            starts = accumulate(widths[:-1])
            index = [start + j for start, own in zip(starts, spec.gated, strict=True) for j in own]
            made = made.index_select(-1, torch.tensor(index, dtype=torch.long, device=made.device))
        return made.to(dtype)


class _Products(torch.autograd.Function):
    """The formulas at the top of the file, by the kernel."""

    @staticmethod
    def forward(ctx: Any, ids: NGramIds, needed: list[Tensor], *tables: Tensor) -> Tensor:
        try:
            e_BTE, rho = cpp.ngrams(*ids, tables, needed, EPS)
        except ValueError:
            raise IdError(f"expected token ids from 0 to {len(tables[0]) - 1} for n-grams, got others") from None
        ctx.save_for_backward(*ids, e_BTE, rho, *needed, *tables)
        return e_BTE

    @staticmethod
    def backward(ctx: Any, de_BTE: Tensor) -> tuple[Tensor | None, ...]:
        ids, reach, e_BTE, rho, *rest = ctx.saved_tensors
        orders = len(rest) // 2
        needed, tables = rest[:orders], rest[orders:]
        if torch.is_grad_enabled():  # create_graph: by torch's own autograd
            made = _chain(1, NGramIds(ids, reach), needed, tables)
            return None, None, *torch.autograd.grad(made, tables, de_BTE, create_graph=True)
        return None, None, *cpp.ngrams_backward(de_BTE, e_BTE, rho, ids, reach, tables, needed)


def _chain(r: int, ids: NGramIds, needed: Sequence[Tensor], tables: Sequence[Tensor]) -> Tensor:
    """All features of all orders, (B, T, their number). r: features of a head."""
    first, *others = tables
    e_BTW = F.embedding(ids.before(0), first * needed[0])
    features = []
    for n, (of_n, table) in enumerate(zip(needed, others, strict=True), start=1):
        width = len(of_n)
        c_BTW = F.embedding(ids.before(n), table * of_n.repeat_interleave(r))
        reached_BT1 = (ids.reach >= n)[..., None]
        e_BTW = e_BTW[..., :width]
        if r == 1:
            x_BTW = e_BTW * c_BTW.where(reached_BT1, 1.0)
        else:
            matrices = c_BTW.unflatten(-1, (width // r, r, r))
            x_BTW = (e_BTW.unflatten(-1, (width // r, 1, r)) @ matrices).flatten(-3).where(reached_BT1, e_BTW)
        e_BTW = x_BTW * torch.rsqrt((x_BTW.square() @ (of_n / of_n.sum().clamp_min(1)))[..., None] + EPS)
        features.append(e_BTW)
    return torch.cat(features, -1)


def check_ids(ids: NGramIds, spec: NGramSpec) -> None:
    """Raise DataError for ids that are no (B, T) batch, or too few earlier ones."""
    if ids.reach.dim() != 2 or ids.ids.dim() != 2:
        raise DataError(
            f"expected token ids as (batch, positions) for n-grams, got shape {tuple(ids.ids.shape)}: the order of "
            "the last axis is what n-grams are made of"
        )
    earlier = ids.ids.shape[1] - ids.reach.shape[1]
    if earlier < spec.longest - 1:
        raise DataError(f"expected {spec.longest - 1} earlier ids for n-grams to {spec.longest}, got {earlier}")


def needed_features(spec: NGramSpec, gates: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """For each order the features of its e that are of a needed head, as ones among zeros."""
    r, orders = spec.head_rank, spec.longest - 1
    with torch.no_grad():  # all orders at once: a generated token is a few microseconds for each operation
        opened = torch.cat(list(gates)) != 0
        if spec.columns is not None:
            places = [n * spec.features + j for n, own in enumerate(spec.gated) for j in own]
            nowhere = torch.zeros(orders * spec.features, dtype=torch.bool, device=opened.device)
            opened = nowhere.index_copy(0, _index(places, opened.device), opened)
        of_heads = opened.view(orders, spec.heads, r).any(2)
        needed = (of_heads.flip(0).cumsum(0).flip(0) > 0).to(dtype)  # by this order or a longer one
        needed = needed if r == 1 else needed.repeat_interleave(r, 1)
        return [own[: heads * r] for own, heads in zip(needed, spec.head_counts[1:], strict=True)]


def _index(columns: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(columns, dtype=torch.long, device=device)
