"""Size accounting, in one place: parameters stored (S), the differentiable surrogate Ŝ, and ∂Ŝ/∂d.

With gates d_k on the inner ranks of a tensor train, ``sizes_k`` entries in the modes of core k (TT: modes_k; TTM:
m_k · n_k) and boundary ranks that count 1 (docs/method.md §2)::

    S = Σ_k ‖d_{k-1}‖_0 · sizes_k · ‖d_k‖_0
    Ŝ = Σ_k ‖d_{k-1}‖_1 · sizes_k · ‖d_k‖_1
    ∂Ŝ/∂d_k[j] = sign(d_k[j]) · (sizes_k ‖d_{k-1}‖_1 + sizes_{k+1} ‖d_{k+1}‖_1)

The norms run over unpruned gates only. A pruned gate multiplies by exactly 0, so it counts 0 and gets gradient 0, and
cutting it out changes none of the three. The formulas hold for a train in which all gates of one inner rank are pruned:
its other cores count, and go on shrinking, until `prune_` empties the train. For a train of order 1, S is constant.

An n-gram table stores head h of table C_k while a gate of an order n > k is unpruned on it, and a column of P for each
such gate. With ℓ1 in place of ℓ0 the largest gate stands for the union of the orders (docs/method.md §1b)::

    Ŝ = rows · Σ_k c_k Σ_h M_k[h]  +  D · Σ_n ‖g_n‖_1,     M_k[h] = max of |g_n[j]| over n > k and the gates j of h

so ∂Ŝ/∂g presses on each gate by its column of P, and on the largest gate of a head by the tables that it alone keeps.
"""

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from comera.nn.tensor_train import TensorTrain
from comera.tt.format import core_size
from comera.tt.ngram import NGramSpec


def unpruned_ranks(train: TensorTrain) -> tuple[int, ...]:
    """Unpruned gates of each inner rank, ‖d_k‖_0: the ranks that pruning would leave. Synchronizes."""
    counts = [mask.sum() for mask in train.unpruned()]
    return tuple(torch.stack(counts).tolist()) if counts else ()


def unpruned_size(train: TensorTrain) -> int:
    """S of one tensor train: core entries between unpruned gates ([CoMERA] eq. 7). Synchronizes."""
    if isinstance(train.spec, NGramSpec):
        return train.spec.keeping([mask.nonzero().flatten() for mask in train.unpruned()]).numel
    return core_size(train.spec, unpruned_ranks(train))


class SizeTable:
    """Index tables over tensor trains of one device, dtype and threshold (`size_tables` groups those of a model), so
    that Ŝ and ∂Ŝ/∂d of a whole model take a handful of operations.

    Building the table copies a few indices to the device; nothing else synchronizes.
    A table holds for the ranks of the moment: build a new one when `fits` returns False.

    Shapes: C cores, K gate vectors (one per inner rank), E gates of all vectors concatenated, R largest inner rank.
    """

    def __init__(self, trains: Iterable[TensorTrain]) -> None:
        self._note(trains)
        specs = [train.spec for train in self.trains]

        # One norm per gate vector, and a last one for the boundary ranks, which is 1 and found by index -1.
        vectors = iter(range(len(self._ranks)))
        ends = [pair for spec in specs for pair in pairwise([-1, *(next(vectors) for _ in spec.inner_ranks), -1])]
        starts, most, total = accumulate([0, *self._ranks]), max(self._ranks, default=0), sum(self._ranks)

        def indices(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self._end.device)

        self._sizes_C = self._one.new_tensor([size for spec in specs for size in spec.sizes])
        self._left_C, self._right_C = indices([left for left, _ in ends]), indices([right for _, right in ends])
        self._core_before_K = indices([core for core, (_, right) in enumerate(ends) if right >= 0])
        self._core_after_K = indices([core for core, (left, _) in enumerate(ends) if left >= 0])
        # Vectors of fewer than R gates are padded with the index of the entry after the last, which is 0.
        self._padded_KR = indices(
            [
                [start + j if j < rank else total for j in range(most)]
                for start, rank in zip(starts, self._ranks, strict=False)
            ]
        ).view(len(self._ranks), most)
        self._vector_E = indices([k for k, rank in enumerate(self._ranks) for _ in range(rank)])

    def _note(self, trains: Iterable[TensorTrain]) -> None:
        self.trains = tuple(trains)
        self.rank_params = [d for train in self.trains for d in train.rank_params]
        self._key = [_key(train) for train in self.trains]
        self._ranks = [rank for train in self.trains for rank in train.spec.inner_ranks]
        like = _representative(self.trains[0])
        self._end = like.new_zeros(1)
        self._one = torch.ones(1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)

    def fits(self) -> bool:
        """Whether ranks, thresholds, dtypes and devices are still those that the table was built for."""
        return all(_key(train) == key for train, key in zip(self.trains, self._key, strict=True))

    @torch.no_grad()
    def size(self) -> Tensor:
        """S plus the unpruned gates, Σ ‖d_k‖_0: the parameters that pruning would leave; a scalar on the device."""
        counts = self._norms((self._gates() != 0).to(self._one.dtype))
        cores = (counts[self._left_C] * self._sizes_C * counts[self._right_C]).sum()
        return cores + counts[:-1].sum()

    def surrogate(self) -> Tensor:
        """Ŝ, a scalar on the device in at least float32; differentiable in the gates."""
        norms = self._norms(self._gates())
        return (norms[self._left_C] * self._sizes_C * norms[self._right_C]).sum()

    @torch.no_grad()
    def surrogate_grads(self, scale: float | Tensor = 1.0) -> list[Tensor]:
        """scale · ∂Ŝ/∂d for each of `rank_params`, in closed form; exactly zero for pruned gates."""
        gates_E = self._gates()
        norms = self._norms(gates_E)
        to_right_C = self._sizes_C * norms[self._left_C]
        to_left_C = self._sizes_C * norms[self._right_C]
        slope_K = (to_right_C[self._core_before_K] + to_left_C[self._core_after_K]) * scale
        return list((gates_E[:-1].sign() * slope_K[self._vector_E]).split(self._ranks)) if self._ranks else []

    @torch.no_grad()
    def gate_grads(self, scale: float | Tensor = 1.0) -> list[Tensor]:
        """scale · ∂(Σ ‖d‖_1)/∂d for each of `rank_params`; exactly zero for pruned gates."""
        return list((self._gates()[:-1].sign() * scale).split(self._ranks)) if self._ranks else []

    @torch.no_grad()
    def unpruned_gates(self) -> Tensor:
        """How many gates are not pruned; a scalar on the device."""
        return (self._gates() != 0).sum()

    def _gates(self) -> Tensor:
        """All gates concatenated, pruned ones zero (by the comparison that the layers make), then a zero: (E + 1,)."""
        flat = torch.cat([*self.rank_params, self._end])
        return flat.masked_fill(flat <= self.trains[0].threshold, 0.0).to(self._one.dtype)

    def _norms(self, gates_E: Tensor) -> Tensor:
        """‖d‖_1 of every gate vector, then the 1 of the boundary ranks: (K + 1,)."""
        return torch.cat([gates_E.abs()[self._padded_KR].sum(1), self._one])


class NGramSizeTable(SizeTable):
    """A `SizeTable` of one n-gram table.

    O orders from 2, H heads, r features of a head, E gates of all orders.
    """

    def __init__(self, train: TensorTrain) -> None:
        self._note([train])
        assert isinstance(train.spec, NGramSpec)
        self.spec = train.spec
        # of each gate among the features of all orders
        places = [k * train.spec.features + j for k, own in enumerate(train.spec.gated) for j in own]
        self._place_E = torch.tensor(places, dtype=torch.long, device=self._end.device)
        self._prices_O = head_prices(train.spec).to(self._one)

    def _by_head(self, gates_E: Tensor) -> Tensor:
        """Gates as (O, H, r), zero where there is none."""
        shape = self.spec.longest - 1, self.spec.heads, self.spec.head_rank
        flat = gates_E.new_zeros(shape[0] * self.spec.features)
        return flat.index_copy(0, self._place_E, gates_E).view(shape)

    @torch.no_grad()
    def size(self) -> Tensor:
        open_E = (self._gates()[:-1] != 0).to(self._one.dtype)
        needed_OH = self._by_head(open_E).amax(2).flip(0).cummax(0).values
        return needed_OH.sum(1) @ self._prices_O + open_E.sum() * (self.spec.embedding_dim + 1)

    def surrogate(self) -> Tensor:
        sizes_E = self._gates()[:-1].abs()
        largest_OH = self._by_head(sizes_E).amax(2).flip(0).cummax(0).values
        return largest_OH.sum(1) @ self._prices_O + sizes_E.sum() * self.spec.embedding_dim

    @torch.no_grad()
    def surrogate_grads(self, scale: float | Tensor = 1.0) -> list[Tensor]:
        gates_E = self._gates()[:-1]
        by_head = self._by_head(gates_E.abs())
        of_head, place_OH = by_head.max(2)
        longest_OH = of_head.flip(0).cummax(0).indices  # from the longest order down, as the prices
        slope_OH = torch.zeros_like(of_head)
        slope_OH.scatter_add_(0, longest_OH, self._prices_O[:, None].expand_as(of_head))
        slopes = torch.zeros_like(by_head).scatter_(2, place_OH[..., None], slope_OH.flip(0)[..., None])
        slope_E = (slopes.flatten()[self._place_E] + self.spec.embedding_dim) * scale
        return list((gates_E.sign() * slope_E).split(self._ranks))


def size_tables(trains: Iterable[TensorTrain]) -> list[SizeTable]:
    """Tables over all `trains`, one per device, dtype and threshold, and one for each n-gram table."""
    groups: dict[tuple[Any, ...], list[TensorTrain]] = {}
    tables: list[SizeTable] = []
    for train in trains:
        if isinstance(train.spec, NGramSpec):
            tables.append(NGramSizeTable(train))
        else:
            groups.setdefault(_key(train)[1:], []).append(train)
    return [*(SizeTable(group) for group in groups.values()), *tables]


def head_prices(spec: NGramSpec) -> Tensor:
    """What a head costs more in tables where it serves an order, from the longest order down to 2, (O,): C_{n-1}, and
    for order 2 also C_0."""
    r = spec.head_rank
    prices = [spec.rows * r * r] * (spec.longest - 1)
    prices[-1] += spec.rows * r
    return torch.tensor(prices, dtype=torch.float64)


def _representative(train: TensorTrain) -> Tensor:
    """The tensor whose dtype and device are those of the train's gates; its core if it has none (order 1)."""
    cores, gates = train.tensors
    return (gates or cores)[0]


def _key(train: TensorTrain) -> tuple[Any, ...]:
    first = _representative(train)
    return train.spec, first.device, first.dtype, train.threshold
