"""Factors A, B of all tensor trains of a model, made once a step and passed down to the layers as plain tensors.

Within one forward the weights do not change, so one batched merge (ops/merge.py) serves all trains with the same
signature, however often their layers are called. The cache passes the factors to a `TTLinear` as an argument of its
forward, and to a fused block as arguments of its operation; a layer that is passed none merges its own cores.

Factors are reused only while they are certain to be current:

- a call of the model makes them anew, and so does every step of `accumulating`;
- they are dropped once a backward has run through their merge, or when a core, gate or bias has a new version
  (in-place writes, the optimizer, pruning, loading). So parts of a model may be called by themselves, and the replay of
  a checkpointed block finds the factors of its forward;
- without gradients they are reused within one call of the model only.

One write escapes this: a change through `.data` between two calls of *parts* of a model, with gradients enabled and no
backward in between. Under `torch.compile` layers merge their own cores, which the compiler can see through.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain
from comera.ops.dtypes import autocast_dtype, working_dtype
from comera.ops.low_rank import LowRankFactors
from comera.ops.merge import merge
from comera.ops.once import unrecorded
from comera.ops.planner.plan import choose_strategy
from comera.tt.spec import TTSpec

_State = list[tuple[int, torch.Size, torch.dtype]]


@dataclass
class _Merged:
    """One batched merge: the factors of each train, and the state of the tensors they were made from."""

    factors: dict[TensorTrain, LowRankFactors]
    states: dict[TensorTrain, _State]
    used: list[bool] = field(default_factory=lambda: [False])  # whether a backward has run through it

    def serves(self, train: TensorTrain, bias: Tensor | None) -> bool:
        return not self.used[0] and self.states.get(train) == _state(train, bias)


class MergeCache:
    """The tensor trains of a model's linear layers, and their factors while these are current.

    model: its `TTLinear` layers are passed their factors until `detach`.
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [module for module in model.modules() if isinstance(module, TTLinear)]
        self._layers: dict[TensorTrain, list[TTLinear]] = {}
        for layer in layers:
            self._layers.setdefault(layer.tt, []).append(layer)
        counts = Counter(map(_signature, self._layers))
        self._batched = {train for train in self._layers if counts[_signature(train)] > 1}
        self._handles = [model.register_forward_pre_hook(self._begin)]
        self._handles.append(model.register_forward_hook(self._end, always_call=True))
        self._handles += [layer.register_forward_pre_hook(self._pass_down, with_kwargs=True) for layer in layers]
        self._reset()

    def _reset(self) -> None:
        self._merged: dict[Any, _Merged] = {}
        self._leaves: list[tuple[Tensor, Tensor]] | None = None  # while accumulating: factors and what stands for them
        self._thread = threading.local()

    @property
    def batched(self) -> int:
        """How many trains are merged together with others."""
        return len(self._batched)

    def factors(self, layers: Sequence[TTLinear], input: Tensor) -> list[LowRankFactors] | None:
        """Factors, with their biases, of layers that compute on this input or on what follows from it row by row.

        None where every layer had better do something else with so many rows, and where layers must merge their own
        cores: in a trace, without gradients outside a call of the model, for a copy of a layer that is not the model's,
        and for an input that does not fit, which the layer reports.
        """
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or getattr(self._thread, "inside", False)):
            return None
        if input.ndim == 0 or input.shape[-1] != layers[0].in_features:
            return None
        if any(layer not in self._layers.get(layer.tt, ()) or not _accepts(layer, input) for layer in layers):
            return None
        if not any(_prefers_factors(layer, input, merged=layer.tt in self._batched) for layer in layers):
            return None
        return [self._factors(layer, working_dtype(input)) for layer in layers]

    def _factors(self, layer: TTLinear, dtype: torch.dtype) -> LowRankFactors:
        key = (_signature(layer.tt), dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        merged = self._merged.get(key)
        if merged is None or not merged.serves(layer.tt, self._bias(layer.tt)):
            merged = self._merged[key] = self._merge(layer.tt, dtype)
        factors = merged.factors[layer.tt]
        return factors if layer.bias is None or factors.has_bias else factors.with_bias(layer.bias.to(dtype))

    def _pass_down(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward of a `TTLinear`: its factors as one more argument."""
        input = args[0] if args else kwargs.get("input")
        known = isinstance(layer, TTLinear) and isinstance(input, Tensor)
        if not known or "factors" in kwargs or len(args) > 1:
            return None
        factors = self.factors([layer], input)  # type: ignore[list-item, arg-type]
        return None if factors is None else (args, {**kwargs, "factors": factors[0]})

    def _merge(self, like: TensorTrain, dtype: torch.dtype) -> _Merged:
        """Merge all trains with the signature of one of them."""
        trains = [train for train in self._layers if _signature(train) == _signature(like)]
        biases = [self._bias(train) for train in trains]
        states = {train: _state(train, bias) for train, bias in zip(trains, biases, strict=True)}
        with unrecorded():  # the factors outlive the forward, so its replay finds them made
            specs = [train.spec for train in trains]
            made = merge(specs, [_flat(train) for train in trains], like.threshold, dtype, biases)  # type: ignore[arg-type]
        used = [False]
        if self._leaves is not None:
            made = [LowRankFactors(*map(self._leaf, pair)) for pair in made]
        elif made[0].a.grad_fn is not None:
            made[0].a.grad_fn.register_prehook(lambda _: used.__setitem__(0, True))
        return _Merged(dict(zip(trains, made, strict=True)), states, used)

    def _bias(self, train: TensorTrain) -> Tensor | None:
        """The bias to merge with a train: that of its only layer. Layers that share a train add theirs themselves."""
        layers = self._layers[train]
        return layers[0].bias if len(layers) == 1 else None

    def _leaf(self, factor: Tensor) -> Tensor:
        if self._leaves is None or not factor.requires_grad:
            return factor
        leaf = factor.detach().requires_grad_()
        self._leaves.append((factor, leaf))
        return leaf

    def _begin(self, *_: Any) -> None:
        """Before the model's forward."""
        self._thread.inside = True
        if self._leaves is None:
            self._merged = {}

    def _end(self, *_: Any) -> None:
        """After it."""
        self._thread.inside = False

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """A context for several forwards and backwards with one merge, whose backward runs at the end."""
        self._merged, self._leaves = {}, []
        try:
            yield
            reached = [(factor, leaf.grad) for factor, leaf in self._leaves if leaf.grad is not None]
            if reached:
                torch.autograd.backward([factor for factor, _ in reached], [grad for _, grad in reached])
        finally:
            self._merged, self._leaves = {}, None

    def detach(self) -> None:
        """Let every layer merge its own cores again."""
        for handle in self._handles:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"_layers": self._layers, "_batched": self._batched, "_handles": self._handles}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()


def caches(model: nn.Module) -> list[MergeCache]:
    """The merge caches that serve layers of a model."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, MergeCache)))


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """A context for the micro-batches of one step, backwards included: weights stay, so trains are merged once for all.

    The gradients of cores and gates are complete at its end, not before.
    """
    with ExitStack() as stack:
        for cache in caches(model):
            stack.enter_context(cache.one_step())
        yield


def _accepts(layer: TTLinear, input: Tensor) -> bool:
    """Whether a layer may meet the dtype of this input; no versions tell of writes to inference tensors."""
    core = layer.tt.tensors[0][0]
    return not core.is_inference() and (input.dtype == core.dtype or autocast_dtype(input) is not None)


def _prefers_factors(layer: TTLinear, input: Tensor, *, merged: bool) -> bool:
    """Whether the product of A and B is the best for so many rows; merged: the merge is shared with other layers."""
    dtype, grad_cores = autocast_dtype(input) or input.dtype, layer.tt.tensors[0][0].requires_grad
    rows, device = input.shape[:-1].numel(), input.device.type
    strategy = choose_strategy(layer.spec, rows, dtype.itemsize, device, input.requires_grad, grad_cores, merged=merged)
    return strategy == "low_rank"


def _state(train: TensorTrain, bias: Tensor | None) -> _State:
    tensors = _flat(train)
    return [(t._version, t.shape, t.dtype) for t in (tensors if bias is None else [*tensors, bias])]


def _flat(train: TensorTrain) -> list[Tensor]:
    """Cores, then gates."""
    cores, gates = train.tensors
    return cores + gates


def _signature(train: TensorTrain) -> tuple[Any, ...]:
    """What trains that are merged together have in common: all but their ranks."""
    spec, core = train.spec, train.tensors[0][0]
    assert isinstance(spec, TTSpec)
    return spec.shape, spec.in_modes, spec.out_modes, train.threshold, core.dtype, core.device
