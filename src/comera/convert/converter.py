"""How one type of dense layer is read and rebuilt, and the converters of torch's own layers."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from comera.nn.conv import TTConv
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMTable
from comera.nn.packed import Layout


@dataclass(frozen=True)
class Converter:
    """How one type of dense layer is read and rebuilt; its parameters are `weight` and, optionally, `bias`.

    shape: layer -> (in_features, out_features), or (num_embeddings, embedding_dim). std: layer -> standard deviation
    that its own initialization gives the weight. build: compressed layer -> dense layer of the same sizes; called under
    `torch.device("meta")`. table: for a table whose rows are looked up by id (with a `padding_idx`), the type of layer
    that replaces it; None for a linear map. convolution: for a convolution, the type of layer that replaces it; its
    in_features are the input channels of a group × kernel positions. in_first: whether a linear map stores its weight
    as (in, out); `nn.Linear` has (out, in). refusal: layer -> why this one cannot be converted, or None. embed_scale:
    layer -> what its rows are multiplied by, as `TTMEmbedding` takes it. holds: names of buffers that `build` makes
    again. remark: for the report, what a user should know of such a layer once it is compressed. layout: how a
    parameter holds matrices that its module reads itself (packed.py); `build` is not used then.

    Example:
        >>> import torch, comera
        >>> from comera.convert import Converter, register_converter
        >>> class Transposed(torch.nn.Module):  # stores its weight as (in, out)
        ...     def __init__(self, rows, cols):
        ...         super().__init__()
        ...         self.weight = torch.nn.Parameter(torch.randn(rows, cols) / rows**0.5)
        ...     def forward(self, x):
        ...         return x @ self.weight
        >>> converter = Converter(
        ...     shape=lambda layer: tuple(layer.weight.shape),
        ...     std=lambda layer: layer.weight.shape[0] ** -0.5,
        ...     build=lambda layer: Transposed(layer.in_features, layer.out_features),
        ...     in_first=True,
        ... )
        >>> register_converter(Transposed, converter)
        >>> model = torch.nn.Sequential(Transposed(96, 64))
        >>> _ = model[0].weight.data.copy_(torch.outer(torch.rand(96), torch.rand(64)))  # as if trained, to rank 1
        >>> x = torch.randn(5, 96)
        >>> before = model(x)
        >>> report = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=2, rank=4), init="decompose"))
        >>> report.rows[0].after, torch.allclose(model(x), before, rtol=1e-4, atol=1e-4)
        ('TTLinear', True)
    """

    shape: Callable[[Any], tuple[int, int]]
    std: Callable[[Any], float]
    build: Callable[[Any], nn.Module]
    table: type[TTMTable] | None = None
    convolution: type[TTConv] | None = None
    in_first: bool = False
    refusal: Callable[[Any], str | None] = lambda layer: None
    embed_scale: Callable[[Any], float | Tensor] = lambda layer: 1.0
    holds: frozenset[str] = frozenset()
    remark: str = ""
    layout: Layout | None = None

    @property
    def experts(self) -> int:
        """How many matrices of these sizes the weight holds."""
        return 1 if self.layout is None else self.layout.experts


def _refuse_table(layer: nn.Embedding | nn.EmbeddingBag) -> str | None:
    options = ["max_norm", "scale_grad_by_freq"]
    if not isinstance(layer, nn.EmbeddingBag):
        options.append("sparse")  # no obstacle in a bag: it serves tables too large for dense gradients
    elif layer.mode == "max":
        return "mode 'max' takes the largest of dense rows"
    used = next((option for option in options if getattr(layer, option)), None)
    return f"{used} works on rows of a dense table" if used else None


def _dense_bag(layer: Any) -> nn.EmbeddingBag:
    options = {name: getattr(layer, name) for name in ("mode", "padding_idx", "include_last_offset", "sparse")}
    return nn.EmbeddingBag(layer.num_embeddings, layer.embedding_dim, **options)


def _conv_shape(layer: Any) -> tuple[int, int]:
    return layer.in_channels // layer.groups * math.prod(layer.kernel_size), layer.out_channels


def _refuse_depthwise(layer: Any) -> str | None:
    depthwise = layer.groups > 1 and layer.groups == layer.in_channels
    return "a depthwise convolution: factors would make more channels of each, and cost more" if depthwise else None


def _dense_conv(layer: Any) -> nn.Module:
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation
    dense: nn.Module = layer.dense_type(*sizes, layer.groups, padding_mode=layer.padding_mode)
    return dense


LINEAR = Converter(
    shape=lambda layer: (layer.in_features, layer.out_features),
    std=lambda layer: 1 / math.sqrt(3 * layer.in_features),  # U(-1/sqrt(in), 1/sqrt(in))
    build=lambda layer: nn.Linear(layer.in_features, layer.out_features),
)
"""The converter of `nn.Linear`; `dataclasses.replace` makes one of a subclass (see `register_converter`)."""
EMBEDDING = Converter(
    shape=lambda layer: (layer.num_embeddings, layer.embedding_dim),
    std=lambda layer: 1.0,
    build=lambda layer: nn.Embedding(layer.num_embeddings, layer.embedding_dim, padding_idx=layer.padding_idx),
    table=TTMEmbedding,
    refusal=_refuse_table,
)
"""The converter of `nn.Embedding`."""
EMBEDDING_BAG = replace(EMBEDDING, build=_dense_bag, table=TTMEmbeddingBag)
"""The converter of `nn.EmbeddingBag`."""
CONVOLUTION = Converter(
    shape=_conv_shape,
    std=lambda layer: 1 / math.sqrt(3 * _conv_shape(layer)[0]),  # U(-1/sqrt(in), 1/sqrt(in))
    build=_dense_conv,
    convolution=TTConv,
    refusal=_refuse_depthwise,
)
"""The converter of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""
# nn.MultiheadAttention reads the weight of this one and multiplies by it itself, in all of its paths
MHA_OUTPUT = replace(
    LINEAR,
    build=lambda layer: NonDynamicallyQuantizableLinear(layer.in_features, layer.out_features),
    remark="its weight is materialized in each forward, because nn.MultiheadAttention multiplies by it itself",
)
