"""Which dense layers can be compressed, and how each is read and rebuilt: one table, by exact type.

A subclass is never treated as its base: what it changed is unknown. Common ones are in the table; if you know that
another one is safe, register it.
"""

import sys
from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from comera.convert.converter import CONVOLUTION, EMBEDDING, EMBEDDING_BAG, LINEAR, MHA_OUTPUT, Converter
from comera.convert.packed import PackedConverter, packed_leaves, register_packed
from comera.convert.transformers import CONVERTERS as FOREIGN
from comera.errors import ConversionError
from comera.nn.ngram import NGramEmbedding, plain_type
from comera.nn.packed import HELD, Holder

_CONVERTERS: dict[type[nn.Module], Converter] = {
    nn.Linear: LINEAR,
    nn.Embedding: EMBEDDING,
    nn.EmbeddingBag: EMBEDDING_BAG,
    NonDynamicallyQuantizableLinear: MHA_OUTPUT,
    nn.Conv1d: CONVOLUTION,
    nn.Conv2d: CONVOLUTION,
    nn.Conv3d: CONVOLUTION,
}


def register_converter(layer_type: type[nn.Module], converter: Converter | PackedConverter) -> None:
    """Let `tensorize_` convert layers whose type is exactly `layer_type`.

    For a subclass of `nn.Linear` that computes the same: `register_converter(MyLinear, replace(LINEAR, build=...))`.
    For a module with matrices of experts, `register_converter(MyExperts, EXPERTS)`: see `PackedConverter`.
    Raises ConversionError for anything but a module type.

    Example:
        >>> from dataclasses import replace
        >>> import torch, comera
        >>> from comera.convert import LINEAR, register_converter
        >>> class Named(torch.nn.Linear):  # computes what nn.Linear does
        ...     pass
        >>> register_converter(Named, replace(LINEAR, build=lambda layer: Named(layer.in_features, layer.out_features)))
        >>> model = torch.nn.Sequential(Named(64, 256), torch.nn.GELU(), Named(256, 64))
        >>> comera.tensorize_(model, ratio=4)
        <TensorizeReport: 2 of 2 layers compressed, 33,088 -> 8,270 parameters, 4.0x smaller>
        >>> _ = comera.materialize_(model)
        >>> type(model[0]).__name__
        'Named'
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise ConversionError(f"expected a subclass of nn.Module to register, got {layer_type!r}")
    if isinstance(converter, PackedConverter):
        register_packed(layer_type, converter)
    else:
        _CONVERTERS[layer_type] = converter


def converters() -> dict[type[nn.Module], Converter]:
    """The table, including types of libraries that the program has imported."""
    for (module, name), converter in FOREIGN.items():
        layer_type = getattr(sys.modules.get(module), name, None)
        if layer_type is not None:
            _CONVERTERS.setdefault(layer_type, converter)
    return _CONVERTERS


def dense_place(modules: Mapping[str, nn.Module], path: str) -> tuple[nn.Module, str, Converter] | None:
    """The dense layer at the path of a compressed one, the name of its parameter, and the converter; None for no such.

    modules: of a model by name. A parameter that its module reads itself has the path `module.compressed.parameter`.
    """
    layer = modules.get(path)
    if layer is not None:
        kind = plain_type(layer)
        return (layer, "weight", converters()[kind]) if kind in converters() else None
    above, _, leaf = path.rpartition(".")
    holder = modules.get(above.removesuffix(HELD).removesuffix("."))
    known = packed_leaves(holder) if holder is not None and f".{above}".endswith(f".{HELD}") else {}
    return (holder, leaf, known[leaf]) if holder is not None and leaf in known else None


def refusal(layer: nn.Module, converter: Converter, leaf: str = "weight") -> str | None:
    """Why a layer of a registered type cannot be converted (it holds or does more than its type implies), or None.

    leaf: name of the parameter, where it is not a layer's weight.
    """
    weight = layer._parameters.get(leaf)
    if weight is None:
        return "its weight is no parameter of its own (weight norm, pruning?)"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if not weight.is_floating_point():
        return f"its weight is of {weight.dtype}"
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
        return "its weight has gradient hooks"
    if converter.layout is None:
        bias = getattr(layer, "bias", None)
        if isinstance(bias, Tensor) and bias is not layer._parameters.get("bias"):
            return "its bias is no parameter of its own (a buffer, pruning?)"
        extra = {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", *converter.holds}
        extra -= {"bias"} if converter.table is None else set()  # a table adds none, so it would be lost
        extra -= {"ngrams"} if isinstance(layer, NGramEmbedding) else set()
        if extra:
            return f"it also holds {', '.join(sorted(extra))}"
    elif hasattr(layer, HELD) and not isinstance(layer, Holder):
        return f"it has an attribute {HELD!r}, where the tensor train would be"
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
