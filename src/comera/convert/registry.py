"""Which dense layers can be compressed, and how each is read and rebuilt: one table, by exact type.

A subclass is never treated as its base: what it changed is unknown, and its parent may read its weight directly (as
`nn.MultiheadAttention` does with its `out_proj`). If you know that it is safe, register it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from comera.errors import ConversionError
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMTable


@dataclass(frozen=True)
class Converter:
    """How one type of dense layer is read and rebuilt; its parameters are `weight` and, optionally, `bias`.

    shape: layer -> (in_features, out_features), or (num_embeddings, embedding_dim). std: layer -> standard deviation
    that its own initialization gives the weight. build: compressed layer -> dense layer of the same sizes; called under
    `torch.device("meta")`. table: for a table whose rows are looked up by id (with a `padding_idx`), the type of layer
    that replaces it; None for a linear map. in_first: whether a linear map stores its weight as (in, out); `nn.Linear`
    has (out, in). refusal: layer -> why this one cannot be converted, or None.
    """

    shape: Callable[[Any], tuple[int, int]]
    std: Callable[[Any], float]
    build: Callable[[Any], nn.Module]
    table: type[TTMTable] | None = None
    in_first: bool = False
    refusal: Callable[[Any], str | None] = lambda layer: None


def _refuse_table(layer: nn.Embedding | nn.EmbeddingBag) -> str | None:
    options = ["max_norm", "scale_grad_by_freq"]
    if not isinstance(layer, nn.EmbeddingBag):
        options.append("sparse")  # no obstacle in a bag: it serves tables too large for dense gradients
    elif layer.mode == "max":
        return "mode 'max' takes the largest of dense rows"
    used = next((option for option in options if getattr(layer, option)), None)
    return f"{used} works on rows of a dense table" if used else None


def _dense_bag(layer: Any) -> nn.EmbeddingBag:
    options = {name: getattr(layer, name) for name in ("mode", "padding_idx", "include_last_offset")}
    return nn.EmbeddingBag(layer.num_embeddings, layer.embedding_dim, **options)


LINEAR = Converter(
    shape=lambda layer: (layer.in_features, layer.out_features),
    std=lambda layer: 1 / math.sqrt(3 * layer.in_features),  # U(-1/sqrt(in), 1/sqrt(in))
    build=lambda layer: nn.Linear(layer.in_features, layer.out_features),
)
EMBEDDING = Converter(
    shape=lambda layer: (layer.num_embeddings, layer.embedding_dim),
    std=lambda layer: 1.0,
    build=lambda layer: nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx),
    table=TTMEmbedding,
    refusal=_refuse_table,
)
EMBEDDING_BAG = replace(EMBEDDING, build=_dense_bag, table=TTMEmbeddingBag)
_CONV1D = Converter(
    shape=lambda layer: (layer.nx, layer.nf),
    std=lambda layer: 0.02,
    build=lambda layer: layer.dense_type(layer.out_features, layer.in_features),
    in_first=True,
)

_CONVERTERS: dict[type[nn.Module], Converter] = {
    nn.Linear: LINEAR,
    nn.Embedding: EMBEDDING,
    nn.EmbeddingBag: EMBEDDING_BAG,
}
# Types of other libraries, (module, name); they join the table once the program itself has imported the module.
_FOREIGN = {("transformers.pytorch_utils", "Conv1D"): _CONV1D}


def register_converter(layer_type: type[nn.Module], converter: Converter) -> None:
    """Let `tensorize_` convert layers whose type is exactly `layer_type`.

    For a subclass of `nn.Linear` that computes the same: `register_converter(MyLinear, replace(LINEAR, build=...))`.
    Raises ConversionError for anything but a module type.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise ConversionError(f"expected a subclass of nn.Module to register, got {layer_type!r}")
    _CONVERTERS[layer_type] = converter


def converters() -> dict[type[nn.Module], Converter]:
    """The table, including types of libraries that the program has imported."""
    for (module, name), converter in _FOREIGN.items():
        library = sys.modules.get(module)
        if library is not None:
            _CONVERTERS.setdefault(getattr(library, name), converter)
    return _CONVERTERS


def refusal(layer: nn.Module, converter: Converter) -> str | None:
    """Why a layer of a registered type cannot be converted (it holds or does more than its type implies), or None."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is no parameter of its own (weight norm, pruning?)"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is of {weight.dtype}"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        return "its weight has gradient hooks"
    extra = [*(layer._parameters.keys() - {"weight", "bias"}), *layer._buffers, *layer._modules]
    if extra:
        return f"it also holds {', '.join(sorted(extra))}"
    if "forward" in vars(layer):
        return "its forward was replaced"
    if any(getattr(layer, hooks) for hooks in _STATE_HOOKS):
        return "it has state_dict hooks, which know its parameters by name"
    return converter.refusal(layer)


_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
