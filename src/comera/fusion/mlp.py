"""The MLP of a transformer block as one operation that never holds its hidden activation (ops/mlp.py), or with its
activation, gated or not, as one (ops/gated.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.registry import (
    BlockPattern,
    StandIn,
    around_obstacle,
    checkpoints,
    is_hooked,
    layers_obstacle,
    passed_on,
    replaced_obstacle,
    submodule,
)
from comera.kernels.tracing import traced
from comera.nn.linear import BTTLinear
from comera.ops.block_product import btt_linears
from comera.ops.dtypes import autocast_dtype
from comera.ops.gated import activated, gated
from comera.ops.low_rank import LowRankFactors
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
_FUNCTIONS = ((F.gelu, "gelu"), (F.relu, "relu"), (torch.relu, "relu"), (F.silu, "silu"))


def _unchanged(module: Any, input: Tensor, output: Tensor) -> Tensor:
    return output


@dataclass(frozen=True)
class MLP(BlockPattern):
    """How a module holds its MLP: down(act(up(x))), or down(act(gate(x)) · up(x)).

    method: name of the method that computes it, with one tensor in and one out.
    ups: names of the layers before the activation, one, or gate and up. activation, down: names of what follows. The
        activation is a module, or a function such as `torch.relu`.
    finish: (module, input, output of down) -> what the method returns; a function of a module, so it can be pickled.
    packed: whether the layer before the activation gives gate and up concatenated, as `y.chunk(2, -1)`.
    dropout: name of the dropout before `down`, None without one; with `within` it may be a float as well, the p of a
        dropout without a module. Layers are called one by one, unless the p of the module is 0, or the float is 0 or
        the module not in training.
    within: whether the method does more than that, with any arguments. It then runs as it is, but for up, activation
        and down, which it calls one after the other: without a gate, `finish`, or anything in between but views and
        the dropout.

    Example:
        >>> import torch, comera
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
        >>> class Block(torch.nn.Module):  # an MLP in the middle of a forward
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.norm, self.act = torch.nn.LayerNorm(width), torch.nn.GELU()
        ...         self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        ...     def forward(self, x):
        ...         return x + self.down(self.act(self.up(self.norm(x))))
        >>> register_block(Block, MLP("forward", ups=("up",), activation="act", down="down", within=True))
        >>> model = torch.nn.Sequential(Block(64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> fuse_(model).fused("mlp")
        ('0',)
    """

    method: str
    ups: tuple[str, ...]
    activation: str
    down: str
    finish: Callable[[Any, Tensor, Tensor], Tensor] = _unchanged
    packed: bool = False
    dropout: str | None = None
    within: bool = False
    kind = "mlp"

    def obstacle(self, module: nn.Module) -> str | None:
        act = submodule(module, self.activation)
        if self._activation(module) is None:
            return f"no kernel for the activation {getattr(act, '__name__', type(act).__name__)}"
        if isinstance(act, nn.Module) and is_hooked(act):
            return f"{self.activation} has hooks"
        if (replaced := replaced_obstacle(module, self)) is not None:
            return replaced
        return next(filter(None, (around_obstacle(module, name) for name in (*self.ups, self.down))), None)

    def fused_kind(self, module: nn.Module) -> str:
        if not self._layers_obstacle(module):
            return self.kind
        return "gated activation" if self._is_gated else "activation"

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        if traced() or self.obstacle(module):
            return self.run_plain(module, *args, **kwargs)
        if self.within and not checkpoints(module):
            return self.run_plain(StandIn(module, self.stand_ins(module, cache)), *args, **kwargs)
        if self.within or len(args) != 1 or kwargs:
            return self.run_plain(module, *args, **kwargs)
        (input,) = args
        output = self._output(module, cache, input)
        return self.run_plain(module, input) if output is None else self.finish(module, input, output)

    def stand_ins(self, module: nn.Module, cache: MergeCache) -> dict[str, Any]:
        """What to put in place of the layers for one call of a forward that does more than that, so that `down` is the
        whole MLP, or where there is dropout before that, of the activation: none where they had better be called."""
        activation = self._activation(module)
        if activation is None or self.obstacle(module):
            return {}
        if self._drops(module):  # in its own code, between the activation and `down`
            return {self.activation: partial(activated, activation=activation)}

        def whole(input: Tensor) -> Any:
            output = self._output(module, cache, input)
            if output is not None:
                return output
            for name in (*self.ups, self.activation, self.down):
                input = submodule(module, name)(input)
            return input

        return {**dict.fromkeys((*self.ups, self.activation), passed_on), self.down: whole}

    def _output(self, module: nn.Module, cache: MergeCache, input: Tensor) -> Tensor | None:
        """What `down` returns; None where the module had better compute it."""
        *ups, down = (submodule(module, name) for name in (*self.ups, self.down))
        activation = self._activation(module)
        assert activation is not None
        factors = None
        if not self._layers_obstacle(module):
            whole = fits_one_chunk(input.shape[:-1].numel(), down.in_features, input.device)
            factors = None if whole else cache.factors([*ups, down], input)
        if factors is not None:
            first = _halves(factors[0]) if self.packed else factors[:-1]
            return mlp(input, first, activation, factors[-1])
        if not _meets(input, down):
            return None
        if self._is_gated:
            gate_BO, up_BO = self._gate_and_up(module, ups, input)
            hidden = gated(gate_BO, up_BO, activation)
        else:
            hidden = activated(ups[0](input), activation)
        if self.dropout and self._drops(module):
            hidden = submodule(module, self.dropout)(hidden)
        output: Tensor = down(hidden)
        return output

    def _gate_and_up(self, module: nn.Module, ups: list[Any], input: Tensor) -> Sequence[Tensor]:
        """gate(x) and up(x), of block tensor trains from one product."""
        if self.packed:
            both: Tensor = ups[0](input)
            return both.chunk(2, -1)
        if layers_obstacle(module, self.ups, (BTTLinear,)):
            return [layer(input) for layer in ups]
        return btt_linears(input, [layer.operands for layer in ups])

    @property
    def _is_gated(self) -> bool:
        return len(self.ups) == 2 or self.packed

    def _layers_obstacle(self, module: nn.Module) -> str | None:
        """Why the layers must be called one by one."""
        if self._drops(module):
            return f"there is dropout before {self.down}"
        return layers_obstacle(module, (*self.ups, self.down))

    def _drops(self, module: nn.Module) -> bool:
        """Whether there is dropout before `down` now."""
        dropout = submodule(module, self.dropout) if self.dropout else None
        if isinstance(dropout, nn.Module):
            return not _does_nothing(dropout)
        return bool(dropout) and module.training

    def _activation(self, module: nn.Module) -> str | None:
        """The name of the module's activation in `ops.activations`; None for one that is not there."""
        act = submodule(module, self.activation)
        if isinstance(act, nn.GELU):
            return "gelu" if act.approximate == "none" else "gelu_tanh"
        if isinstance(act, nn.Module):
            return _ACTIVATIONS.get(type(act).__name__)
        return next((name for function, name in _FUNCTIONS if function is act), None)


def _halves(both: LowRankFactors) -> list[LowRankFactors]:
    """The factors of gate and up, which one layer gives concatenated."""
    return [LowRankFactors(both.a, b.contiguous()) for b in both.b.chunk(2, 1)]


def _does_nothing(dropout: nn.Module) -> bool:
    """Whether a dropout need not be called."""
    none = type(dropout) is nn.Identity or (isinstance(dropout, nn.Dropout) and dropout.p == 0)
    return none and not is_hooked(dropout)


def _meets(input: Tensor, layer: nn.Module) -> bool:
    """Whether a layer can be given the dtype of an input: T5 keeps one layer in float32 beside others in half
    precision, and converts what it is given."""
    if autocast_dtype(input) is not None:
        return True
    return all(p.dtype == input.dtype for p in layer.parameters() if p.dtype.is_floating_point)
