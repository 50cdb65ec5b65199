"""Importance of gates as measured by the loss: how the late stage chooses ranks (beyond [CoMERA]; docs/method.md §2).

To first order, pruning gate j of inner rank k changes the loss by ``−d_k[j] ∂L/∂d_k[j]``. The running mean of the
square over recent steps is the gate's importance (Molchanov et al. 2019, "Importance estimation for neural network
pruning"). It needs only the gradient that each step computes anyway. At intervals, the gates with the least importance
per parameter saved are set to zero, over all tensor trains at once (allocate.py); the others keep their values.
Rejected: the ℓ1 surrogate presses on all gates alike, and under Adam they fall in lockstep until whole layers are zero.

The running mean lives in the optimizer's state of d. So pruning cuts it, rounding resets it, and a checkpoint restores
it with the other moments.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.nn.tensor_train import TensorTrain
from comera.rank.allocate import allocate
from comera.rank.ngrams import NGramGates
from comera.rank.optimizer_state import state_tensors, zero_state_
from comera.rank.step_rule import Gradients
from comera.tt.format import spec_size
from comera.tt.ngram import NGramSpec

STATE = "sensitivity"  # key in the optimizer's state, in checkpoints too
_DECAY = 0.95  # looks back about twenty steps


@torch.no_grad()
def update_importance_(optimizer: Optimizer, gates: Iterable[Tensor], gradients: Gradients) -> None:
    """Fold (d ∂L/∂d)² of the step that `optimizer` has just taken into the running mean of each of its `gates`.

    Gates without a gradient are left alone, and so are those whose gradient is not finite and all of a step that a
    fused optimizer skips because a GradScaler has found others so. Does not synchronize.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    alike = defaultdict(list)  # there are hundreds of short vectors: what can be computed as one is concatenated
    for d, mean, weight in running_means(optimizer, [d for d in gates if d in gradients]):
        alike[d.device, d.dtype, weight].append((d, gradients[d], mean))
    for (*_, weight), found in alike.items():
        gates_E, gradients_E, means_E = (torch.cat(vectors) for vectors in zip(*found, strict=True))
        squares_E = (gates_E * gradients_E).square()
        taken_E = squares_E.isfinite()
        if found_inf is not None:
            taken_E &= found_inf.to(taken_E.device) == 0
        means_E = torch.where(taken_E, means_E.lerp(squares_E, weight), means_E)
        means = [mean for *_, mean in found]
        torch._foreach_copy_(means, means_E.split([len(mean) for mean in means]))


def running_means(optimizer: Optimizer, gates: Iterable[Tensor]) -> list[tuple[Tensor, Tensor, float]]:
    """Gates, their importances in the state of an optimizer that holds state of them, and the weight of the next square
    in the mean: 1 for the first. Importances that are missing begin as zeros."""
    means = []
    for d in gates:
        state = optimizer.state[d]
        mean = state.get(STATE)
        weight = 1.0 if mean is None else 1 - _DECAY
        if mean is None:
            mean = state[STATE] = torch.zeros_like(d)
        means.append((d, mean, weight))
    return means


@torch.no_grad()
def zero_gates_(
    trains: Sequence[TensorTrain], optimizers: Sequence[Optimizer], budget: int, *, multiple: int = 1
) -> None:
    """Set the least important gates to zero until the unpruned slices of all `trains` take at most `budget` parameters.

    Trains with gates that are frozen or that no optimizer has moved yet (just rounded) keep their ranks. A gate that is
    zeroed gets zero moments too, so that no momentum brings it back. Every inner rank of a train keeps a gate.
    Synchronizes.
    """
    measured: list[tuple[TensorTrain, list[tuple[Tensor, list[float]]]]] = []
    tables: list[tuple[TensorTrain, NGramGates]] = []
    for train in trains:
        unpruned = [mask.nonzero().flatten() for mask in train.unpruned()]
        means = [mean for d in train.rank_params if (mean := _importance(d, optimizers)) is not None]
        if isinstance(train.spec, NGramSpec) and len(means) == len(train.rank_params):
            worth = [mean[indices].tolist() for mean, indices in zip(means, unpruned, strict=True)]
            tables.append((train, NGramGates(train.spec, unpruned, worth)))
        elif len(means) == len(train.rank_params):
            measured.append((train, list(map(_ascending, means, unpruned))))
        elif isinstance(train.spec, NGramSpec):
            budget -= spec_size(train.spec.keeping(unpruned))
        else:
            budget -= spec_size(train.spec, [len(indices) for indices in unpruned])
    ranks, kept = allocate(
        [train.spec.with_ranks((1, *(len(indices) for indices, _ in gates), 1)) for train, gates in measured],
        [[importances for _, importances in gates] for _, gates in measured],
        [table for _, table in tables],
        budget,
        multiple=multiple,
    )
    for (train, gates), inner in zip(measured, ranks, strict=True):
        for d, (indices, _), rank in zip(train.rank_params, gates, inner, strict=True):
            _zero(d, indices[: len(indices) - rank], optimizers)
    for (train, table), own in zip(tables, kept, strict=True):
        for d, indices, stay in zip(train.rank_params, table.unpruned, own, strict=True):
            _zero(d, indices[~torch.isin(indices, stay)], optimizers)


def _zero(d: Tensor, zeroed: Tensor, optimizers: Sequence[Optimizer]) -> None:
    if len(zeroed):
        d[zeroed] = 0
        zero_state_(d, zeroed, optimizers)


def _ascending(importance: Tensor, unpruned: Tensor) -> tuple[Tensor, list[float]]:
    """Indices of the unpruned gates in ascending order of importance, and their importances."""
    values, order = importance[unpruned].sort(stable=True)
    return unpruned[order], values.tolist()


def _importance(d: Tensor, optimizers: Sequence[Optimizer]) -> Tensor | None:
    """What was measured of a gate vector; of one that is frozen since then, nothing that still holds."""
    measured = state_tensors(d, optimizers) if d.requires_grad else ()
    return next((value for _, key, value in measured if key == STATE), None)
