"""Inputs of compressed layers that are no plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from comera.errors import WeightError


def of_another_kind(layer: nn.Module, input: Any, *rest: Any) -> Any:
    """The layer's output for a jagged tensor or a proxy; None for any other input.

    jagged: the layer runs on the values of all rows. proxy: torch.fx traces a model; the layer stays one call in its
    graph, as torch's own layers do. rest: further arguments of the layer's forward.
    """
    if type(input) is Tensor:
        return None
    if isinstance(input, Proxy):
        return one_call(layer, input, *rest)
    if isinstance(input, Tensor) and input.layout is torch.jagged:
        dim = next(k for k, size in enumerate(input.shape) if k and not isinstance(size, int))
        jagged: Any = input
        values = layer.forward(jagged.values(), *rest)
        return torch.nested.nested_tensor_from_jagged(values, jagged.offsets(), jagged.lengths(), jagged_dim=dim)
    return None


def one_call(layer: nn.Module, proxy: Proxy, *rest: Any) -> Any:
    """A call of the layer in the graph of torch.fx. Raises WeightError where the layer itself is the model."""
    tracer: Any = proxy.tracer
    if tracer.root is layer:
        raise WeightError(
            f"expected torch.fx to trace a model around the {type(layer).__name__}, which stays one call in its graph, "
            "got the layer alone: trace torch.nn.Sequential(layer), or comera.materialize_ it first"
        )
    return tracer.create_proxy("call_module", tracer.path_of_module(layer), (proxy, *rest), {})
