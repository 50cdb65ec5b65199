"""Queries, keys and values of an attention module from one product with their input (ops/low_rank.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from comera.fusion.lazy import Inputs
from comera.fusion.merge_cache import MergeCache
from comera.fusion.obstacles import layers_obstacle, replaced_obstacle, submodule
from comera.fusion.registry import BlockPattern, Instead, StandIn
from comera.kernels.tracing import traced
from comera.nn.linear import BTTLinear, TTLinear
from comera.ops.block_product import btt_linears
from comera.ops.dtypes import autocast_dtype, without_autocast
from comera.ops.low_rank import low_rank


@dataclass(frozen=True)
class QKV(BlockPattern):
    """How an attention module holds its projections.

    layers: names of the layers that the forward calls with one input; with `key_value_states`, all but the first.

    Example:
        >>> import torch, comera
        >>> from comera.fusion import QKV, fuse_, register_block
        >>> class Attention(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))
        ...     def forward(self, x):
        ...         return torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        >>> register_block(Attention, QKV(("q", "k", "v")))
        >>> model = torch.nn.Sequential(Attention(64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> fuse_(model).fused("qkv")
        ('0',)
    """

    layers: tuple[str, ...]
    kind = "qkv"
    method = "forward"
    whole = False  # it is the same however positions turn queries and keys

    def obstacle(self, module: nn.Module) -> str | None:
        return replaced_obstacle(module, self) or layers_obstacle(module, self.layers, (TTLinear, BTTLinear))

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        given = self.stand_ins(module, cache, **kwargs)
        return self.run_plain(StandIn(module, given) if given else module, *args, **kwargs)

    def stand_ins(self, module: nn.Module, cache: MergeCache, /, **kwargs: Any) -> dict[str, Any]:
        """What to put in place of the layers for one call of the forward; nothing where they must be called."""
        if traced() or self.obstacle(module):
            return {}
        names = self.layers if kwargs.get("key_value_states") is None else self.layers[1:]
        product = _Product([submodule(module, name) for name in names], cache)
        return {name: Instead(product.layers[k], partial(product.output, k)) for k, name in enumerate(names)}


class _Product:
    """Layers during one call of their module: the first that is called computes all of them on its input."""

    def __init__(self, layers: list[Any], cache: MergeCache) -> None:
        self.layers, self._cache = layers, cache
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] | None = None
        self._read = Inputs()

    def output(self, number: int, input: Tensor) -> Any:
        """The output of one layer."""
        if self._input is None:
            self._input, self._outputs, self._read = input, self._computed(input), Inputs(input)
        if self._outputs is None or input is not self._input or not self._read.unchanged:
            return self.layers[number](input)
        return self._outputs[number]

    def _computed(self, input: Tensor) -> Sequence[Tensor] | None:
        """The outputs of all layers from one product; None where they must be called, or are faster."""
        if not isinstance(input, Tensor):
            return None
        if isinstance(self.layers[0], BTTLinear):
            return None if traced() else btt_linears(input, [layer.operands for layer in self.layers])
        factors = self._cache.factors(self.layers, input)
        if factors is None:
            return None
        x_BI = input.reshape(-1, input.shape[-1]) if input.numel() else input.new_empty(0, input.shape[-1])
        with without_autocast(input):
            ys_BO = low_rank(x_BI.to(autocast_dtype(input) or input.dtype), *factors)
        return [y_BO.view(*input.shape[:-1], y_BO.shape[1]) for y_BO in ys_BO]
