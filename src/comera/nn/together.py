"""Chains of the same modes whose halves are made together, when the first of their layers asks for them in a forward.

Within one forward of the model, and in what its backward replays of it, weights stay as they are; so A and B are made
once for all layers of such a kind, however often these are called (`contract/together.py`). The next forward begins
anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from comera.contract.once import unrecorded
from comera.contract.together import merge_together
from comera.nn.bonds import TensorTrain
from comera.nn.linear import TTLinear
from comera.tt.spec import TTSpec

_Halves = tuple[Tensor, Tensor]


class Together:
    """The chains of a model's linear layers, and the halves made in its present forward."""

    def __init__(self, trains: Iterable[TensorTrain]) -> None:
        self.trains = tuple(trains)
        self._depth = 0
        self._made: dict[Any, dict[TensorTrain, _Halves]] = {}

    def halves(self, train: TensorTrain, dtype: torch.dtype) -> _Halves | None:
        """A and B of `train`; None outside of a forward, for a chain without its like, and while a graph is traced."""
        replayed = torch._C._current_graph_task_id() != -1  # in a backward
        if torch.compiler.is_compiling() or not (self._depth or replayed):
            return None
        key = (dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        made = self._made.setdefault(key, {})
        if train not in made:
            alike = [each for each in self.trains if _kind(each) == _kind(train)]
            if len(alike) < 2 or not any(each is train for each in alike):
                return None
            chains = [[*each.cores, *each.rank_params] for each in alike]
            with unrecorded():
                specs = [each.spec for each in alike]
                halves = merge_together(specs, chains, train.threshold, dtype)  # type: ignore[arg-type]
            made.update(zip(alike, halves, strict=True))
        return made[train]

    def enter(self, *_: Any) -> None:
        """Before the model's forward."""
        if not self._depth:
            self._made = {}
        self._depth += 1

    def leave(self, *_: Any) -> None:
        """After it."""
        self._depth -= 1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_depth": 0, "_made": {}}


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
