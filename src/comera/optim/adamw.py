"""AdamW that takes one call for hundreds of small parameters on the CPU."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.adamw import Held
from comera.kernels.select import supports

_kept = itemgetter("exp_avg", "exp_avg_sq", "step")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW: the same arguments, state, hooks and arithmetic, to rounding.

    Where a group's parameters, gradients and state are float32 on the CPU, dense and contiguous, one kernel takes the
    step of all of them: a compressed model has hundreds of small ones, and torch takes longer to pass each from hand to
    hand than to compute. It takes the steps of all other groups, and those of amsgrad, maximize, capturable,
    differentiable and gradients under a scale, and the first one, which makes the state.
    """

    @cached_property
    def _held(self) -> dict[Tensor, Held]:
        """Of each group, by its first parameter with a gradient."""
        return {}

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """What torch's step calls to fill the lists of what it is to update: left empty where the kernel has done it.

        So closures, hooks and the context of a step remain those of torch.
        """
        return not self._take(group) and bool(super()._init_group(group, *lists))

    def _take(self, group: dict[str, Any]) -> bool:
        """Take the step of a group by the kernel, if it may; whether it has."""
        scaled = (getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if any(group[way] for way in ("amsgrad", "maximize", "capturable", "differentiable")) or any(scaled):
            return False
        params: list[Tensor] = group["params"]
        grads = [grad for p in params if (grad := p.grad) is not None]
        if len(grads) < len(params):
            params = [p for p in params if p.grad is not None]
        if not params or not supports("adamw", params[0]):
            return False
        states = [self.state[p] for p in params]
        if not all(states):
            return False
        # gathered anew for each step, as pruning and loading replace state between steps
        kept = list(chain.from_iterable(map(_kept, states)))
        held = self._held.get(params[0])
        if held is None or not held.holds(params, kept):
            held = self._held[params[0]] = Held(params, kept)
        rates = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        beta1, beta2 = map(float, group["betas"])
        return held.fits and held.step(grads, betas=(beta1, beta2), **rates)
