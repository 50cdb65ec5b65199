"""Which slices a model can spare, measured by the loss: the late stage's way to choose ranks (beyond [CoMERA]).

Switching off entry j of bond k changes the loss, to first order, by ``−d_k[j] ∂L/∂d_k[j]``; its mean square over the
last steps says how much the loss leans on that slice (Molchanov et al. 2019, "Importance estimation for neural network
pruning"). It needs nothing but the gradient that a step has anyway. Every so often the slices that matter least per
number saved are switched off, over all chains at once (allocate.py). What stays is left as it is: the ℓ1 surrogate
instead presses on all rank parameters alike, and under Adam they fall in lockstep until whole layers die.

The running mean is kept in the optimizer's state of d, so pruning cuts it, rounding resets it and a checkpoint brings
it back with the other moments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.nn.tensor_train import TensorTrain
from comera.rank.allocate import allocate

STATE = "sensitivity"
_DECAY = 0.95  # some twenty steps


@torch.no_grad()
def accumulate_(optimizer: Optimizer, rank_params: Iterable[Tensor]) -> None:
    """After a step of `optimizer`: take (d ∂L/∂d)² into the running mean of each of `rank_params` with a gradient.

    `rank_params` are parameters of the optimizer. Waits for nothing. A gradient that is not finite (a step that a
    GradScaler skips) changes nothing.
    """
    for d in rank_params:
        if d.grad is None:
            continue
        square = (d * d.grad).square()
        state = optimizer.state[d]
        mean = state.get(STATE)
        if mean is None:
            state[STATE] = torch.nan_to_num(square, posinf=0.0)
        else:
            mean.copy_(torch.where(square.isfinite(), mean.lerp(square, 1 - _DECAY), mean))


@torch.no_grad()
def switch_off_(
    trains: Sequence[TensorTrain], optimizers: Sequence[Optimizer], budget: int, *, multiple: int = 1
) -> None:
    """Switch entries of the rank parameters off until the active slices of all `trains` take at most `budget` numbers.

    Chains whose rank parameters no optimizer has moved yet (frozen, or just rounded) keep their ranks. An entry that
    is off is 0, with zero moments, so that no momentum brings it back. Every bond keeps an entry. Waits for the device.
    """
    measured = [train for train in trains if all(_mean(d, optimizers) is not None for d in train.rank_params)]
    active = [[mask.nonzero().flatten() for mask in train.unpruned()] for train in trains]
    specs = [
        train.spec.with_ranks((1, *(len(kept) for kept in bonds), 1))
        for train, bonds in zip(trains, active, strict=True)
    ]
    for train, spec in zip(trains, specs, strict=True):
        if train not in measured:
            budget -= spec.numel + spec.rank_numel
    chains = [
        (train, spec, bonds) for train, spec, bonds in zip(trains, specs, active, strict=True) if train in measured
    ]
    orders, importances = [], []
    for train, _, bonds in chains:
        ordered = [_ascending(d, kept, optimizers) for d, kept in zip(train.rank_params, bonds, strict=True)]
        orders.append([entries for entries, _ in ordered])
        importances.append([values for _, values in ordered])
    ranks = allocate([spec for _, spec, _ in chains], importances, budget, multiple=multiple)
    for (train, _, _), order, left in zip(chains, orders, ranks, strict=True):
        for d, entries, rank in zip(train.rank_params, order, left, strict=True):
            off = entries[: len(entries) - rank]
            if len(off):
                d[off] = 0
                for value in _moments(d, optimizers):
                    value[off] = 0


def _ascending(d: Tensor, kept: Tensor, optimizers: Sequence[Optimizer]) -> tuple[Tensor, list[float]]:
    """Active entries from the least sensitive on, and their sensitivities."""
    mean = _mean(d, optimizers)
    assert mean is not None
    values, order = mean[kept].sort(stable=True)
    return kept[order], values.tolist()


def _mean(d: Tensor, optimizers: Sequence[Optimizer]) -> Tensor | None:
    found = (optimizer.state[d].get(STATE) for optimizer in optimizers if d in optimizer.state)
    return next((mean for mean in found if mean is not None), None)


def _moments(d: Tensor, optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """State tensors of d's shape, in all optimizers."""
    states = (optimizer.state[d] for optimizer in optimizers if d in optimizer.state)
    return [
        value for state in states for value in state.values() if isinstance(value, Tensor) and value.shape == d.shape
    ]
