"""The only accounting of sizes: numbers that a model stores, S of METHOD §2, its surrogate Ŝ and ∂Ŝ/∂d.

With the rank parameters d_k on the bonds of a chain and ``sizes_k`` the entries of core k's modes (TT: modes_k;
TTM: m_k · n_k), boundary bonds counting 1::

    S = Σ_k ‖d_{k-1}‖_0 · sizes_k · ‖d_k‖_0
    Ŝ = Σ_k ‖d_{k-1}‖_1 · sizes_k · ‖d_k‖_1
    ∂Ŝ/∂d_k[j] = sign(d_k[j]) · (sizes_k ‖d_{k-1}‖_1 + sizes_{k+1} ‖d_{k+1}‖_1)

All norms run over active entries only: an inactive one multiplies by exactly 0, so it counts 0 and gets gradient 0,
and cutting it out changes none of the three. A chain with a bond that has no active entry keeps this formula: its
other cores count, and shrink further, until `prune_` empties the chain. A chain of order 1 has no bonds: constant S.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.tensor_train import TensorTrain, named_trains


def unpruned_ranks(train: TensorTrain) -> tuple[int, ...]:
    """Active entries of each inner bond, ‖d_k‖_0: the ranks that pruning would leave. Waits for the device."""
    counts = [mask.sum() for mask in train.unpruned()]
    return tuple(torch.stack(counts).tolist()) if counts else ()


def unpruned_size(train: TensorTrain) -> int:
    """S of one chain: core entries that active bonds reach ([CoMERA] eq. 7). Waits for the device."""
    ranks = (1, *unpruned_ranks(train), 1)
    return sum(left * size * right for (left, right), size in zip(pairwise(ranks), train.spec.sizes, strict=True))


class SizeTable:
    """Chains side by side, so that Ŝ and ∂Ŝ/∂d of a whole model take a handful of operations.

    trains: chains of one device, dtype and threshold (`size_tables` sorts a model's chains so).
    Making the table copies a few indices to the device; `surrogate` and `surrogate_grads` never wait for it.
    It holds for the ranks of the moment: make a new one when `fits` no longer says so.

    Legend: C cores, B bonds, E entries of all bonds in a row, R largest rank.
    """

    def __init__(self, trains: Iterable[TensorTrain]) -> None:
        self.trains = tuple(trains)
        self.rank_params = [d for train in self.trains for d in train.rank_params]
        self._key = [_key(train) for train in self.trains]
        specs = [train.spec for train in self.trains]
        self._ranks = [rank for spec in specs for rank in spec.inner_ranks]

        # One norm per bond and a last one, the 1 of every boundary bond, which index -1 finds.
        bonds = iter(range(len(self._ranks)))
        ends = [pair for spec in specs for pair in pairwise([-1, *(next(bonds) for _ in spec.inner_ranks), -1])]
        starts = torch.tensor([0, *self._ranks]).cumsum(0)[:-1]
        ranks_B = torch.tensor(self._ranks, dtype=torch.long)
        column_R = torch.arange(max(self._ranks, default=0))
        # Bonds of fewer than R entries are filled up with the entry after the last, which is 0.
        padded_BR = torch.where(column_R < ranks_B[:, None], starts[:, None] + column_R, sum(self._ranks))

        like = _first(self.trains[0])
        self._end = like.new_zeros(1)
        self._one = torch.ones(1, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        self._sizes_C = self._one.new_tensor([size for spec in specs for size in spec.sizes])
        self._left_C, self._right_C, self._core_before_B, self._core_after_B = (
            torch.tensor(index, dtype=torch.long, device=like.device)
            for index in (
                [left for left, _ in ends],
                [right for _, right in ends],
                [core for core, (_, right) in enumerate(ends) if right >= 0],
                [core for core, (left, _) in enumerate(ends) if left >= 0],
            )
        )
        self._padded_BR = padded_BR.to(like.device)
        self._bond_E = torch.repeat_interleave(ranks_B).to(like.device)

    def fits(self) -> bool:
        """Whether ranks, thresholds, dtypes and devices are still those that the table was made for."""
        return all(_key(train) == key for train, key in zip(self.trains, self._key, strict=True))

    @torch.no_grad()
    def size(self) -> Tensor:
        """S with the active rank parameters, Σ ‖d_k‖_0 more: the numbers that pruning would leave, on the device."""
        counts = self._norms((self._active() != 0).to(self._one.dtype))
        cores = (counts[self._left_C] * self._sizes_C * counts[self._right_C]).sum()
        return cores + counts[:-1].sum()

    def surrogate(self) -> Tensor:
        """Ŝ, a scalar on the device in float32 at least; differentiable in the rank parameters."""
        norms = self._norms(self._active())
        return (norms[self._left_C] * self._sizes_C * norms[self._right_C]).sum()

    @torch.no_grad()
    def surrogate_grads(self, scale: float | Tensor = 1.0) -> list[Tensor]:
        """scale · ∂Ŝ/∂d for each of `rank_params`, closed form; exactly zero at inactive entries."""
        active_E = self._active()
        norms = self._norms(active_E)
        to_right_C = self._sizes_C * norms[self._left_C]
        to_left_C = self._sizes_C * norms[self._right_C]
        slope_B = (to_right_C[self._core_before_B] + to_left_C[self._core_after_B]) * scale
        return list((active_E[:-1].sign() * slope_B[self._bond_E]).split(self._ranks)) if self._ranks else []

    def _active(self) -> Tensor:
        """All rank parameters in a row, inactive ones zero (compared as the layers do), and a last zero: (E + 1,)."""
        flat = torch.cat([*self.rank_params, self._end])
        return torch.where(flat > self.trains[0].threshold, flat, 0.0).to(self._one.dtype)

    def _norms(self, active_E: Tensor) -> Tensor:
        """‖d‖_1 of every bond and the 1 of the boundary: (B + 1,)."""
        return torch.cat([active_E.abs()[self._padded_BR].sum(1), self._one])


def size_tables(trains: Iterable[TensorTrain]) -> list[SizeTable]:
    """Tables over all `trains`, one per device, dtype and threshold."""
    groups: dict[tuple[Any, ...], list[TensorTrain]] = {}
    for train in trains:
        groups.setdefault(_key(train)[1:], []).append(train)
    return [SizeTable(group) for group in groups.values()]


def surrogate(train: TensorTrain) -> Tensor:
    """Ŝ of one chain, a scalar on its device in float32 at least; differentiable in the rank parameters."""
    return SizeTable([train]).surrogate()


def surrogate_grads(train: TensorTrain) -> list[Tensor]:
    """∂Ŝ/∂d_k of one chain, one vector per bond, closed form; exactly zero at inactive entries."""
    return SizeTable([train]).surrogate_grads()


@dataclass(frozen=True)
class ModelSize:
    """Numbers that a model stores, and those that its dense original had.

    total: numbers in all parameters, each once; tensorized: the part in chains (cores and rank parameters).
    dense_total, dense_tensorized: the same with every chain replaced by the weight that it stands for; a bias is
    no part of a chain. bytes: of all parameters, in their own dtypes.
    """

    total: int
    tensorized: int
    dense_total: int
    dense_tensorized: int
    bytes: int

    @property
    def ratio(self) -> float:
        """Dense numbers per stored number over the whole model (inf when nothing is stored)."""
        return _ratio(self.dense_total, self.total)

    @property
    def tensorized_ratio(self) -> float:
        """Dense numbers per stored number over the chains; 1 without chains, inf when all of them are empty."""
        return _ratio(self.dense_tensorized, self.tensorized)

    def __str__(self) -> str:
        return (
            f"{self.total:,} numbers ({self.bytes / 2**20:.1f} MiB), {self.ratio:.1f}x below dense; "
            f"tensorized layers {self.tensorized:,}, {self.tensorized_ratio:.1f}x"
        )


def model_size(model: nn.Module, *, dense_total: int | None = None) -> ModelSize:
    """Count a model's parameters, tied ones once; reads shapes only, so it works on the meta device too.

    dense_total: numbers of the dense original, where it is known. Without it every chain stands for a dense weight of
    its own, which overstates the original if a weight that was tied there has become two chains.
    """
    parameters = list(model.parameters())
    trains = [train for _, train in named_trains(model)]
    total = sum(p.numel() for p in parameters)
    tensorized = sum(p.numel() for p in {p for train in trains for p in train.parameters()})
    if dense_total is None:
        dense_total = total - tensorized + sum(train.spec.dense_numel for train in trains)
    return ModelSize(
        total=total,
        tensorized=tensorized,
        dense_total=dense_total,
        dense_tensorized=dense_total - (total - tensorized),
        bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


def _ratio(dense: int, stored: int) -> float:
    if stored:
        return dense / stored
    return float("inf") if dense else 1.0


def _first(train: TensorTrain) -> Tensor:
    """The tensor whose dtype and device stand for the chain's bonds; one without bonds has only its core."""
    first: Tensor = (train.rank_params if len(train.rank_params) else train.cores)[0]
    return first


def _key(train: TensorTrain) -> tuple[Any, ...]:
    first = _first(train)
    return train.spec, first.device, first.dtype, train.threshold
