"""Queries, keys and values of an attention module from one product with their input (ops/)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.registry import BlockPattern, StandIn, layers_obstacle, replaced_obstacle, submodule
from comera.kernels.tracing import traced
from comera.nn.linear import BTTLinear, TTLinear
from comera.ops.block_product import btt_linears
from comera.ops.dtypes import autocast_dtype, without_autocast
from comera.ops.low_rank import low_rank


@dataclass(frozen=True)
class QKV(BlockPattern):
    """How an attention module holds its projections.

    layers: names of the layers that its forward calls with its first argument, or, given `key_value_states`, all but
        the first with those.

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

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        given = self.stand_ins(module, cache, *args, **kwargs)
        if not given:
            return self.run_plain(module, *args, **kwargs)
        return self.run_plain(StandIn(module, given), *args, **kwargs)

    def stand_ins(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What to put in place of the layers for one call of the module's forward: none where they had better be
        called."""
        input, names = args[0] if args else kwargs.get("hidden_states"), self.layers
        if (others := kwargs.get("key_value_states")) is not None:
            held = getattr(kwargs.get("past_key_values"), "is_updated", {})  # by a cache of generation, for each layer
            if held.get(getattr(module, "layer_idx", None)):
                return {}
            input, names = others, names[1:]
        outputs = self.outputs(module, cache, input, names) if isinstance(input, Tensor) else None
        if outputs is None:
            return {}
        each = zip(names, outputs, strict=True)
        return {name: _Output(submodule(module, name), output, input) for name, output in each}  # type: ignore[arg-type]

    def outputs(
        self, module: nn.Module, cache: MergeCache, input: Tensor, names: Sequence[str] = ()
    ) -> list[Tensor] | None:
        """Queries, keys and values of an input, or some, from one product; None where the layers had better be
        called."""
        if not cache.passes_down or self.obstacle(module):
            return None
        layers = [submodule(module, name) for name in names or self.layers]
        if isinstance(layers[0], BTTLinear):
            return None if traced() else btt_linears(input, [layer.operands for layer in layers])
        factors = cache.factors(layers, input)
        if factors is None:
            return None
        x_BI = input.reshape(-1, input.shape[-1]) if input.numel() else input.new_empty(0, input.shape[-1])
        with without_autocast(input):
            ys_BO = low_rank(x_BI.to(autocast_dtype(input) or input.dtype), *factors)
        return [y_BO.view(*input.shape[:-1], y_BO.shape[1]) for y_BO in ys_BO]


class _Output:
    """A layer that has computed already: called with its input it returns its output."""

    def __init__(self, layer: nn.Module, output: Tensor, input: Tensor) -> None:
        self._layer, self._output, self._input = layer, output, input

    def __call__(self, input: Tensor) -> Any:
        return self._output if input is self._input else self._layer(input)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
