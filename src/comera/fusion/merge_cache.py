"""Factors A, B of all tensor trains of a model, made once a step and passed down to the layers as plain tensors.

Within one forward the weights do not change, so one batched merge (ops/merge.py) serves all trains with the same
signature, however often their layers are called. The cache passes the factors to a `TTLinear` as an argument of its
forward, and to a fused block as arguments of its operation; a layer that is passed none merges its own cores.

Factors are reused only while they are certain to be current:

- a call of the model makes them anew, and so does every step of `accumulating`;
- they are dropped once a backward has run through their merge, after a step of any optimizer (torch's fused ones count
  no versions), or when a core, gate or bias has a new version (in-place writes, pruning, loading). So parts of a model
  may be called by themselves, and the replay of a checkpointed block finds the factors of its forward;
- without gradients they are reused within one call of the model only.

One write escapes this: a change through `.data` between two calls of *parts* of a model, with gradients enabled and no
backward in between. Under `torch.compile` layers merge their own cores, which the compiler can see through.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from comera.fusion.lazy import Lazy
from comera.kernels.select import is_irregular
from comera.kernels.tracing import traced
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain
from comera.ops.dtypes import autocast_dtype, kernel_dtype
from comera.ops.low_rank import LowRankFactors
from comera.ops.merge import merge
from comera.ops.once import unrecorded
from comera.ops.planner.plan import choose
from comera.ops.planner.problem import LinearProblem
from comera.tt.spec import TTSpec

_FORWARD = TTLinear.forward  # which knows of factors


class _Merged(NamedTuple):
    """The factors of one train from a batched merge."""

    factors: LowRankFactors
    sources: list[Tensor]
    """The tensors that they were made from."""
    versions: list[int]
    """Of these, when they were."""
    steps: int
    """Of all optimizers, by then."""
    used: list[bool]
    """Whether a backward has run through the merge."""


class MergeCache:
    """The tensor trains of a model's linear layers, and their factors while these are current.

    model: its `TTLinear` layers are passed their factors until `detach`.

    Example:
        >>> import torch, comera
        >>> from comera.fusion import MergeCache
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> cache = MergeCache(model)  # `fuse_` makes one, too
        >>> cache.batched
        3
        >>> x = torch.randn(5, 64)
        >>> merged = model(x)
        >>> cache.detach()
        >>> torch.allclose(model(x), merged, atol=1e-6)
        True
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
        self._merged: dict[tuple[Any, ...], dict[TensorTrain, _Merged]] = {}
        self._leaves: list[tuple[Tensor, Tensor]] | None = None  # while accumulating: factors and what stands for them
        self._thread = threading.local()

    @property
    def batched(self) -> int:
        """How many trains are in batched merges of two or more."""
        return len(self._batched)

    def factors(self, layers: Sequence[TTLinear], input: Tensor) -> list[LowRankFactors] | None:
        """Factors, with their biases, of layers that compute on this input or on what follows from it row by row.

        None where every layer had better do something else with so many rows, and where layers must merge their own
        cores: in a trace, without gradients outside a call of the model, for a copy of a layer that
        is not the model's, for a sparse or nested input, and for one that does not fit, which the layer reports.
        """
        recording = torch.is_grad_enabled()
        if traced() or not (recording or getattr(self._thread, "inside", False)):
            return None
        if is_irregular(input) or input.ndim == 0 or input.shape[-1] != layers[0].in_features:
            return None
        trains = [layer.tt for layer in layers]
        if any(layer not in self._layers.get(train, ()) for layer, train in zip(layers, trains, strict=True)):
            return None
        if not self._prefers_factors(layers, input):
            return None
        ranks = (layer.spec.ranks[layer.spec.split] for layer in layers)
        dtype = kernel_dtype(input, "low_rank", max(ranks))
        merged = self._merged.setdefault((dtype, input.device, recording, torch.is_inference_mode_enabled()), {})
        found = []
        for layer, train in zip(layers, trains, strict=True):
            made = merged.get(train)
            if made is None or made.used[0] or not self._current(made, train):
                merged |= self._merge(train, dtype)
                made = merged[train]
            missing = None if layer.bias is None or made.factors.has_bias else layer.bias.to(made.factors.b.dtype)
            found.append(made.factors.with_bias(missing))
        return found

    def _prefers_factors(self, layers: Sequence[TTLinear], input: Tensor) -> bool:
        """Whether the trains may meet the dtype of the input, and for one of them the product of A and B is wanted, or
        the best for so many rows, given that a merge of several trains is shared."""
        autocast, cores = autocast_dtype(input), [layer.tt.cores[0] for layer in layers]
        if autocast is None and any(input.dtype != core.dtype for core in cores):
            return False
        if any(core.is_inference() for core in cores):  # writes to them are not counted
            return False
        size = input.shape[:-1].numel(), (autocast or input.dtype).itemsize, input.device.type
        for layer, core in zip(layers, cores, strict=True):
            train = layer.tt
            if train.spec.activation or layer.contraction == "low_rank":
                return True
            gradients, merged = (input.requires_grad, core.requires_grad), train in self._batched
            if choose(LinearProblem, train.spec, *size, *gradients, merged=merged)[0] == "low_rank":
                return True
        return False

    def _pass_down(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before the forward of a `TTLinear`: its factors as one more argument."""
        if args and isinstance(args[0], Lazy):  # a custom autograd function would not see through it
            args = (args[0].value, *args[1:])
            return self._pass_down(layer, args, kwargs) or (args, kwargs)
        input = args[0] if args else kwargs.get("input")
        known = type(layer).forward is _FORWARD and "forward" not in vars(layer) and isinstance(input, Tensor)
        if not known or "factors" in kwargs or len(args) > 1:
            return None
        factors = self.factors([layer], input)  # type: ignore[list-item, arg-type]
        return None if factors is None else (args, {**kwargs, "factors": factors[0]})

    def _merge(self, like: TensorTrain, dtype: torch.dtype) -> dict[TensorTrain, _Merged]:
        """Merge all trains with the signature of one of them."""
        signature = _signature(like)
        trains = [train for train in self._layers if _signature(train) == signature]
        sources, biases = [self._sources(train) for train in trains], [self._bias(train) for train in trains]
        specs: list[TTSpec] = [train.spec for train in trains]  # type: ignore[misc]
        with unrecorded():  # the factors outlive the forward, so its replay finds them made
            made = merge(specs, [_flat(train) for train in trains], like.threshold, dtype, biases)
        used = [False]
        if self._leaves is not None:
            made = [LowRankFactors(*map(self._leaf, pair)) for pair in made]
        elif made[0].a.grad_fn is not None:
            made[0].a.grad_fn.register_prehook(lambda _: used.__setitem__(0, True))
        steps, each = _steps()[0], zip(trains, made, sources, strict=True)
        return {train: _Merged(factors, own, [t._version for t in own], steps, used) for train, factors, own in each}

    def _sources(self, train: TensorTrain) -> list[Tensor]:
        """What the factors of a train are made of."""
        bias = self._bias(train)
        return _flat(train) if bias is None else [*_flat(train), bias]

    def _current(self, made: _Merged, train: TensorTrain) -> bool:
        """Whether factors are made of the tensors that are there now, and nothing has written to them since."""
        each = zip(self._sources(train), made.sources, made.versions, strict=True)
        same = all(now is source and now._version == version for now, source, version in each)
        return same and made.steps == _steps()[0]

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

    def forget(self) -> None:
        """Drop all factors, so that the next ones are made anew; not within `one_step`."""
        self._merged = {}

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
    return list(dict.fromkeys(cache for module in model.modules() for cache in _hooked_to(module)))


def cache_of(model: nn.Module) -> MergeCache | None:
    """The merge cache of this very model, without a walk through its modules: once a step."""
    return next(_hooked_to(model), None)


def _hooked_to(module: nn.Module) -> Iterator[MergeCache]:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return (owner for owner in owners if isinstance(owner, MergeCache))


@contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """A context for the micro-batches of one step, backwards included: weights stay, so trains are merged once for all.

    The gradients of cores and gates are complete at its end, not before.

    Example:
        >>> import torch, comera
        >>> from comera.fusion import accumulating
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> _ = comera.fuse_(model)
        >>> with accumulating(model):
        ...     for batch in torch.randn(4, 8, 64):
        ...         (model(batch).square().mean() / 4).backward()
        >>> all(p.grad is not None for p in model.parameters())
        True
    """
    with ExitStack() as stack:
        for cache in caches(model):
            stack.enter_context(cache.one_step())
        yield


@cache
def _steps() -> list[int]:
    """The number of steps that optimizers have taken since the first merge of this process."""
    count = [0]

    def step(*_: Any) -> None:
        count[0] += 1

    register_optimizer_step_post_hook(step)
    return count


def _flat(train: TensorTrain) -> list[Tensor]:
    """Cores, then gates."""
    cores, gates = train.tensors
    return cores + gates


def _signature(train: TensorTrain) -> tuple[Any, ...]:
    """What the trains of a batched merge have in common: all but their ranks."""
    spec, core = train.spec, train.tensors[0][0]
    assert isinstance(spec, TTSpec)
    return spec.activation, spec.shape, spec.in_modes, spec.out_modes, train.threshold, core.dtype, core.device
