"""Which tensor trains of a model have ranks that adapt."""

from collections.abc import Iterable

from torch import nn

from comera.distributed import check_whole
from comera.errors import RankError
from comera.nn.adapted import adapted_layers
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.tt.format import check_linear
from comera.tt.ngram import NGramSpec


def adaptable_trains(model: nn.Module) -> dict[str, TensorTrain]:
    """The tensor trains of a model whose ranks may change, by name.

    All of them; but in a model with adapters, whose other weights stay as they are, the adapters and what is trained
    besides them. Raises RankError where a process does not hold all of a tensor train.
    """
    adapters = {layer.adapter.tt for layer in adapted_layers(model).values()}
    found = {
        name: train
        for name, train in named_trains(model)
        if not adapters or train in adapters or any(p.requires_grad for p in train.parameters())
    }
    check_whole(core for train in found.values() for core in train.tensors[0])
    return found


def check_roundable(trains: Iterable[TensorTrain]) -> None:
    """Raise RankError for a tensor train with an activation, where no singular value tells what a rank is worth."""
    for train in trains:
        if isinstance(train.spec, NGramSpec):
            continue  # each gate has a share of its own
        what = "singular values to round by: lower its ranks in the early stage and by prune_, without a target"
        check_linear(train.spec, what, RankError)
