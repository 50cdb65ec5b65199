"""Which dense layers can be compressed, and how each is read and rebuilt: a registry by exact type.

A subclass is never taken for its base: what it changed is unknown, and its parent may read its weight directly (as
`nn.MultiheadAttention` does with its `out_proj`). A user who knows that it is safe registers it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from comera.errors import ConversionError
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMTable


@dataclass(frozen=True)
class Converter:
    """How one type of dense layer is read and rebuilt; its parameters are `weight` and, maybe, `bias`.

    format: "tt" for a linear map, "ttm" for a table of rows that ids look up, with a `padding_idx`.
    shape: layer -> (in_features, out_features), or (num_embeddings, embedding_dim).
    std: layer -> standard deviation that its own initialisation gives the weight.
    build: compressed layer -> dense layer of the same sizes; called under `torch.device("meta")`.
    in_first: whether a linear map stores its weight as (in, out), where `nn.Linear` has (out, in).
    refusal: layer -> why this one cannot be converted, or None.
    table: for a table, the type of layer that takes its place.
    """

    format: Literal["tt", "ttm"]
    shape: Callable[[Any], tuple[int, int]]
    std: Callable[[Any], float]
    build: Callable[[Any], nn.Module]
    in_first: bool = False
    refusal: Callable[[Any], str | None] = lambda layer: None
    table: type[TTMTable] = TTMEmbedding


def _table_refusal(layer: nn.Embedding | nn.EmbeddingBag, options: tuple[str, ...]) -> str | None:
    for option in options:
        if getattr(layer, option):
            return f"{option} works on rows of a dense table"
    return None


def _embedding_refusal(layer: nn.Embedding) -> str | None:
    return _table_refusal(layer, ("max_norm", "scale_grad_by_freq", "sparse"))


def _bag_refusal(layer: nn.EmbeddingBag) -> str | None:
    """Sparse gradients are no obstacle: they are for tables too large for dense ones, as the chain is not."""
    if layer.mode == "max":
        return "mode 'max' takes the largest of dense rows"
    return _table_refusal(layer, ("max_norm", "scale_grad_by_freq"))


def _dense_bag(layer: Any) -> nn.EmbeddingBag:
    return nn.EmbeddingBag(
        layer.num_embeddings,
        layer.embedding_dim,
        mode=layer.mode,
        padding_idx=layer.padding_idx,
        include_last_offset=layer.include_last_offset,
    )


LINEAR = Converter(
    format="tt",
    shape=lambda layer: (layer.in_features, layer.out_features),
    std=lambda layer: 1 / math.sqrt(3 * layer.in_features),  # U(-1/sqrt(in), 1/sqrt(in))
    build=lambda layer: nn.Linear(layer.in_features, layer.out_features),
)
EMBEDDING = Converter(
    format="ttm",
    shape=lambda layer: (layer.num_embeddings, layer.embedding_dim),
    std=lambda layer: 1.0,
    build=lambda layer: nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx),
    refusal=_embedding_refusal,
)
EMBEDDING_BAG = replace(
    EMBEDDING,
    build=_dense_bag,
    refusal=_bag_refusal,
    table=TTMEmbeddingBag,
)

_CONVERTERS: dict[type[nn.Module], Converter] = {
    nn.Linear: LINEAR,
    nn.Embedding: EMBEDDING,
    nn.EmbeddingBag: EMBEDDING_BAG,
}


def register_converter(layer_type: type[nn.Module], converter: Converter) -> None:
    """Let `tensorize_` convert layers whose type is exactly `layer_type`.

    For a subclass of `nn.Linear` that computes the same: `register_converter(MyLinear, replace(LINEAR, build=...))`.
    Raises ConversionError for what is not a type of module.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise ConversionError(f"expected a subclass of nn.Module to register, got {layer_type!r}")
    _CONVERTERS[layer_type] = converter


def converters() -> dict[type[nn.Module], Converter]:
    """The registry, with the layers of libraries that the program has imported itself."""
    library = sys.modules.get("transformers.pytorch_utils")  # never imported from here
    if library is not None and library.Conv1D not in _CONVERTERS:
        conv1d = library.Conv1D
        _CONVERTERS[conv1d] = Converter(
            format="tt",
            shape=lambda layer: (layer.nx, layer.nf),
            std=lambda layer: 0.02,
            build=lambda layer: conv1d(layer.out_features, layer.in_features),
            in_first=True,
        )
    return _CONVERTERS


def refusal(layer: nn.Module, converter: Converter) -> str | None:
    """Why a layer of a registered type cannot be converted, or None: it holds or does more than its type tells."""
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
