"""What rank adaptation does between `backward()` and the optimizer's step: it scales and adds to gradients."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.rank.objective import EarlyStage, LateStage, Scales, Shrink, early_scales, late_scales
from comera.rank.size import SizeTable
from comera.rank.state import RankState

HookArgs = tuple[tuple[Any, ...], dict[str, Any]]
Gradients = Mapping[Tensor, Tensor]
"""Parameter -> its gradient, of those that have one in the present step."""


class StepRule:
    """What a step does to gradients, as values: g ← c_L g, plus c_S ∂Ŝ/∂d for gates and 2β G for cores.

    An optimizer with the method `take_rule` applies it as it reads them, and updates the importances of `measured` in
    the same pass (`comera.optim.AdamW`). For any other, `adjust_` writes it into the gradients.

    slopes: gates, and what is added to the gradient of each. ridge: β; 0: nothing is added to those of cores. measured:
        gates whose importance the step updates. grad_scale: what gradients are multiplied by where an optimizer divides
        by it again, in its own kernel (a fused one under a GradScaler): what is added matches.
    applied: set by an optimizer that has applied all of it, importances included. withdrawn: set by its maker,
        when its step was refused before it could be applied: it is not one for the next step.
    """

    def __init__(
        self,
        c_loss: float | Tensor,
        slopes: list[tuple[Tensor, Tensor]],
        cores: Sequence[Tensor],
        ridge: float,
        measured: Sequence[Tensor] = (),
        grad_scale: Tensor | None = None,
    ) -> None:
        self.c_loss, self.slopes, self.cores, self.ridge = c_loss, slopes, cores, ridge
        self.measured, self.grad_scale = measured, grad_scale
        self.applied = self.withdrawn = False

    def give_to(self, optimizer: Optimizer) -> None:
        """Have it applied in the step of `optimizer` that has begun and has its gradients."""
        take_rule: Callable[[StepRule], bool] = getattr(optimizer, "take_rule", lambda _: False)
        if not take_rule(self):
            self.adjust_(gradients_of(optimizer))

    def adjust_(self, gradients: Gradients) -> None:
        """Apply it to gradients, in place; parameters without one are left alone. Does not synchronize."""
        pairs = [(gradients[d], slope) for d, slope in self.slopes if d in gradients]
        decayed = [core for core in self.cores if core in gradients] if self.ridge else []
        with torch.no_grad():
            if gradients and not _is(self.c_loss, 1):
                # of a gradient that `fully_shard` has spread over processes, the part that this one holds
                local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients.values()]
                torch._foreach_mul_(local, self.c_loss)
            if pairs:
                torch._foreach_add_([gradient for gradient, _ in pairs], [slope for _, slope in pairs])
            if decayed:
                scaled = decayed if self.grad_scale is None else torch._foreach_mul(decayed, self.grad_scale)
                torch._foreach_add_([gradients[core] for core in decayed], scaled, alpha=2 * self.ridge)


class GivenRules:
    """The rules of steps that have begun, by optimizer."""

    def __init__(self) -> None:
        self._rules: dict[Optimizer, StepRule] = {}

    def begin(self, make: Callable[[Any], StepRule], args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookArgs | None:
        """Before a step: give its optimizer, the first of `args`, the rule that `make` makes of its `grad_scale`."""
        optimizer = args[0]

        def give() -> None:
            self.withdraw(optimizer)
            self._rules[optimizer] = rule = make(getattr(optimizer, "grad_scale", None))
            rule.give_to(optimizer)

        return run_before_step(give, args, kwargs)

    def end(self, optimizer: Optimizer, measured: bool) -> Gradients:
        """After a step: the gradients that are still to be measured."""
        rule = self._rules.pop(optimizer, None)
        return gradients_of(optimizer) if measured and (rule is None or not rule.applied) else {}

    def withdraw(self, optimizer: Optimizer) -> None:
        """Take back the rule of a step that was refused after it was given."""
        if (rule := self._rules.pop(optimizer, None)) is not None:
            rule.withdrawn = True


def step_rule(
    scales: Scales,
    tables: Sequence[SizeTable],
    shrink: Shrink,
    cores: Sequence[Tensor],
    ridge: float,
    measured: Sequence[Tensor] = (),
    grad_scale: Tensor | None = None,
) -> StepRule:
    """The rule of a step from (c_L, c_S), the tables of all gates and the way in which their size falls."""
    c_loss, c_size = scales
    if grad_scale is not None:
        c_size = c_size * grad_scale
    slopes: list[tuple[Tensor, Tensor]] = []
    if not _is(c_size, 0):
        gradient = gate_mean_gradient if shrink == "gate_mean" else surrogate_gradient
        for table, each in zip(tables, gradient(tables, c_size), strict=True):
            slopes += zip(table.rank_params, each, strict=True)
    return StepRule(c_loss, slopes, cores, ridge, measured, grad_scale)


def stage_scales(
    early: EarlyStage, late: LateStage, state: RankState, loss: Tensor | None, tables: Sequence[SizeTable]
) -> Scales:
    """(c_L, c_S) of the present stage. loss: the mean of the last ones; not needed early and by sensitivity."""
    if state.target_size is None:
        assert state.surrogate_0 is not None
        return early_scales(early, 1.0 if late.shrink == "gate_mean" else state.surrogate_0)
    if late.shrink == "sensitivity":
        return 1.0, 0.0
    assert loss is not None
    assert state.target_loss is not None
    device = loss.device
    surrogates = None if late.shrink == "gate_mean" else [table.surrogate().detach().to(device) for table in tables]
    return late_scales(
        late,
        loss=loss,
        target_loss=state.target_loss,
        size=torch.stack([table.size().to(device) for table in tables]).sum(),
        target_size=state.target_size,
        surrogate=None if surrogates is None else torch.stack(surrogates).sum(),
    )


def surrogate_gradient(tables: Sequence[SizeTable], scale: float | Tensor) -> list[list[Tensor]]:
    """scale · ∂Ŝ/∂d."""
    return [table.surrogate_grads(scale) for table in tables]


def gate_mean_gradient(tables: Sequence[SizeTable], scale: float | Tensor) -> list[list[Tensor]]:
    """scale times the gradient of the mean of all unpruned gates."""
    counts = [table.unpruned_gates() for table in tables]
    share = scale / torch.stack([count.to(counts[0].device) for count in counts]).sum().clamp_min(1)
    return [table.gate_grads(share.to(table.rank_params[0].device)) for table in tables]


def _is(scale: float | Tensor, value: float) -> bool:
    """Whether a scale is known on the host to be this value."""
    return not isinstance(scale, Tensor) and scale == value


def gradients_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The gradients that the parameters of an optimizer have now."""
    return {p: p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}


def run_before_step(action: Callable[[], None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookArgs | None:
    """Run `action` once the gradients of a step exist: now or, if the step has a closure, right after the closure.

    args, kwargs: those of a step pre-hook, the optimizer first. Returns what the hook returns: arguments to replace
    them, or None.
    """
    positional = len(args) > 1
    closure = args[1] if positional else kwargs.get("closure")
    if closure is None:
        action()
        return None

    def wrapped() -> Any:
        loss = closure()
        action()
        return loss

    return ((args[0], wrapped, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": wrapped})
