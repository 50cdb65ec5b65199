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
from torch.optim import Optimizer

from comera.errors import ConfigError
from comera.kernels.cpp.adamw import Group, Held, Terms, step
from comera.kernels.select import supports
from comera.rank.importance import running_means
from comera.rank.step_rule import StepRule, gradients_of

_state_of = itemgetter("exp_avg", "exp_avg_sq", "step")

_OPTIONS = ("amsgrad", "maximize", "capturable", "differentiable")  # what the kernel does not do
_Kind = tuple[float, float, float]
"""Betas and eps, which groups have in common that are updated by one call."""


def _idle(group: dict[str, Any]) -> bool:
    """Whether no parameter of a group has a gradient."""
    return all(p.grad is None for p in group["params"])


def check_dense(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Raise ConfigError, before anything is changed, if a parameter of these groups has a sparse gradient."""
    grads = (p.grad for group in groups for p in group["params"] if p.grad is not None)
    if sparse := [tuple(grad.shape) for grad in grads if grad.is_sparse]:
        raise ConfigError(
            f"{type(optimizer).__name__}: expected dense gradients, got sparse ones for {len(sparse)} parameters, such "
            f"as one of shape {sparse[0]} (nothing was changed): use Adagrad or SGD for these tables, or sparse=False"
        )


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW: the same arguments, state, hooks and arithmetic, to rounding.

    Parameters that are float32 on the CPU, dense and contiguous, as are their gradients and state, are updated by one
    call of a kernel, in all groups with the same betas and eps: a compressed model has hundreds of small parameters in
    dozens of groups, and torch takes longer to dispatch each than to compute it. Torch updates all other groups, those
    with amsgrad, maximize, capturable, differentiable or scaled gradients, and takes the first step, which creates the
    state.

    A `RankController` that is attached has its rule applied in the same pass, as gradients are read: they stay as they
    are. Where torch updates a group, and so in the first step, the rule is written into the gradients before.

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

    captured = True
    """Whether a CUDA graph may capture its step."""
    _updated: Set[int] = frozenset()  # ids of the groups that the kernel has updated in this step
    _rule: StepRule | None = None  # of the step that has begun, to apply

    @cached_property
    def _held(self) -> dict[tuple[Tensor, int], Held]:
        """The kernel's view of groups, by the first parameter with a gradient and the number of groups."""
        return {}

    @cached_property
    def _whole(self) -> set[_Kind]:
        """Kinds of groups each of which was ready for the kernel when it was last looked at by itself."""
        return set()

    def take_rule(self, rule: StepRule) -> bool:
        """Apply a rule of rank adaptation in the step that has begun; False, and nothing is done, if it cannot."""
        pending = self._rule is not None and not self._rule.withdrawn
        if type(self) is not AdamW or pending:  # other classes read gradients elsewhere, too
            return False
        self._rule = rule
        return True

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
        alike: dict[_Kind, list[dict[str, Any]]] = defaultdict(list)
        if not any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf")):
            for group in groups:
                if not any(map(group.__getitem__, _OPTIONS)):
                    beta1, beta2 = map(float, group["betas"])
                    alike[beta1, beta2, float(group["eps"])].append(group)
        ready = {kind: self._ready(kind, each) for kind, each in alike.items()}
        updated = {id(group) for by_kernel in ready.values() for part in by_kernel for group in part[0]}
        others = [group for group in groups if id(group) not in updated and not _idle(group)]
        check_dense(self, others)
        rule, self._rule = self._rule, None
        terms = {} if rule is None or rule.withdrawn else self._terms(rule, all_ready=not others)
        for (beta1, beta2, eps), parts in ready.items():
            if parts:
                step([part for _, part in parts], betas=(beta1, beta2), eps=eps, **terms)
        return updated

    def _ready(self, kind: _Kind, groups: list[dict[str, Any]]) -> list[tuple[list[dict[str, Any]], Group]]:
        """The groups that the kernel supports, of those of one kind, and what it reads of them: all together if each
        was ready in the last step, otherwise group by group."""
        whole = self._part(groups) if kind in self._whole else None
        if whole is not None:
            return [(groups, whole)]
        parts = [([group], part) for group in groups if (part := self._part([group])) is not None]
        if len(parts) + sum(map(_idle, groups)) == len(groups):
            self._whole.add(kind)
        else:
            self._whole.discard(kind)
        return parts

    def _part(self, groups: Sequence[dict[str, Any]]) -> Group | None:
        """What the kernel reads of groups; None if it does not support each."""
        params, grads, rates, decays = list[Tensor](), list[Tensor](), list[float](), list[float]()
        for group in groups:
            found = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
            params += [p for p, _ in found]
            grads += [grad for _, grad in found]
            rates += [float(group["lr"])] * len(found)
            decays += [float(group["weight_decay"])] * len(found)
        if not params or not supports("adamw", params[0]):
            return None
        states = [self.state[p] for p in params]
        if not all(states):
            return None
        # gathered at each step, because pruning and loading replace state between steps
        state = list(chain.from_iterable(map(_state_of, states)))
        key = params[0], len(groups)
        held = self._held.get(key)
        if held is None or not held.holds(params, state):
            held = self._held[key] = Held(params, state)
        return held.group(grads, rates, decays)

    def _terms(self, rule: StepRule, *, all_ready: bool) -> dict[str, Terms]:
        """What the kernel applies of a rule: all of it, or nothing, and it is written into the gradients now."""
        if all_ready:
            own = [d for d in rule.measured if d.grad is not None and d in self.state]  # another one may hold the rest
            means = running_means(self, own)
            terms = Terms.fitting(float(rule.c_loss), rule.slopes, rule.cores, 2 * rule.ridge, means)
            if terms is not None:
                rule.applied = True
                return {"terms": terms}
        rule.adjust_(gradients_of(self))
        return {}
