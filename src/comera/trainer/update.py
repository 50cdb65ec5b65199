"""The two ways from a loss to updated parameters: through `.grad` and the optimizer, or by values, for a compiler.

torch.compile traces gradients that a function takes with `torch.autograd.grad` and hands on, but neither those that it
leaves in `.grad` nor the step of an optimizer, which breaks the graph on purpose. So a traced step passes gradients as
values to the rank rule, and to torch's AdamW as a function of parameters, gradients and state.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from comera.fusion.merge_cache import MergeCache, accumulating, tracing
from comera.optim.adamw import AdamW
from comera.rank.controller import RankController
from comera.rank.step_rule import Gradients, gradients_of
from comera.trainer.compiled import traces_gradients

MICRO_BATCHES = 8  # the most that are compiled as one function: it holds the code of each


class Update(Protocol):
    """How the gradients of a step come, and how they are applied."""

    def micro_batches(self, count: int) -> AbstractContextManager[object]:
        """A context for the micro-batches of a step, backwards included."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a loss to those of the step."""

    def gradients(self) -> dict[Tensor, Tensor]:
        """The sums so far, of the parameters that have any; writes to them count."""

    def step(self, gradients: Gradients) -> None:
        """The rank rule, then the optimizer."""


class ByOptimizer:
    """Gradients accumulate in `.grad`; the optimizer's step applies them, and the rank rule is a hook of it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def micro_batches(self, count: int) -> AbstractContextManager[object]:
        """Cores are merged once for all of them."""
        return accumulating(self._model) if count > 1 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Into `.grad`."""
        loss.backward()

    def gradients(self) -> dict[Tensor, Tensor]:
        """Those in `.grad`; duplicate rows of sparse ones are summed, as norms and optimizers require."""
        gradients = gradients_of(self._optimizer)
        for p, gradient in gradients.items():
            if gradient.is_sparse:
                p.grad = gradients[p] = gradient.coalesce()
        return gradients

    def step(self, gradients: Gradients) -> None:
        """The optimizer's step, with its hooks."""
        self._optimizer.step()
        increment_version(list(gradients))  # torch's fused optimizers do not


class AdamWState(NamedTuple):
    """What AdamW keeps of a parameter."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


class AdamWGroup(NamedTuple):
    """A parameter group of AdamW: its trainable parameters, their states (None before the first gradient), options."""

    params: list[Tensor]
    states: list[AdamWState | None]
    options: dict[str, Any]


class ByValue:
    """Gradients are values, which the rank rule and torch's functional AdamW take. For tracing: keeps no state."""

    def __init__(
        self,
        groups: Sequence[AdamWGroup],
        rates: Tensor,
        controller: RankController | None,
        caches: Sequence[MergeCache],
    ) -> None:
        self._groups, self._rates, self._controller, self._caches = groups, rates, controller, caches
        self._params = list(chain.from_iterable(group.params for group in groups))
        self._gradients: dict[Tensor, Tensor] = {}

    def micro_batches(self, count: int) -> AbstractContextManager[object]:
        """The compiler sees that they merge the same cores."""
        return tracing(self._caches)

    def backward(self, loss: Tensor) -> None:
        """Take the gradients of a loss."""
        for p, gradient in zip(self._params, torch.autograd.grad(loss, self._params, allow_unused=True), strict=True):
            if gradient is None:
                continue
            before = self._gradients.get(p)
            # a copy, since autograd may return one tensor for two parameters
            self._gradients[p] = gradient.clone() if before is None else before + gradient

    def gradients(self) -> dict[Tensor, Tensor]:
        """The sums so far."""
        return self._gradients

    @property
    def lacks_state(self) -> bool:
        """Whether there is a gradient of a parameter that has had none before."""
        states = chain.from_iterable(group.states for group in self._groups)
        return any(s is None and p in self._gradients for p, s in zip(self._params, states, strict=True))

    def step(self, gradients: Gradients) -> None:
        """The rank rule, then AdamW in every group."""
        with torch.no_grad():
            if self._controller is not None:
                self._controller.adjust_(gradients)
            for group, rate in zip(self._groups, self._rates.unbind(), strict=True):
                _step_group(group, rate, gradients)


def _step_group(group: AdamWGroup, rate: Tensor, gradients: Gradients) -> None:
    pairs = [(p, s) for p, s in zip(group.params, group.states, strict=True) if s is not None and p in gradients]
    if not pairs:
        return
    params, states = [p for p, _ in pairs], [s for _, s in pairs]
    adamw(
        params,
        [gradients[p] for p in params],
        [s.exp_avg for s in states],
        [s.exp_avg_sq for s in states],
        [],
        # float32 would lose half of the digits of 1 - beta ** step in the first steps
        [s.step.to(torch.float64) for s in states],
        foreach=True,
        capturable=True,  # counts and rates are tensors: others would be constants of the compiled code
        lr=rate,
        amsgrad=False,
        maximize=False,
        **group.options,
    )
    torch._foreach_add_([s.step for s in states], 1)


def adamw_groups(optimizer: Optimizer) -> list[AdamWGroup]:
    """What `ByValue` reads and writes of an AdamW optimizer. Counts of steps move to their parameters' devices."""
    groups = []
    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.requires_grad]
        beta1, beta2 = group["betas"]
        options = {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        groups.append(AdamWGroup(params, [_state_of(p, optimizer) for p in params], options))
    return groups


def lacking(groups: Sequence[AdamWGroup]) -> set[Tensor]:
    """The parameters of which AdamW keeps nothing yet."""
    return {p for group in groups for p, state in zip(group.params, group.states, strict=True) if state is None}


def _state_of(p: Tensor, optimizer: Optimizer) -> AdamWState | None:
    state = optimizer.state.get(p)
    if not state:
        return None
    if state["step"].device != p.device:
        state["step"] = state["step"].to(p.device)
    return AdamWState(state["exp_avg"], state["exp_avg_sq"], state["step"])


def rates_of(optimizer: Optimizer, device: torch.device) -> Tensor:
    """The learning rates of all groups as one tensor (groups,), float64 as numbers of Python are."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if any(isinstance(rate, Tensor) for rate in rates):
        return torch.stack([torch.as_tensor(rate, dtype=torch.float64, device=device) for rate in rates])
    return torch.tensor(rates, dtype=torch.float64).to(device, non_blocking=True)


def untraced_reason(optimizer: Optimizer, controller: RankController | None, micro_batches: int) -> str:
    """Why `ByValue` cannot take a step in the place of `optimizer`; "" if it can."""
    if not traces_gradients():
        return "this torch does not compile functions that take gradients"
    if micro_batches > MICRO_BATCHES:
        return f"a step of more than {MICRO_BATCHES} micro-batches is too long for one function"
    kind = type(optimizer)
    if kind not in (torch.optim.AdamW, AdamW):
        return f"the step of {kind.__name__} is not compiled, only that of AdamW"
    for option in ("amsgrad", "maximize", "differentiable"):
        if any(group[option] for group in optimizer.param_groups):
            return f"AdamW with {option} is not compiled"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "the gradients are scaled"
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if not all(getattr(hook, "__self__", None) is controller is not None for hook in hooks):
        return "the optimizer's step has hooks of others"
    if controller is not None and not hooks:
        return "the controller is not attached to the optimizer"
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len({p.device for p in params}) > 1:
        return "the parameters are on several devices"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params):
        return "gradients have hooks"
    return ""
