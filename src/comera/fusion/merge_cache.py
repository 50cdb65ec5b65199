"""Chains of the same modes whose halves are made together, when the first of their layers asks for them in a forward.

Within one forward of the model, and in what its backward replays of it, weights stay as they are; so A and B are made
once for all layers of such a kind, however often these are called (`contract/together.py`). The next forward begins
anew, unless it is of the same step (`merged_once`): accumulated micro-batches share one merge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.ops.once import unrecorded
from comera.ops.together import merge_together
from comera.tt.spec import TTSpec

_Halves = tuple[Tensor, Tensor]
_Chains = dict[TensorTrain, tuple[list[Tensor], Tensor | None]]  # with their numbers, and a bias


class Together:
    """The chains of a model's linear layers, and the halves made in its present forward, or for its present step."""

    def __init__(self, layers: Iterable[TTLinear]) -> None:
        self.layers = tuple(layers)
        self._depth = 0
        self._made: dict[Any, dict[TensorTrain, _Halves]] = {}
        self._kinds: list[_Chains] | None = None  # as they are in this forward
        self._given: list[tuple[Tensor, Tensor]] | None = None  # in a step: halves, and the leaves in their places

    def halves(self, train: TensorTrain, dtype: torch.dtype) -> _Halves | None:
        """A and B of `train`; None outside of a forward, for a chain without its like, and while a graph is traced."""
        replayed = torch._C._current_graph_task_id() != -1  # in a backward
        if torch.compiler.is_compiling() or not (self._depth or replayed):
            return None
        key = (dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        made = self._made.setdefault(key, {})
        if train not in made:
            alike = next((chains for chains in self._alike() if train in chains), {})
            if len(alike) < 2:
                return None
            made.update(zip(alike, ((self._give(a), self._give(b)) for a, b in _merge(alike, dtype)), strict=True))
        return made[train]

    def _give(self, half: Tensor) -> Tensor:
        if self._given is None or not half.requires_grad:
            return half
        leaf = half.detach().requires_grad_()
        self._given.append((half, leaf))
        return leaf

    def _alike(self) -> list[_Chains]:
        """The chains by kind, each with the bias of the one layer that holds it; tied layers add theirs themselves."""
        if self._kinds is None:
            held: dict[TensorTrain, list[Tensor | None]] = {}
            for layer in self.layers:
                held.setdefault(layer.tt, []).append(layer.bias)
            kinds: dict[Any, _Chains] = {}
            for train, biases in held.items():
                numbers = [number for part in train.tensors for number in part]
                chains = kinds.setdefault(_kind(train, numbers[0]), {})
                chains[train] = numbers, biases[0] if len(biases) == 1 else None
            self._kinds = list(kinds.values())
        return self._kinds

    def enter(self, *_: Any) -> None:
        """Before the model's forward."""
        if not self._depth and self._given is None:
            self._made, self._kinds = {}, None
        self._depth += 1

    def leave(self, *_: Any) -> None:
        """After it."""
        self._depth -= 1

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Context of several forwards and backwards with one merge: gradients wait in leaves, and go on at its end."""
        self._made, self._kinds, self._given = {}, None, []
        try:
            yield
            reached = [(half, leaf.grad) for half, leaf in self._given if leaf.grad is not None]
            if reached:
                torch.autograd.backward([half for half, _ in reached], [grad for _, grad in reached])
        finally:
            self._made, self._given = {}, None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_depth": 0, "_made": {}, "_kinds": None, "_given": None}


@contextmanager
def merged_once(model: nn.Module) -> Iterator[None]:
    """Context of the micro-batches of one step, backwards included: weights stay, so chains are merged once for all.

    The gradients of chains that are merged together are complete at its end.
    """
    with ExitStack() as stack:
        for together in dict.fromkeys(train.together for _, train in named_trains(model) if train.together):
            stack.enter_context(together.one_step())
        yield


def _merge(chains: _Chains, dtype: torch.dtype) -> list[_Halves]:
    specs = [train.spec for train in chains]
    numbers, biases = zip(*chains.values(), strict=True)
    threshold = next(iter(chains)).threshold
    with unrecorded():
        return merge_together(specs, numbers, threshold, dtype, biases)  # type: ignore[arg-type]


def merge_together_(model: nn.Module, *, enabled: bool = True) -> int:
    """Let the chains of the model's linear layers be merged together (`enabled`), or each by itself.

    Returns how many chains have others of their modes beside them.
    """
    layers = [module for module in model.modules() if isinstance(module, TTLinear)]
    trains = list(dict.fromkeys(layer.tt for layer in layers))
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Together)]:
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
    kinds = {train: _kind(train, train.tensors[0][0]) for train in trains}
    like = Counter(kinds.values())
    count = sum(number for number in like.values() if number > 1)
    together = Together(layers) if enabled and count else None
    for train in trains:
        train.together = together if like[kinds[train]] > 1 else None
    if together:
        model.register_forward_pre_hook(together.enter)
        model.register_forward_hook(together.leave, always_call=True)
    return count


def _kind(train: TensorTrain, core: Tensor) -> tuple[Any, ...]:
    """What chains that are merged together have in common: all but ranks."""
    spec = train.spec
    assert isinstance(spec, TTSpec)
    return spec.shape, spec.in_modes, spec.out_modes, train.threshold, core.dtype, core.device
