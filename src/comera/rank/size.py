"""Size accounting, in one place: parameters stored (S), the differentiable surrogate Ŝ, and ∂Ŝ/∂d.

With gates d_k on the inner ranks of a tensor train, ``sizes_k`` entries in the modes of core k (TT: modes_k; TTM:
m_k · n_k) and boundary ranks that count 1 (docs/method.md §2)::

    S = Σ_k ‖d_{k-1}‖_0 · sizes_k · ‖d_k‖_0
    Ŝ = Σ_k ‖d_{k-1}‖_1 · sizes_k · ‖d_k‖_1
    ∂Ŝ/∂d_k[j] = sign(d_k[j]) · (sizes_k ‖d_{k-1}‖_1 + sizes_{k+1} ‖d_{k+1}‖_1)

The norms run over unpruned gates only. A pruned gate multiplies by exactly 0, so it counts 0 and gets gradient 0, and
cutting it out changes none of the three. The formulas hold for a train in which all gates of one inner rank are pruned:
its other cores count, and go on shrinking, until `prune_` empties the train. For a train of order 1, S is constant.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from comera.nn.tensor_train import TensorTrain
from comera.tt.format import core_size


def unpruned_ranks(train: TensorTrain) -> tuple[int, ...]:
    """Unpruned gates of each inner rank, ‖d_k‖_0: the ranks that pruning would leave. Synchronizes."""
    counts = [mask.sum() for mask in train.unpruned()]
    return tuple(torch.stack(counts).tolist()) if counts else ()


def unpruned_size(train: TensorTrain) -> int:
    """S of one tensor train: core entries between unpruned gates ([CoMERA] eq. 7). Synchronizes."""
    return core_size(train.spec, unpruned_ranks(train))


class SizeTable:
    """Index tables over tensor trains of one device, dtype and threshold (`size_tables` groups those of a model), so
    that Ŝ and ∂Ŝ/∂d of a whole model take a handful of operations.

    Building the table copies a few indices to the device; nothing else synchronizes.
    A table holds for the ranks of the moment: build a new one when `fits` returns False.

    Shapes: C cores, K gate vectors (one per inner rank), E gates of all vectors concatenated, R largest inner rank.
    """

    def __init__(self, trains: Iterable[TensorTrain]) -> None:
        self.trains = tuple(trains)
        self.rank_params = [d for train in self.trains for d in train.rank_params]
        self._key = [_key(train) for train in self.trains]
        specs = [train.spec for train in self.trains]
        self._ranks = [rank for spec in specs for rank in spec.inner_ranks]

        # One norm per gate vector, and a last one for the boundary ranks, which is 1 and found by index -1.
        vectors = iter(range(len(self._ranks)))
        ends = [pair for spec in specs for pair in pairwise([-1, *(next(vectors) for _ in spec.inner_ranks), -1])]
        starts = torch.tensor([0, *self._ranks]).cumsum(0)[:-1]
        ranks_K = torch.tensor(self._ranks, dtype=torch.long)
        column_R = torch.arange(max(self._ranks, default=0))
        # Vectors of fewer than R gates are padded with the index of the entry after the last, which is 0.
        padded_KR = torch.where(column_R < ranks_K[:, None], starts[:, None] + column_R, sum(self._ranks))

        like = _representative(self.trains[0])
        self._end = like.new_zeros(1)
        self._one = torch.ones(1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self._sizes_C = self._one.new_tensor([size for spec in specs for size in spec.sizes])
        left_C, right_C = torch.tensor(ends, dtype=torch.long).T.contiguous()
        self._left_C, self._right_C = left_C.to(like.device), right_C.to(like.device)
        self._core_before_K = (right_C >= 0).nonzero().flatten().to(like.device)
        self._core_after_K = (left_C >= 0).nonzero().flatten().to(like.device)
        self._padded_KR = padded_KR.to(like.device)
        self._vector_E = torch.repeat_interleave(ranks_K).to(like.device)

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


def size_tables(trains: Iterable[TensorTrain]) -> list[SizeTable]:
    """Tables over all `trains`, one per device, dtype and threshold."""
    groups: dict[tuple[Any, ...], list[TensorTrain]] = {}
    for train in trains:
        groups.setdefault(_key(train)[1:], []).append(train)
    return [SizeTable(group) for group in groups.values()]


def _representative(train: TensorTrain) -> Tensor:
    """The tensor whose dtype and device are those of the train's gates; its core if it has none (order 1)."""
    cores, gates = train.tensors
    return (gates or cores)[0]


def _key(train: TensorTrain) -> tuple[Any, ...]:
    first = _representative(train)
    return train.spec, first.device, first.dtype, train.threshold
