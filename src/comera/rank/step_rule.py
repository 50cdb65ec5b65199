"""What rank adaptation does between `backward()` and the optimizer's step: it scales and adds to gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.rank.objective import Scales, Shrink
from comera.rank.size import SizeTable

HookArgs = tuple[tuple[Any, ...], dict[str, Any]]
SizeGradient = Callable[[Sequence[SizeTable], float | Tensor], list[list[Tensor]]]
"""From size tables and c_S to c_S times the gradient of the size by each of their gates."""


@torch.no_grad()
def adjust_gradients_(
    optimizer: Optimizer,
    scales: Scales,
    tables: Sequence[SizeTable],
    size_gradient: SizeGradient,
    cores: Iterable[Tensor],
    ridge: float,
) -> None:
    """Apply the rule of the controller to the gradients of `optimizer`'s parameters; does not synchronize."""
    held = parameters_of(optimizer, with_gradient=True)
    c_loss, c_size = scales
    # Fused optimizers under a GradScaler unscale inside their kernel, so match the scale of their gradients.
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is not None:
        c_size = c_size * grad_scale

    if held and not (isinstance(c_loss, float) and c_loss == 1):
        torch._foreach_mul_([_local(p.grad) for p in held], c_loss)
    for table, gradients in zip(tables, size_gradient(tables, c_size), strict=True):
        pairs = [(d.grad, grad) for d, grad in zip(table.rank_params, gradients, strict=True) if d in held]
        if pairs:
            torch._foreach_add_([grad for grad, _ in pairs], [grad for _, grad in pairs])
    decayed = [core for core in cores if core in held] if ridge else []
    if decayed:
        scaled = decayed if grad_scale is None else torch._foreach_mul(decayed, grad_scale)
        torch._foreach_add_([core.grad for core in decayed if core.grad is not None], scaled, alpha=2 * ridge)


def surrogate_gradient(tables: Sequence[SizeTable], scale: float | Tensor) -> list[list[Tensor]]:
    """scale · ∂Ŝ/∂d."""
    return [table.surrogate_grads(scale) for table in tables]


def gate_mean_gradient(tables: Sequence[SizeTable], scale: float | Tensor) -> list[list[Tensor]]:
    """scale times the gradient of the mean of all unpruned gates."""
    counts = [table.unpruned_gates() for table in tables]
    share = scale / torch.stack([count.to(counts[0].device) for count in counts]).sum().clamp_min(1)
    return [table.gate_grads(share.to(table.rank_params[0].device)) for table in tables]


SIZE_GRADIENTS: dict[Shrink, SizeGradient] = {
    "sensitivity": surrogate_gradient,  # in the early stage
    "surrogate": surrogate_gradient,
    "gate_mean": gate_mean_gradient,
}


def _local(grad: Any) -> Tensor:
    """The part of a gradient that this process holds: all of it, unless `fully_shard` has spread it over processes."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local


def parameters_of(optimizer: Optimizer, *, with_gradient: bool = False) -> set[Any]:
    """The parameters of all groups, or those of them that have a gradient."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    return {p for p in held if p.grad is not None} if with_gradient else held


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
