"""Rounding to a budget: over all chains at once, what costs least error per number saved goes first.

Dropping the singular value σ of a bond makes a squared error of σ², and the errors of all bonds of a chain add up at
most (Oseledets 2011). Errors of different weights are compared relative to each weight's own norm, ``w · σ²/‖W‖²``: a
layer's output scales with its weight, and what follows (a norm, a softmax) mostly takes the scale out again. A weight w
per chain may say how much the loss leans on it; without one all chains count alike. Which ranks to keep then is what
allocate.py decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer

from comera.errors import RankError
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.rank.allocate import allocate
from comera.rank.prune import unwrap
from comera.rank.target import check_multiple, resolve_target, smallest_size, spec_size
from comera.tt.decompose import Decomposition, round_cores, singular_values
from comera.tt.dense import absorb


@dataclass(frozen=True)
class RoundRow:
    """One chain: its inner bonds' ranks before and after, and the relative Frobenius error made of its weight.

    The error is that of the padded weight in float64, before the cast to the chain's dtype.
    """

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
    optimizers: every one that holds parameters of the chains. A rounded chain stands in another basis, in which its
    old moments mean nothing: its state is forgotten, step counts too, and begins as at the first step.
    weights: what an error in a chain counts, by the chain's name; 1 if left out. multiple: keep ranks at multiples.
    Inactive rank parameters count as zero. A rounded chain has cores of equal norm and rank parameters of one, as after
    TT-SVD; chains that keep their ranks keep numbers and moments, to the bit. Every bond keeps a rank of 1 (`multiple`)
    at least; a chain that stands for zero gets rank 0.
    Raises RankError, with nothing changed, for a target above the present size or below the smallest possible, for
    numbers that are not finite, for weights of no chain or below 0, and for a multiple below 1.
    """
    trains = dict(named_trains(model))
    if not trains:
        raise RankError(
            f"expected a model with compressed layers, got {type(model).__name__} without any: call tensorize_ first"
        )
    check_multiple(multiple)
    weights = weights or {}
    for name, weight in weights.items():
        if name not in trains or not 0 <= weight < float("inf"):
            raise RankError(f"weights: expected numbers >= 0 for chains ({', '.join(trains)}), got {name!r}: {weight}")
    before = sum(spec_size(train.spec) for train in trains.values())
    numbers = [p for train in trains.values() for p in train.parameters()]
    budget = resolve_target(
        target,
        size=before,
        smallest=smallest_size(model, multiple=multiple),
        bytes_per_number=sum(p.numel() * p.element_size() for p in numbers) / max(1, before),
        where="target",
    )
    # Everything is computed before anything is changed, so that an error leaves model and optimizers as they were.
    with _one_thread():
        done = _round(trains, budget, weights, multiple) if before > budget else {}
    rows = tuple(
        RoundRow(
            name,
            train.spec.inner_ranks,
            done[name].spec.inner_ranks if name in done else train.spec.inner_ranks,
            done[name].error if name in done else 0.0,
        )
        for name, train in trains.items()
    )
    for name, found in done.items():
        trains[name].set_(found.spec, found.cores)
    _forget({p for name in done for p in trains[name].parameters()}, optimizers)
    return RoundReport(before, sum(spec_size(train.spec) for train in trains.values()), budget, rows)


@torch.no_grad()
def canonicalize_(trains: Iterable[TensorTrain], optimizers: Sequence[Optimizer] = ()) -> None:
    """Bring chains into canonical form, their weights unchanged: each bond then runs over its singular vectors.

    What one entry of a bond carries is then orthogonal to what the others carry, so it can go without them. The active
    rank parameters are absorbed and become ones; as many as were inactive stay so, at zero, behind them. Ranks above
    what the neighbours can use fall. The optimizers forget the chains' state as in `round_`.
    Raises RankError, with nothing changed, for numbers that are not finite.
    """
    with _one_thread():
        found = [(train, round_cores(train.spec, _effective_cores("a chain", train))) for train in trains]
    for train, chain in found:
        active = [int(mask.sum()) for mask in train.unpruned()]
        ones = [
            (torch.arange(rank) < count).double() for rank, count in zip(chain.spec.inner_ranks, active, strict=True)
        ]
        train.set_(chain.spec, chain.cores, ones)
    _forget({p for train, _ in found for p in train.parameters()}, optimizers)


def _round(
    trains: Mapping[str, TensorTrain], budget: int, weights: Mapping[str, float], multiple: int
) -> dict[str, Decomposition]:
    """The chains that have to change, rounded."""
    cores = {name: _effective_cores(repr(name), train) for name, train in trains.items()}
    importances = []
    for name, train in trains.items():
        values = singular_values(train.spec, cores[name])
        norm = float(values[0].norm()) if values else 0.0
        weight = weights.get(name, 1.0)
        importances.append([((s / norm).square() * weight).flip(0).tolist() if norm else [] for s in values])
    ranks = allocate([train.spec for train in trains.values()], importances, budget, multiple=multiple, rounding=True)
    return {
        name: round_cores(train.spec, cores[name], ranks=(1, *bonds, 1))
        for (name, train), bonds in zip(trains.items(), ranks, strict=True)
        if bonds != train.spec.inner_ranks
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small decompositions on one thread of the CPU: threads gain nothing on them, and where cores are busy they wait
    for one another (six BERT layers, rank 30, two busy cores: 0.4 s on one thread, 22 s on two)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _effective_cores(name: str, train: TensorTrain) -> list[Tensor]:
    """Cores with the rank parameters absorbed, in float64 on the CPU, where small decompositions are fastest."""
    if not all(p.isfinite().all() for p in train.parameters()):
        raise RankError(
            f"{name} holds NaN or infinite values and cannot be rounded: go back to the last good checkpoint "
            "(nothing was rounded)"
        )
    masked = [d * active for d, active in zip(train.rank_params, train.unpruned(), strict=True)]
    return absorb([core.cpu().double() for core in train.cores], [d.cpu().double() for d in masked])


def _forget(parameters: set[nn.Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Let the optimizers begin anew with `parameters`, which stand in another basis."""
    for optimizer in map(unwrap, optimizers):
        for group in optimizer.param_groups:
            for parameter in parameters.intersection(group["params"]):
                state = optimizer.state.pop(parameter, None)
                # Most make the state at a parameter's next step; older versions of this one only when it is made.
                if state and isinstance(optimizer, Adagrad):
                    first = torch.full_like(parameter, group["initial_accumulator_value"])
                    optimizer.state[parameter] = {"step": torch.zeros_like(state["step"]), "sum": first}


def _ranks(ranks: tuple[int, ...]) -> str:
    return "-".join(map(str, ranks))
