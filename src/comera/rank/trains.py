"""Which tensor trains of a model have ranks that adapt."""

from torch import nn

from comera.nn.adapted import adapted_layers
from comera.nn.tensor_train import TensorTrain, named_trains


def adaptable_trains(model: nn.Module) -> dict[str, TensorTrain]:
    """The tensor trains of a model whose ranks may change, by name.

    All of them; but in a model with adapters, whose other weights stay as they are, the adapters and what is trained
    besides them.
    """
    adapters = {layer.adapter.tt for layer in adapted_layers(model).values()}
    return {
        name: train
        for name, train in named_trains(model)
        if not adapters or train in adapters or any(p.requires_grad for p in train.parameters())
    }
