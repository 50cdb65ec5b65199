"""Layers that are given the same input, such as queries, keys and values, computed together when the first is called.

The model's own code calls one layer after the other. `SharedInput` makes the outputs of all at the first call, by
`tt_linears`, and hands the others out when they are asked for the very same tensor; any other input begins anew.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from comera.ops.linear import tt_linears

if TYPE_CHECKING:
    from comera.nn.linear import TTLinear

# of transformers, known by where they are defined, so that it is never imported from here
_QKV = ("q_proj", "k_proj", "v_proj")
_LIBRARY = {
    "bert.modeling_bert.BertSelfAttention": ("query", "key", "value"),
    "roberta.modeling_roberta.RobertaSelfAttention": ("query", "key", "value"),
    "llama.modeling_llama.LlamaAttention": _QKV,
    "mistral.modeling_mistral.MistralAttention": _QKV,
    "qwen2.modeling_qwen2.Qwen2Attention": _QKV,
    "qwen3.modeling_qwen3.Qwen3Attention": _QKV,
}


class SharedInput:
    """The layers that share an input, and the outputs that were made and not asked for yet."""

    def __init__(self, layers: Sequence[TTLinear]) -> None:
        self.layers = tuple(layers)
        self._waiting: dict[nn.Module, Tensor] = {}
        self._made_for: tuple[Any, ...] = ()
        self._input: Callable[[], Tensor | None] = lambda: None

    def takes(self, layer: nn.Module) -> bool:
        """Whether to ask for a layer's output here: not for a replica of it, and not while a graph is traced."""
        return any(layer is each for each in self.layers) and not torch.compiler.is_compiling()

    def forward(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The output of one of the layers."""
        key = self._key(x)
        if layer not in self._waiting or self._made_for != key or self._input() is not x:
            weights = [each.as_weight() for each in self.layers]
            self._waiting = dict(zip(self.layers, tt_linears(x, weights), strict=True))
            self._made_for, self._input = key, weakref.ref(x)
        return self._waiting.pop(layer)

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        """What an output follows from besides the tensor: writes to it and to the cores, and the modes of torch."""
        written = [t._version for t in (x, *(each.tt.cores[0] for each in self.layers)) if not t.is_inference()]
        kind = x.device.type
        return (torch.is_grad_enabled(), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), *written)

    def __getstate__(self) -> dict[str, Any]:
        return {"layers": self.layers, "_waiting": {}, "_made_for": ()}


def share_inputs_(model: nn.Module, *, enabled: bool = True) -> list[str]:
    """Let layers of known attention modules compute together (`enabled`), or each by itself.

    Returns the names of the modules that fit, the same ones each time: those whose layers are all TTLinear.
    """
    from comera.nn.linear import TTLinear

    found = []
    for name, module in model.named_modules():
        where, _, path = type(module).__module__.partition("transformers.models.")
        known = not where and type(module).__module__ in sys.modules
        parts = _LIBRARY.get(f"{path}.{type(module).__name__}", ()) if known else ()
        layers = [module.get_submodule(part) for part in parts]
        if layers and all(type(layer) is TTLinear for layer in layers):
            shared = SharedInput(layers) if enabled else None  # type: ignore[arg-type]
            for layer in layers:
                layer.shared_input = shared
            found.append(name)
    return found
