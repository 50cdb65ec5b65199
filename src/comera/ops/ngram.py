"""Features of all n-grams of a sequence of token ids, from a chain of prefixes (tt/ngram.py; docs/method.md §1b).

    e_1 = C_0[t_i],   x_n = e_{n-1} ⊙ C_{n-1}[t_{i-n+1}]  (TT: e_{n-1} C_{n-1}[·]),   e_n = ν(x_n)

    ν(x) = x / √(Σ_j w_j x_j² + ε),   w_j = 1/count on the features of the heads that order n needs, 0 elsewhere

A head is needed while a gate of this order or of a longer one is unpruned on it; others are zero. So features are the
same whether pruned gates are zero or cut out. An id that an n-gram may not reach multiplies by one (TT: by the
identity). The gates themselves multiply the columns of P, which are fewer than the features of a batch.

B sequences, T positions, L ids of a sequence, those before it included; V ids, W columns of a table, F all gates.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import DataError
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.tt.ngram import NGramSpec

EPS = 1e-6


class NGramIds(NamedTuple):
    """The ids that n-grams are made of.

    ids: (B, L) int64, the T ids of the sequence and before them L − T earlier ones; any valid id where none is reached.
    reach: (B, T) int64, how many ids before each position belong to its document.
    """

    ids: Tensor
    reach: Tensor

    @classmethod
    def of(cls, ids_BT: Tensor, longest: int) -> Self:
        """Ids of whole documents, one a row."""
        reach_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        return cls(F.pad(ids_BT, (longest - 1, 0)), reach_T.expand_as(ids_BT))

    def before(self, n: int) -> Tensor:
        """The ids `n` positions earlier, (B, T)."""
        length, positions = self.ids.shape[1], self.reach.shape[1]
        return self.ids[:, length - positions - n : length - n]


def ngram_features(
    ids: NGramIds,
    spec: NGramSpec,
    tables: Sequence[Tensor],
    gates: Sequence[Tensor],
    tokens_BLI: Tensor | None = None,
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
    needed = needed_features(spec, gates)
    dtype, r = tables[0].dtype, spec.head_rank
    first, *others = (table.to(merge_dtype(dtype)) for table in tables)
    wide = [first * needed[0].to(first.dtype)]
    wide += [c * n.to(c.dtype).repeat_interleave(r) for c, n in zip(others, needed, strict=True)]
    with without_autocast(wide[0]):
        e_BTW = _rows(ids, 0, wide[0], tokens_BLI)
        features = []
        for n, of_n in enumerate(needed, start=2):
            heads = spec.head_counts[n - 1]
            if not heads:
                break
            c_BTW = _rows(ids, n - 1, wide[n - 1], tokens_BLI)
            reached_BT1 = (ids.reach >= n - 1)[..., None]
            e_BTW = e_BTW[..., : heads * r]
            if r == 1:
                x_BTW = e_BTW * c_BTW.where(reached_BT1, 1.0)
            else:
                matrices = c_BTW.unflatten(-1, (heads, r, r))
                x_BTW = (e_BTW.unflatten(-1, (heads, 1, r)) @ matrices).flatten(-3).where(reached_BT1, e_BTW)
            weight = (of_n / of_n.sum().clamp_min(1)).to(x_BTW.dtype)
            e_BTW = x_BTW * torch.rsqrt((x_BTW.square() @ weight)[..., None] + EPS)
            own = spec.gated[n - 2]
            whole = len(own) == heads * r
            features.append(e_BTW if whole else e_BTW[..., _index(own, e_BTW.device)])
        if not features:
            return e_BTW[..., :0].to(dtype)
        return torch.cat(features, -1).to(dtype)


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


def _rows(ids: NGramIds, k: int, table: Tensor, tokens_BLI: Tensor | None) -> Tensor:
    """C_k[t] of the ids k positions earlier, (B, T, W)."""
    if tokens_BLI is None:
        return F.embedding(ids.before(k), table)
    length, positions = ids.ids.shape[1], ids.reach.shape[1]
    u_BTI = tokens_BLI[:, length - positions - k : length - k]
    return u_BTI.to(table.dtype) @ table[:-1] + table[-1]


def needed_features(spec: NGramSpec, gates: Sequence[Tensor]) -> list[Tensor]:
    """For each order the features of its e that are of a needed head, as ones among zeros, in at least float32."""
    r = spec.head_rank
    needed: list[Tensor] = []
    longer: Tensor | None = None
    with torch.no_grad():
        for n in range(spec.longest, 1, -1):
            g, heads, own = gates[n - 2], spec.head_counts[n - 1], spec.gated[n - 2]
            opened = g != 0
            if len(own) != heads * r:
                opened = torch.zeros(heads * r, dtype=torch.bool, device=g.device).index_copy(
                    0, _index(own, g.device), opened
                )
            of_heads = opened.view(heads, r).any(1)
            if longer is not None:
                of_heads = of_heads | F.pad(longer, (0, heads - len(longer)))
            longer = of_heads
            needed.insert(0, of_heads.to(merge_dtype(g.dtype)).repeat_interleave(r))
    return needed


def _index(columns: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(columns, dtype=torch.long, device=device)
