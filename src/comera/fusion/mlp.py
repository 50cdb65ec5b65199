"""Where models have a feed-forward part that `contract.feed_forward` can run: a registry by exact type of module.

A module that fits gets a method of its own in place of its class's, which reads the same children; names of parameters,
hooks elsewhere and the class itself stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn

from comera.errors import ConversionError
from comera.fusion.residual import residual_norm
from comera.nn.linear import TTLinear
from comera.ops.mlp import tt_feed_forward


@dataclass(frozen=True)
class FeedForward:
    """How one type of module holds its feed-forward part.

    method: name of the method that computes it, with one tensor in and one out.
    ups: names of the layers before the activation, one, or gate and up. activation, down: names of what follows.
    finish: (module, input, output of down) -> what the method returns.
    """

    method: str
    ups: tuple[str, ...]
    activation: str
    down: str
    finish: Callable[[Any, Tensor, Tensor], Tensor] = lambda module, x, z: z


_BERT = FeedForward(
    method="feed_forward_chunk",
    ups=("intermediate.dense",),
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    finish=lambda layer, x, z: residual_norm(z, x, layer.output.dropout, layer.output.LayerNorm),
)
_GATED = FeedForward(method="forward", ups=("gate_proj", "up_proj"), activation="act_fn", down="down_proj")
_GPT2 = FeedForward(
    method="forward", ups=("c_fc",), activation="act", down="c_proj", finish=lambda mlp, x, z: mlp.dropout(z)
)
# of transformers, known by where they are defined, so that it is never imported from here
_LIBRARY = {
    "bert.modeling_bert.BertLayer": _BERT,
    "roberta.modeling_roberta.RobertaLayer": _BERT,
    "llama.modeling_llama.LlamaMLP": _GATED,
    "mistral.modeling_mistral.MistralMLP": _GATED,
    "qwen2.modeling_qwen2.Qwen2MLP": _GATED,
    "qwen3.modeling_qwen3.Qwen3MLP": _GATED,
    "gpt2.modeling_gpt2.GPT2MLP": _GPT2,
}
_REGISTERED: dict[type[nn.Module], FeedForward] = {}
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


def register_feed_forward(module_type: type[nn.Module], parts: FeedForward) -> None:
    """Let the feed-forward part of modules whose type is exactly `module_type` run without its wide middle.

    Raises ConversionError for what is not a type of module or has no such method.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise ConversionError(f"expected a subclass of nn.Module to register, got {module_type!r}")
    if not hasattr(module_type, parts.method):
        raise ConversionError(f"expected a method of {module_type.__name__}, got the name {parts.method!r}")
    _REGISTERED[module_type] = parts


def fuse_feed_forward_(model: nn.Module, *, enabled: bool = True) -> list[str]:
    """Let every feed-forward part of tensor trains run in pieces (`enabled`), or as its class has it.

    Returns the names of the modules that fit, the same ones each time: those of a registered type whose layers are
    TTLinear, whose activation is known, and whose layers have no hooks.
    """
    found = []
    for name, parts in _fitting(model):
        module = model.get_submodule(name)
        if enabled:
            setattr(module, parts.method, MethodType(_method(parts.method), module))
        else:
            vars(module).pop(parts.method, None)
        found.append(name)
    return found


def _fitting(model: nn.Module) -> Iterator[tuple[str, FeedForward]]:
    for name, module in model.named_modules():
        parts = _parts(type(module))
        if parts is None:
            continue
        layers = [module.get_submodule(part) for part in (*parts.ups, parts.down)]
        between = [module.get_submodule(part.rpartition(".")[0]) for part in (*parts.ups, parts.down)]
        hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (*layers, *between))
        if all(type(layer) is TTLinear for layer in layers) and _activation(module, parts) and not hooked:
            yield name, parts


def _parts(kind: type[nn.Module]) -> FeedForward | None:
    if kind in _REGISTERED:
        return _REGISTERED[kind]
    where, _, name = kind.__module__.partition("transformers.models.")
    return _LIBRARY.get(f"{name}.{kind.__name__}") if not where and kind.__module__ in sys.modules else None


def _activation(module: nn.Module, parts: FeedForward) -> str | None:
    """The name of the module's activation in `contract.feed_forward.ACTIVATIONS`, None for one that is not there."""
    act = module.get_submodule(parts.activation)
    if isinstance(act, nn.GELU):
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(type(act).__name__)


def _method(name: str) -> Callable[[Any, Tensor], Tensor]:
    """`_run` under the name of the method that it stands in for: a pickled module comes back with its class's own."""

    def method(module: nn.Module, x: Tensor) -> Tensor:
        return _run(module, x)

    method.__name__ = name
    return method


def _run(module: nn.Module, x: Tensor) -> Tensor:
    """The feed-forward part of a module of a registered type."""
    parts = _parts(type(module))
    assert parts is not None
    *ups, down = (module.get_submodule(name).as_weight() for name in (*parts.ups, parts.down))  # type: ignore[operator]
    activation = _activation(module, parts)
    assert activation is not None
    return parts.finish(module, x, tt_feed_forward(x, ups, activation, down))
