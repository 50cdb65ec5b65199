"""Linear layers with an adapter, a tensor train beside their weight: y = x W + bias + s · x Δ.

A layer that gets an adapter stays the same object, and its parameters keep their names; only its class changes, to a
subclass created for its type. The state of the model gains one tensor train per adapter, and removing an adapter leaves
no trace.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import ComeraError
from comera.kernels.tracing import traced
from comera.nn.linear import TTLinear
from comera.nn.ngram import NGramEmbedding
from comera.nn.tensor_train import CompressedLayer, TensorTrain
from comera.nn.weight import lazy_weight


class Adapted(nn.Module):
    """A linear layer with an adapter.

    adapter: Δ, trained while W stays. adapter_scale: s. plain_type: the type of the layer without its adapter.
    in_first: whether the plain layer stores its dense weight as (in, out).
    """

    adapter: TTLinear
    adapter_scale: float
    plain_type: ClassVar[type[nn.Module]]
    in_first: ClassVar[bool]

    @property
    def weight(self) -> Tensor:
        """The effective weight W + s Δ, laid out as the plain layer stores its weight. Read-only, and computed when its
        values are used; the parameters hold W itself."""
        cores, gates = self.adapter.tt.tensors
        tensors = [*self._own_tensors, *cores, *gates]
        if traced():
            return self._sum(tensors)
        return lazy_weight(self._sum, self._weight_shape, tensors)

    @property
    @abstractmethod
    def _own_tensors(self) -> Sequence[Tensor]:
        """The tensors that W is made of."""

    @property
    @abstractmethod
    def _weight_shape(self) -> Sequence[int]:
        """The shape of W, as the plain layer stores it."""

    @abstractmethod
    def _own(self, tensors: Sequence[Tensor]) -> Tensor:
        """W, made of `_own_tensors`."""

    def _sum(self, tensors: Sequence[Tensor]) -> Tensor:
        count = len(self._own_tensors)
        own, delta_IO = self._own(tensors[:count]), self.adapter.tt.dense(tensors[count:])
        return torch.add(own, delta_IO if self.in_first else delta_IO.t(), alpha=self.adapter_scale).contiguous()

    def _with_adapter(self, output: Tensor, input: Tensor) -> Tensor:
        return torch.add(output, self.adapter(input), alpha=self.adapter_scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, adapter_scale={self.adapter_scale:g}".removeprefix(", ")

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(2)  # the class is created at run time: no import finds it by name
        return _blank, (self.plain_type, self.in_first), *reduced[2:]


class AdaptedDense(Adapted):
    """A dense linear layer with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """y = x W + bias + s x Δ."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        return self._with_adapter(F.linear(input, weight.t() if self.in_first else weight, bias), input)

    @property
    def _own_tensors(self) -> Sequence[Tensor]:
        weight = self._parameters["weight"]
        assert weight is not None
        return [weight]

    @property
    def _weight_shape(self) -> Sequence[int]:
        return self._own_tensors[0].shape

    def _own(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]


class AdaptedCompressed(Adapted):
    """A compressed linear layer with an adapter."""

    tt: TensorTrain

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y = x W + bias + s x Δ. args, kwargs: further arguments of the plain layer's forward."""
        return self._with_adapter(super().forward(input, *args, **kwargs), input)

    @property
    def _own_tensors(self) -> Sequence[Tensor]:
        cores, gates = self.tt.tensors
        return [*cores, *gates]

    @property
    def _weight_shape(self) -> Sequence[int]:
        shape: Sequence[int] = super()._dense_shape  # type: ignore[misc]
        return shape

    def _own(self, tensors: Sequence[Tensor]) -> Tensor:
        weight: Tensor = super()._dense(tensors)  # type: ignore[misc]
        return weight


_CLASSES: dict[tuple[type[nn.Module], bool], type[Adapted]] = {}


def _class_of(plain: type[nn.Module], in_first: bool) -> type[Adapted]:
    """The adapted subclass of a type of layer, created once."""
    if (plain, in_first) not in _CLASSES:
        kind = AdaptedCompressed if issubclass(plain, CompressedLayer) else AdaptedDense
        own = {"plain_type": plain, "in_first": in_first, "__module__": __name__}
        made: Any = type(f"Adapted{plain.__name__}", (kind, plain), own)
        _CLASSES[plain, in_first] = made
    return _CLASSES[plain, in_first]


def _blank(plain: type[nn.Module], in_first: bool) -> Adapted:
    """An empty adapted layer, which copies and pickles fill."""
    kind = _class_of(plain, in_first)
    return kind.__new__(kind)


def attach_(layer: nn.Module, train: TensorTrain, scale: float, *, in_first: bool = False) -> None:
    """Give a linear layer an adapter. in_first: whether its dense weight is stored as (in, out)."""
    adapter = TTLinear(train, bias=False).train(layer.training)
    layer.__class__ = _class_of(type(layer), in_first)
    layer.adapter, layer.adapter_scale = adapter, scale  # type: ignore[assignment]


def detach_(layer: Adapted) -> None:
    """Remove the adapter of a layer, which is then what it was before."""
    del layer.adapter, layer.adapter_scale
    layer.__class__ = layer.plain_type  # type: ignore[assignment]


def adapted_layers(model: nn.Module) -> dict[str, Adapted]:
    """The layers of a model that have an adapter, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def train_names(model: nn.Module) -> dict[TensorTrain, dict[str, str]]:
    """Every tensor train with all of its names, and the type of the layer that holds it under each; without adapters,
    which are no part of a model's own weights."""
    modules = dict(model.named_modules(remove_duplicate=False))
    beside = {layer.adapter.tt for layer in adapted_layers(model).values()}
    names: dict[TensorTrain, dict[str, str]] = {}
    for name, module in modules.items():
        if isinstance(module, TensorTrain) and module not in beside:
            names.setdefault(module, {})[name] = type_name(modules[name.rpartition(".")[0]])
    return names


def type_name(layer: nn.Module) -> str:
    """Name of the type of a layer, without the types that `fully_shard`, adapters and n-grams put before it."""
    kinds = (kind for kind in type(layer).__mro__ if not issubclass(kind, Adapted | NGramEmbedding))
    return next(kind.__name__ for kind in kinds if not kind.__name__.startswith("FSDP"))


def refuse_adapters(model: nn.Module, error: type[ComeraError], call: str, instead: str) -> None:
    """Raise `error` for a model with adapters, which `call` does not support. instead: what to do about it."""
    layers = adapted_layers(model)
    if layers:
        raise error(
            f"{call}: expected a model without adapters, got a {type(model).__name__} with {len(layers)}, the first at "
            f"{next(iter(layers)) or 'the model itself'}: {instead}. Nothing was changed"
        )
