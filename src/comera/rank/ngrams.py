"""Which gates of an n-gram table to keep at a price for each parameter (docs/method.md §1b), for allocate.py.

That is a choice for each head alone: with the longest order m that it serves, the tables C_0 … C_{m-1} are paid once,
and of the orders up to m those gates stay that are worth their column of P and themselves.

O orders from 2, H heads, F features of an order.
"""

from collections.abc import Sequence
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.rank.size import head_prices
from comera.tt.ngram import NGramSpec


class NGramGates:
    """The unpruned gates of an n-gram table, and what each is worth.

    importances: of the unpruned gates of each order. unpruned: their indices.
    """

    def __init__(self, spec: NGramSpec, unpruned: Sequence[Tensor], importances: Sequence[Sequence[float]]) -> None:
        self.spec, self.unpruned = spec, unpruned
        orders, r = spec.longest - 1, spec.head_rank
        self._worth = torch.full((orders, spec.features), -inf, dtype=torch.float64)
        for own, gates, indices, values in zip(self._worth, spec.gated, unpruned, importances, strict=True):
            own[torch.tensor(gates, dtype=torch.long)[indices.cpu()]] = torch.tensor(values, dtype=torch.float64)
        self._worth = self._worth.view(orders, spec.heads, r)
        self._prices = head_prices(spec).flip(0)  # from order 2 up

    @property
    def most(self) -> float:
        """The largest importance."""
        finite = self._worth[self._worth > -inf]
        return float(finite.max()) if finite.numel() else 0.0

    def choose(self, price: float) -> list[Tensor]:
        """The indices of the gates of each order to keep, of those that are unpruned."""
        if price == inf:
            return [indices[:0] for indices in self.unpruned]
        net = self._worth - price * (self.spec.embedding_dim + 1)
        gain_OH = net.clamp_min(0).sum(2)
        profit_OH = F.pad((gain_OH - price * self._prices[:, None]).cumsum(0), (0, 0, 1, 0))
        # of equal profit the longest: all stay where nothing has a price
        longest_H = profit_OH.shape[0] - 1 - profit_OH.flip(0).argmax(0)
        kept_OF = ((net >= 0) & (torch.arange(len(net))[:, None] < longest_H)[..., None]).flatten(1)
        kept = []
        for own, gates, indices in zip(kept_OF, self.spec.gated, self.unpruned, strict=True):
            chosen = own[torch.tensor(gates, dtype=torch.long)[indices.cpu()]]
            kept.append(indices[chosen.to(indices.device)])
        return kept

    def size(self, kept: Sequence[Tensor]) -> int:
        """Parameters that are stored where these gates stay, gates included."""
        left = self.spec.keeping(kept)
        return left.numel + left.rank_numel
