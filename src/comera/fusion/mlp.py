"""The MLP of a transformer block as one operation that never holds its hidden activation (ops/mlp.py), or with its
gated activation as one (ops/gated.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.registry import BlockPattern, is_hooked, layers_obstacle, submodule
from comera.kernels.tracing import traced
from comera.nn.linear import BTTLinear
from comera.ops.block_product import btt_linears
from comera.ops.gated import gated
from comera.ops.mlp import fits_one_chunk, mlp

_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}


def _unchanged(module: Any, input: Tensor, output: Tensor) -> Tensor:
    return output


@dataclass(frozen=True)
class MLP(BlockPattern):
    """How a module holds its MLP: down(act(up(x))), or down(act(gate(x)) · up(x)).

    method: name of the method that computes it, with one tensor in and one out.
    ups: names of the layers before the activation, one, or gate and up. activation, down: names of what follows.
    finish: (module, input, output of down) -> what the method returns; a function of a module, so it can be pickled.

    Example:
        >>> import torch
        >>> from comera.fusion import MLP, fuse_, register_block
        >>> class SwiGLU(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.gate, self.up, self.down = (torch.nn.Linear(width, width) for _ in range(3))
        ...         self.act = torch.nn.SiLU()
        ...     def forward(self, x):
        ...         return self.down(self.act(self.gate(x)) * self.up(x))
        >>> register_block(SwiGLU, MLP("forward", ups=("gate", "up"), activation="act", down="down"))
        >>> model = torch.nn.Sequential(SwiGLU(64))  # dense layers: only the activation can be fused
        >>> fuse_(model).fused("gated activation")
        ('0',)
    """

    method: str
    ups: tuple[str, ...]
    activation: str
    down: str
    finish: Callable[[Any, Tensor, Tensor], Tensor] = _unchanged
    kind = "mlp"

    def obstacle(self, module: nn.Module) -> str | None:
        act = submodule(module, self.activation)
        if self._activation(module) is None:
            return f"no kernel for the activation {type(act).__name__}"
        if is_hooked(act):
            return f"{self.activation} has hooks"
        return None if self._is_gated else self._layers_obstacle(module)

    def fused_kind(self, module: nn.Module) -> str:
        return "gated activation" if self._layers_obstacle(module) else self.kind

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or traced() or self.obstacle(module):
            return self.run_plain(module, *args, **kwargs)
        (input,), (*ups, down) = args, [submodule(module, name) for name in (*self.ups, self.down)]
        activation = self._activation(module)
        assert activation is not None
        factors = None
        if not self._layers_obstacle(module):
            whole = fits_one_chunk(input.shape[:-1].numel(), down.in_features, input.device)
            factors = None if whole else cache.factors([*ups, down], input)
        if factors is not None:
            output = mlp(input, factors[:-1], activation, factors[-1])
        elif self._is_gated:
            gate_BO, up_BO = self._gate_and_up(module, ups, input)
            output = down(gated(gate_BO, up_BO, activation))
        else:
            return self.run_plain(module, input)
        return self.finish(module, input, output)

    def _gate_and_up(self, module: nn.Module, ups: list[Any], input: Tensor) -> list[Tensor]:
        """gate(x) and up(x), of block tensor trains from one product."""
        if layers_obstacle(module, self.ups, (BTTLinear,)):
            return [layer(input) for layer in ups]
        return btt_linears(input, [layer.operands for layer in ups])

    @property
    def _is_gated(self) -> bool:
        return len(self.ups) == 2

    def _layers_obstacle(self, module: nn.Module) -> str | None:
        """Why the layers must be called one by one."""
        return layers_obstacle(module, (*self.ups, self.down))

    def _activation(self, module: nn.Module) -> str | None:
        """The name of the module's activation in `ops.activations`; None for one that is not there."""
        act = submodule(module, self.activation)
        if isinstance(act, nn.GELU):
            return "gelu" if act.approximate == "none" else "gelu_tanh"
        return _ACTIVATIONS.get(type(act).__name__)
