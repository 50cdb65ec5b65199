"""Chains of the same modes whose halves are made together, when the first of their layers asks for them in a forward.

Within one forward of the model, and in what its backward replays of it, weights stay as they are; so A and B are made
once for all layers of such a kind, however often these are called (`contract/together.py`). The next forward begins
anew, unless it is one of the same step (`merged_once`): accumulated micro-batches, and threads, share one merge.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from comera.contract.once import unrecorded
from comera.contract.together import merge_together
from comera.nn.bonds import TensorTrain, named_trains
from comera.nn.linear import TTLinear
from comera.tt.spec import TTSpec

_Halves = tuple[Tensor, Tensor]


class _Forward:
    """A forward under way: how deep, the halves that its layers are given, and in a step which leaves these are."""

    def __init__(self) -> None:
        self.depth = 0
        self.made: dict[Any, dict[TensorTrain, _Halves]] = {}
        self.leaves: list[tuple[Tensor, Tensor]] = []


class _Step:
    """The merges of a step, and its forwards in threads of their own.

    A forward is given leaves in place of the halves: its graph ends there, and may be gone through while others are.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.merged: dict[Any, list[_Halves]] = {}
        self.forwards: dict[int, _Forward] = {}  # by thread

    def give(self, key: Any, chains: list[TensorTrain], dtype: torch.dtype, to: _Forward) -> list[_Halves]:
        """The halves of chains of one kind."""
        with self.lock:
            if key not in self.merged:
                self.merged[key] = _merge(chains, dtype)
        return [(self._leaf(a, to), self._leaf(b, to)) for a, b in self.merged[key]]

    def _leaf(self, half: Tensor, to: _Forward) -> Tensor:
        if not half.requires_grad:
            return half
        leaf = half.detach().requires_grad_()
        to.leaves.append((half, leaf))
        return leaf


class Together:
    """The chains of a model's linear layers, and the halves made in its present forward."""

    def __init__(self, trains: Iterable[TensorTrain]) -> None:
        self.trains = tuple(trains)
        self.step: _Step | None = None
        self._forward = _Forward()

    @property
    def forward(self) -> _Forward:
        """The forward that asks: that of the calling thread in a step of several, else the only one."""
        found = self.step.forwards.get(threading.get_ident()) if self.step else None
        return found or self._forward

    def halves(self, train: TensorTrain, dtype: torch.dtype) -> _Halves | None:
        """A and B of `train`; None outside of a forward, for a chain without its like, and while a graph is traced."""
        here = self.forward
        replayed = torch._C._current_graph_task_id() != -1  # in a backward
        if torch.compiler.is_compiling() or not (here.depth or replayed):
            return None
        modes = dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        made = here.made.setdefault(modes, {})
        if train not in made:
            kind = _kind(train)
            alike = [each for each in self.trains if _kind(each) == kind]
            if len(alike) < 2 or not any(each is train for each in alike):
                return None
            halves = self.step.give((modes, kind), alike, dtype, here) if self.step else _merge(alike, dtype)
            made.update(zip(alike, halves, strict=True))
        return made[train]

    def enter(self, *_: Any) -> None:
        """Before the model's forward."""
        here = self.forward
        if not here.depth and self.step is None:
            here.made = {}
        here.depth += 1

    def leave(self, *_: Any) -> None:
        """After it."""
        self.forward.depth -= 1

    @contextmanager
    def one_step(self) -> Iterator[_Step]:
        """Context in which every forward is given the same merges."""
        self.step, self._forward = _Step(), _Forward()
        try:
            yield self.step
        finally:
            self.step, self._forward = None, _Forward()

    def __getstate__(self) -> dict[str, Any]:
        return {"trains": self.trains}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy is in no forward


class Merges:
    """The merges of one step: what is given out in place of their halves."""

    def __init__(self, togethers: Iterable[Together]) -> None:
        self._togethers = list(togethers)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Context of a thread whose forwards and backwards run beside those of other threads."""
        here = threading.get_ident()
        for together in self._togethers:
            assert together.step is not None
            together.step.forwards[here] = _Forward()
        yield

    def leaves(self) -> list[tuple[Tensor, Tensor]]:
        """The halves that the forwards of the calling thread were given so far, and the leaves in their places."""
        return [couple for together in self._togethers for couple in together.forward.leaves]

    def backward(self) -> None:
        """Hand on to the cores what the leaves of the calling thread have gathered."""
        reached = [(half, leaf.grad) for half, leaf in self.leaves() if leaf.grad is not None]
        if reached:
            torch.autograd.backward([half for half, _ in reached], [grad for _, grad in reached])


@contextmanager
def merged_once(model: nn.Module) -> Iterator[Merges]:
    """Context of the forwards and backwards of one step: chains are merged once for all of them.

    Gradients end at the `leaves`, from where the caller hands them on to the halves in whose places these are.
    """
    togethers = dict.fromkeys(train.together for _, train in named_trains(model) if train.together)
    with ExitStack() as stack:
        for together in togethers:
            stack.enter_context(together.one_step())
        yield Merges(togethers)


def _merge(chains: Sequence[TensorTrain], dtype: torch.dtype) -> list[_Halves]:
    specs = [train.spec for train in chains]
    numbers = [[*train.cores, *train.rank_params] for train in chains]
    with unrecorded():
        return merge_together(specs, numbers, chains[0].threshold, dtype)  # type: ignore[arg-type]


def merge_together_(model: nn.Module, *, enabled: bool = True) -> int:
    """Let the chains of the model's linear layers be merged together (`enabled`), or each by itself.

    Returns how many chains have others of their modes beside them.
    """
    trains = list(dict.fromkeys(module.tt for module in model.modules() if isinstance(module, TTLinear)))
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [n for n, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), Together)]:
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
    kinds = Counter(_kind(train) for train in trains)
    count = sum(number for number in kinds.values() if number > 1)
    together = Together(trains) if enabled and count else None
    for train in trains:
        train.together = together
    if together:
        model.register_forward_pre_hook(together.enter)
        model.register_forward_hook(together.leave, always_call=True)
    return count


def _kind(train: TensorTrain) -> tuple[Any, ...]:
    """What chains that are merged together have in common: all but ranks."""
    spec = train.spec
    assert isinstance(spec, TTSpec)
    return spec.shape, spec.in_modes, spec.out_modes, train.threshold, train.cores[0].dtype, train.cores[0].device
