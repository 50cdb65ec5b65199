"""AdamW that updates hundreds of small parameters in one call on the CPU."""

from collections import defaultdict
from collections.abc import Sequence, Set
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from comera.kernels.cpp.adamw import Group, Held, step
from comera.kernels.select import supports

_state_of = itemgetter("exp_avg", "exp_avg_sq", "step")


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW: the same arguments, state, hooks and arithmetic, to rounding.

    Parameters that are float32 on the CPU, dense and contiguous, as are their gradients and state, are updated by one
    call of a kernel, in all groups with the same betas and eps: a compressed model has hundreds of small parameters in
    dozens of groups, and torch takes longer to dispatch each than to compute it. Torch updates all other groups, those
    with amsgrad, maximize, capturable, differentiable or scaled gradients, and takes the first step, which creates the
    state.

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

    _updated: Set[int] = frozenset()  # ids of the groups that the kernel has updated in this step

    @cached_property
    def _held(self) -> dict[Tensor, Held]:
        """The kernel's view of each group, by the group's first parameter with a gradient."""
        return {}

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill the lists of what torch's step updates; they stay empty if the kernel has updated the group.

        Overriding this method of torch keeps its handling of closures, hooks and the context of a step. The first group
        of a step lets the kernel update all groups that it supports, as one call.
        """
        groups = self._adam_groups()
        if group is groups[0]:
            self._updated = self._step_groups(groups)
        if id(group) in self._updated:
            return False
        has_complex = bool(super()._init_group(group, *lists))
        increment_version(lists[0])  # the parameters: torch's fused kernels do not
        return has_complex

    def _adam_groups(self) -> list[dict[str, Any]]:
        """The groups whose step is AdamW's, in the order in which torch visits them."""
        return self.param_groups

    def _step_groups(self, groups: Sequence[dict[str, Any]]) -> set[int]:
        """Update what the kernel supports; returns the ids of these groups."""
        updated, alike = set(), defaultdict(list)
        for group in groups:
            if ready := self._ready(group):
                beta1, beta2 = map(float, group["betas"])
                alike[(beta1, beta2), float(group["eps"])].append(ready)
                updated.add(id(group))
        for (betas, eps), ready_groups in alike.items():
            step(ready_groups, betas=betas, eps=eps)
        return updated

    def _ready(self, group: dict[str, Any]) -> Group | None:
        """What the kernel reads of a group; None if it does not support the group."""
        scaled = (getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        if any(group[option] for option in ("amsgrad", "maximize", "capturable", "differentiable")) or any(scaled):
            return None
        params: list[Tensor] = group["params"]
        grads = [grad for p in params if (grad := p.grad) is not None]
        if len(grads) < len(params):
            params = [p for p in params if p.grad is not None]
        if not params or not supports("adamw", params[0]):
            return None
        states = [self.state[p] for p in params]
        if not all(states):
            return None
        # gathered at each step, because pruning and loading replace state between steps
        state = list(chain.from_iterable(map(_state_of, states)))
        held = self._held.get(params[0])
        if held is None or not held.holds(params, state):
            held = self._held[params[0]] = Held(params, state)
        return held.group(grads, float(group["lr"]), float(group["weight_decay"]))
