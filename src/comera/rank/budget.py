"""Rounding to a budget: over all chains at once, what costs least error per number saved goes first.

In the canonical form of a chain the squared error of dropping singular value σ of a bond is σ², and the errors of all
bonds add up (Oseledets 2011). Errors of different weights are compared relative to each weight's own norm,
``w · σ²/‖W‖²``: a layer's output scales with its weight, and what follows (a norm, a softmax) mostly takes the scale
out again. A weight w per chain may say how much the loss leans on it; without one all chains count alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from comera.errors import RankError
from comera.nn.bonds import TensorTrain, named_trains
from comera.rank.allocate import allocate
from comera.rank.prune import unwrap
from comera.rank.sensitivity import STATE
from comera.rank.target import resolve_target, smallest_size, spec_size
from comera.tt.decompose import Decomposition, bond_singular_values, round_cores


@dataclass(frozen=True)
class RoundRow:
    """One chain: its inner bonds' ranks before and after, and the relative Frobenius error made of its weight."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    error: float


@dataclass(frozen=True)
class RoundReport:
    """What rounding to a budget did.

    before, after, target: numbers stored in all chains, cores and rank parameters; rows: one per chain, changed or not.
    """

    before: int
    after: int
    target: int
    rows: tuple[RoundRow, ...]

    @property
    def changed(self) -> bool:
        """Whether any rank got smaller."""
        return any(row.before != row.after for row in self.rows)

    @property
    def error(self) -> float:
        """Relative error of the chain that lost most."""
        return max((row.error for row in self.rows), default=0.0)

    def __str__(self) -> str:
        rows = [(r.name, _ranks(r.before), _ranks(r.after), f"{r.error:.2%}") for r in self.rows if r.before != r.after]
        if not rows:
            return f"rounded nothing: {self.before:,} numbers, at most {self.target:,} wanted"
        name, before, after = (max(len(row[i]) for row in rows) for i in range(3))
        lines = [f"{row[0]:<{name}}  {row[1]:<{before}} -> {row[2]:<{after}}  error {row[3]}" for row in rows]
        numbers = f"{self.before:,} -> {self.after:,} numbers, at most {self.target:,} wanted"
        return "\n".join([*lines, f"{len(rows)} of {len(self.rows)} chains rounded: {numbers}"])


@torch.no_grad()
def round_(
    model: nn.Module,
    target: float | int | str,
    *,
    optimizers: Sequence[Optimizer] = (),
    weights: Mapping[str, float] | None = None,
    multiple: int = 1,
) -> RoundReport:
    """Round a model's chains in place by SVD until together they store at most `target`; the target is always met.

    target: what all chains together may store: a part of their present size (0.2), numbers (350000) or bytes ("1.5MB").
    weights: what an error in a chain counts, by the chain's name; 1 if left out. multiple: keep ranks at multiples.
    optimizers: every one that holds parameters of the chains. A rounded chain stands in another basis, in which its
    old moments mean nothing: they and their step counts become 0, as at the start. Chains that keep their ranks keep
    numbers and moments. Every bond keeps a rank of 1 (`multiple`) at least; a chain that stands for zero gets rank 0.
    Raises RankError, with nothing changed, for a target above the present size or below the smallest possible, and
    for numbers that are not finite.
    """
    trains = dict(named_trains(model))
    if not trains:
        raise RankError(
            f"expected a model with compressed layers, got {type(model).__name__} without any: call tensorize_ first"
        )
    before = sum(spec_size(train.spec) for train in trains.values())
    numbers = [p for train in trains.values() for p in train.parameters()]
    budget = resolve_target(
        target,
        size=before,
        smallest=smallest_size(model, multiple=multiple),
        bytes_per_number=sum(p.numel() * p.element_size() for p in numbers) / max(1, before),
        where="target",
    )
    done = _round(trains, budget, weights or {}, multiple) if before > budget else {}
    rows = tuple(
        RoundRow(
            name,
            train.spec.bonds,
            done[name].spec.bonds if name in done else train.spec.bonds,
            done[name].error if name in done else 0.0,
        )
        for name, train in trains.items()
    )
    for name, found in done.items():
        _put(trains[name], found, optimizers)
    return RoundReport(before, sum(spec_size(train.spec) for train in trains.values()), budget, rows)


@torch.no_grad()
def canonicalize_(trains: Iterable[TensorTrain], optimizers: Sequence[Optimizer] = ()) -> None:
    """Bring chains into canonical form, their weights unchanged: each bond then runs over its singular vectors.

    What one entry of a bond carries is then orthogonal to what the others carry, so it can go without them. The rank
    parameters are absorbed and become ones; inactive entries go. The optimizers' moments become 0 as in `round_`.
    Raises RankError, with nothing changed, for numbers that are not finite.
    """
    found = [(train, round_cores(train.spec, _finite_cores("a chain", train))) for train in trains]
    for train, chain in found:
        _put(train, chain, optimizers)


def _put(train: TensorTrain, chain: Decomposition, optimizers: Sequence[Optimizer]) -> None:
    """Replace the numbers of a chain, and let the optimizers begin anew with its parameters."""
    before = {parameter: parameter.shape for parameter in train.parameters()}
    train.set_(chain.spec, chain.cores)
    for optimizer in map(unwrap, optimizers):
        for parameter, shape in before.items():
            state = optimizer.state.get(parameter, {})
            state.pop(STATE, None)
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            if any(value.ndim and value.shape != shape for value in tensors.values()):
                del optimizer.state[parameter]  # factored moments: made anew at the next step
                continue
            # Zeros and not a deletion: some optimizers (Adagrad) make their state only once.
            for key, value in tensors.items():
                state[key] = torch.zeros_like(parameter, dtype=value.dtype) if value.ndim else torch.zeros_like(value)


def _finite_cores(name: str, train: TensorTrain) -> list[Tensor]:
    cores = train.effective_cores()
    if not all(core.isfinite().all() for core in cores):
        raise RankError(
            f"{name} holds NaN or infinite values and cannot be rounded: go back to the last good checkpoint "
            "(nothing was rounded)"
        )
    return cores


def _round(
    trains: Mapping[str, TensorTrain], budget: int, weights: Mapping[str, float], multiple: int
) -> dict[str, Decomposition]:
    """The chains that have to change, rounded."""
    cores = {name: _finite_cores(repr(name), train) for name, train in trains.items()}
    importances = []
    for name, train in trains.items():
        values = bond_singular_values(train.spec, cores[name])
        norm = float(values[0].square().sum()) if values else 0.0
        weight = weights.get(name, 1.0) / norm if norm else 0.0
        importances.append([(sigma.square() * weight).flip(0).tolist() if norm else [] for sigma in values])
    ranks = allocate([train.spec for train in trains.values()], importances, budget, multiple=multiple, rounding=True)
    return {
        name: round_cores(train.spec, cores[name], ranks=(1, *bonds, 1))
        for (name, train), bonds in zip(trains.items(), ranks, strict=True)
        if bonds != train.spec.bonds
    }


def _ranks(ranks: tuple[int, ...]) -> str:
    return "-".join(map(str, ranks))
