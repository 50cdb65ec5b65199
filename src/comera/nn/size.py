"""The size of a model, and how much smaller than its dense original it is: the only place where ratios are defined."""

from dataclasses import dataclass

from torch import nn

from comera.nn.adapted import adapted_layers
from comera.nn.tensor_train import named_trains


@dataclass(frozen=True)
class ModelSize:
    """Parameters that a model stores, beside those of its dense original. Printing it gives one line.

    total: all parameters, tied ones once. tensorized: those of them in tensor trains (cores and gates; no biases).
    dense_total, dense_tensorized: the same for the dense model, with every tensor train replaced by the weight that it
    represents. A weight that was tied counts once, also where its layers have a tensor train each now, and with the
    parameters that stay dense where one of them does. bytes: storage of all parameters, in their own dtypes. adapters:
    parameters of adapters, which count in the total alone: the dense original has none.

    See `model_size`.
    """

    total: int
    tensorized: int
    dense_total: int
    dense_tensorized: int
    bytes: int
    adapters: int = 0

    @property
    def ratio(self) -> float:
        """The model ratio: dense parameters of the whole model per stored one; infinite if nothing is stored."""
        return _ratio(self.dense_total, self.total)

    @property
    def tensorized_ratio(self) -> float:
        """The layer ratio: the same over the tensor trains alone; 1 without any, infinite if all are empty."""
        return _ratio(self.dense_tensorized, self.tensorized)

    def __str__(self) -> str:
        return (
            f"{self.total:,} parameters ({self.bytes / 2**20:.1f} MiB), {self.ratio:.1f}x below dense; "
            f"tensorized layers {self.tensorized:,}, {self.tensorized_ratio:.1f}x"
        ) + (f"; adapters {self.adapters:,}" if self.adapters else "")


def model_size(model: nn.Module, *, dense_total: int | None = None) -> ModelSize:
    """Count a model's parameters, tied ones once. Reads shapes only, so it works on the meta device too.

    Args:
        model: dense, tensorized or a mixture.
        dense_total: parameters of the dense original, where the model has other layers in place of dense ones than
            compressed ones.

    Returns:
        The sizes with and without compression, and their ratios.

    Example:
        >>> import torch, comera
        >>> model = torch.nn.Sequential(torch.nn.Linear(768, 3072), torch.nn.GELU(), torch.nn.Linear(3072, 768))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=6, rank=30)))
        >>> size = comera.model_size(model)
        >>> print(size)
        61,996 parameters (0.2 MiB), 76.2x below dense; tensorized layers 58,156, 81.1x
        >>> size.dense_total
        4722432
    """
    parameters = list(model.parameters())
    beside = {layer.adapter.tt for layer in adapted_layers(model).values()}
    trains = [train for _, train in named_trains(model) if train not in beside]
    total = sum(p.numel() for p in parameters)
    tensorized = sum(p.numel() for p in {p for train in trains for p in train.parameters()})
    adapters = sum(p.numel() for train in beside for p in train.parameters())
    others = total - tensorized - adapters
    if dense_total is None:
        dense_total = others + sum(train.spec.dense_numel for train in trains if not train.counts_elsewhere)
    stored_bytes = sum(p.numel() * p.element_size() for p in parameters)
    return ModelSize(total, tensorized, dense_total, dense_total - others, stored_bytes, adapters)


def _ratio(dense: int, stored: int) -> float:
    return dense / stored if stored else float("inf") if dense else 1.0
