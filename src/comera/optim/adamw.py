"""AdamW that updates hundreds of small parameters in one call on the CPU."""

from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from comera.kernels.cpp.adamw import Held
from comera.kernels.select import supports

_state_of = itemgetter("exp_avg", "exp_avg_sq", "step")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW: the same arguments, state, hooks and arithmetic, to rounding.

    If a group's parameters, gradients and state are float32 on the CPU, dense and contiguous, one kernel updates them
    all: a compressed model has hundreds of small parameters, and torch takes longer to dispatch each than to compute
    it. Torch updates all other groups, those with amsgrad, maximize, capturable, differentiable or scaled gradients,
    and takes the first step, which creates the state.

    Example:
        >>> import torch, comera
        >>> from comera.optim import AdamW
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> _ = comera.tensorize_(model, ratio=4)
        >>> optimizer = AdamW(comera.param_groups(model, lr=1e-2))
        >>> x, losses = torch.randn(8, 64), []
        >>> for _ in range(5):
        ...     loss = (model(x) - x).square().mean()
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        ...     losses.append(loss.item())
        >>> losses[-1] < losses[0]
        True
    """

    @cached_property
    def _held(self) -> dict[Tensor, Held]:
        """The kernel's view of each group, by the group's first parameter with a gradient."""
        return {}

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists of what torch's step updates; they stay empty if the kernel has updated the group.

        Overriding this method of torch keeps its handling of closures, hooks and the context of a step.
        """
        if self._step_group(group):
            return False
        has_complex = bool(super()._init_group(group, *lists))
        increment_version(lists[0])  # the parameters: torch's fused kernels do not
        return has_complex

    def _step_group(self, group: dict[str, Any]) -> bool:
        """Update a group with the kernel if it supports the group; returns whether it did."""
        scaled = (getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if any(group[option] for option in ("amsgrad", "maximize", "capturable", "differentiable")) or any(scaled):
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
        # gathered at each step, because pruning and loading replace state between steps
        state = list(chain.from_iterable(map(_state_of, states)))
        held = self._held.get(params[0])
        if held is None or not held.holds(params, state):
            held = self._held[params[0]] = Held(params, state)
        rates = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        beta1, beta2 = map(float, group["betas"])
        return held.fits and held.step(grads, betas=(beta1, beta2), **rates)
