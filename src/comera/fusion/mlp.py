"""The MLP of a transformer block as one operation that never holds its hidden activation (ops/mlp.py), or with its
activation, gated or not, as one (ops/gated.py)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.fusion.dropout import Dropout
from comera.fusion.lazy import Inputs, Lazy, value_of
from comera.fusion.merge_cache import MergeCache
from comera.fusion.obstacles import (
    around_obstacle,
    call_obstacle,
    checkpoints,
    is_hooked,
    layers_obstacle,
    replaced_obstacle,
    submodule,
)
from comera.fusion.registry import BlockPattern, Instead, StandIn
from comera.kernels.tracing import traced
from comera.nn.linear import BTTLinear
from comera.ops.block_product import btt_linears
from comera.ops.dtypes import autocast_dtype
from comera.ops.gated import activated, gated
from comera.ops.low_rank import LowRankFactors
from comera.ops.mlp import fits_one_chunk, mlp

# activations of ops/activations.py, by the type of a module and by the function
_MODULES = {
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.SiLU": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.SiLUActivation": "silu",
}
_FUNCTIONS = ((F.gelu, "gelu"), (F.relu, "relu"), (torch.relu, "relu"), (F.silu, "silu"))


@dataclass(frozen=True)
class MLP(BlockPattern):
    """How a module holds its MLP: down(act(up(x))), or down(act(gate(x)) · up(x)).

    method: name of the method that computes it. Its own code runs, on a module whose layers are replaced for this call,
        so it may do more than that. If it does something else with a hidden activation, the layers are called.
    ups: names of the layers before the activation, one, or gate and up. activation, down: names of what follows. The
        activation is a module, or a function such as `torch.relu`.
    packed: whether the layer before the activation gives gate and up concatenated, as `y.chunk(2, -1)`.
    dropout: name of the dropout before `down`, a module, or a float, the p of a dropout without a module; None without
        one. While it zeroes something, layers are called one by one.
    finish, within: without effect; they said what the method does beyond the MLP.

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
        >>> register_block(Block, MLP("forward", ups=("up",), activation="act", down="down"))
        >>> model = torch.nn.Sequential(Block(64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> fuse_(model).fused("mlp")
        ('0',)
    """

    method: str
    ups: tuple[str, ...]
    activation: str
    down: str
    finish: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    packed: bool = False
    dropout: str | None = None
    within: bool = False
    kind = "mlp"

    def obstacle(self, module: nn.Module) -> str | None:
        act = submodule(module, self.activation)
        if (activation := self._activation(module)) is None:
            return f"no kernel for the activation {getattr(act, '__name__', type(act).__name__)}"
        if isinstance(act, nn.Module) and (reason := call_obstacle(act)):
            return f"{self.activation} {reason}"
        if isinstance(act, nn.Module) and not _has_own_function(act, activation):
            return f"the function of {self.activation} was replaced by someone else"
        if (replaced := replaced_obstacle(module, self)) is not None:
            return replaced
        names = (*self.ups, self.activation, self.down)
        return next(filter(None, (around_obstacle(module, name) for name in names)), None)

    def fused_kind(self, module: nn.Module) -> str:
        if not self._drops(module) and not layers_obstacle(module, (*self.ups, self.down)):
            return self.kind
        return "gated activation" if self.is_gated else "activation"

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        layer_checkpoints = self.method == "forward" and checkpoints(module)
        given = {} if traced() or layer_checkpoints else self.stand_ins(module, cache)
        if not given:
            return self.run_plain(module, *args, **kwargs)
        output = self.run_plain(StandIn.of(module, given), *args, **kwargs)
        return output.value if isinstance(output, _Hidden) else output

    def stand_ins(self, module: nn.Module, cache: MergeCache, /) -> dict[str, Any]:
        """What to put in place of the layers for one call of the method; nothing where they must be called."""
        activation = self._activation(module)
        if activation is None or self.obstacle(module):
            return {}
        call = _Call(self, module, cache, activation)
        given: dict[str, Any] = {
            name: Instead(submodule(module, name), partial(_Hidden, call, stage=stage))
            for name, stage in zip(self.ups, ("both",) if self.packed else ("first", "second"), strict=False)
        }
        given[self.activation] = Instead(submodule(module, self.activation), call.activate)
        given[self.down] = Instead(submodule(module, self.down), call.output)
        if self.dropout and isinstance(dropout := submodule(module, self.dropout), nn.Module):
            given[self.dropout] = Instead(dropout, lambda h: h if _does_nothing(dropout) else dropout(value_of(h)))
        return given

    @property
    def is_gated(self) -> bool:
        """Whether what is activated is multiplied by something that is not."""
        return len(self.ups) == 2 or self.packed

    def _drops(self, module: nn.Module) -> bool:
        """Whether there is dropout before `down`, in training."""
        dropout = submodule(module, self.dropout) if self.dropout else None
        if isinstance(dropout, nn.Module):
            return type(dropout) is not nn.Identity and getattr(dropout, "p", 1) != 0
        return bool(dropout) and module.training

    def _activation(self, module: nn.Module) -> str | None:
        """The name of the module's activation in `ops.activations`; None for one that is not there."""
        act = submodule(module, self.activation)
        if type(act) is nn.GELU:
            return "gelu" if act.approximate == "none" else "gelu_tanh"
        if isinstance(act, nn.Module):
            return _MODULES.get(f"{type(act).__module__}.{type(act).__qualname__}")
        return next((name for function, name in _FUNCTIONS if function is act), None)


class _Call:
    """An MLP during one call of its module."""

    def __init__(self, pattern: MLP, module: nn.Module, cache: MergeCache, activation: str) -> None:
        self.pattern, self.module, self.cache, self.activation = pattern, module, cache, activation
        self.act, self.down = submodule(module, pattern.activation), submodule(module, pattern.down)
        self.ups = [submodule(module, name) for name in pattern.ups]

    def activate(self, hidden: Any) -> Any:
        """The activation of what a layer gives."""
        if isinstance(hidden, _Hidden) and hidden.is_waiting_as(self, "first"):
            return _Hidden(self, hidden.read(), "activated")
        return self.act(value_of(hidden))

    def output(self, hidden: Any) -> Tensor:
        """The output of `down`: that of the whole MLP, where nothing else has happened to the hidden activation."""
        last = "gated" if self.pattern.is_gated else "activated"
        whole = isinstance(hidden, _Hidden) and hidden.is_waiting_as(self, last)
        factors = self._factors(hidden.read()) if whole else None
        if factors is None:
            found: Tensor = self.down(value_of(hidden))
            return found
        first = factors[:-1]
        if self.pattern.packed:  # one layer gives gate and up concatenated
            first = [LowRankFactors(factors[0].a, b.contiguous()) for b in factors[0].b.chunk(2, 1)]
        return mlp(hidden.input, first, self.activation, factors[-1])

    def _factors(self, input: Tensor) -> list[LowRankFactors] | None:
        """The factors of all layers; None where these must be called, or are faster."""
        if layers_obstacle(self.module, (*self.pattern.ups, self.pattern.down)):
            return None
        if fits_one_chunk(input.shape[:-1].numel(), self.down.in_features, input.device):
            return None
        return self.cache.factors([*self.ups, self.down], input)

    def values(self, input: Tensor, stage: str) -> Tensor:
        """Hidden activations, as far as the module has computed them."""
        if stage == "gated":
            gate, up = self._gate_and_up(input)
            return gated(gate, up, self.activation)
        if stage == "activated":
            return activated(self.values(input, "first"), self.activation)
        if stage == "both" or not self.pattern.packed:
            found: Tensor = self.ups[stage == "second"](input)
            return found
        return self.values(input, "both").chunk(2, -1)[stage == "second"]

    def _gate_and_up(self, input: Tensor) -> Sequence[Tensor]:
        """gate(x) and up(x), of block tensor trains from one product."""
        if self.pattern.packed:
            return self.values(input, "both").chunk(2, -1)
        if layers_obstacle(self.module, self.pattern.ups, (BTTLinear,)):
            return [layer(input) for layer in self.ups]
        return btt_linears(input, [layer.operands for layer in self.ups])


class _Hidden(Lazy):
    """Hidden activations that wait for the last layer of their MLP.

    stage: what they are: "first", of gate, or of up where there is no gate; "second", of up beside a gate; "both";
        "activated", of the first; or "gated", the product of that and the second.
    """

    def __init__(self, call: _Call, input: Any, stage: str) -> None:
        super().__init__()
        self.call, self.input, self.stage = call, value_of(input), stage
        self._inputs = Inputs(self.input)

    def is_waiting_as(self, call: _Call, stage: str) -> bool:
        return self.call is call and self.stage == stage and self._value is None

    def compute(self) -> Tensor:
        return self.call.values(self.read(), self.stage)

    def read(self) -> Any:
        """The input. Raises ConversionError if it is not what the layers were given."""
        self._inputs.check()
        return self.input

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        return autocast_dtype(self.input) or self.input.dtype

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        """The parts of them along an axis."""
        if (self.stage, chunks, dim) != ("both", 2, -1) or self._value is not None:
            return self.value.chunk(chunks, dim)
        return tuple(_Hidden(self.call, self.read(), stage) for stage in ("first", "second"))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, _Hidden) and self.input is other.input:
            for one, two in ((self, other), (other, self)):
                if one.is_waiting_as(self.call, "activated") and two.is_waiting_as(self.call, "second"):
                    return _Hidden(self.call, two.read(), "gated")
        return self.value * value_of(other)

    __rmul__ = __mul__


def _does_nothing(dropout: nn.Module) -> bool:
    """Whether a dropout need not be called."""
    if type(dropout) in (nn.Dropout, Dropout):
        return not (dropout.p and dropout.training) and not call_obstacle(dropout)
    return type(dropout) is nn.Identity and not is_hooked(dropout)


def _has_own_function(act: nn.Module, activation: str) -> bool:
    """Whether an activation of transformers that holds a function still holds the one that it was made with."""
    held = vars(act).get("act")
    if held is None or getattr(held, "__self__", None) is act:  # the same in Python
        return True
    approximate = {"approximate": "tanh"} if activation == "gelu_tanh" else {}
    return getattr(held, "func", held) is _FUNCTIONS[0][0] and getattr(held, "keywords", {}) == approximate
