"""RankController: rank adaptation as a hook between `backward()` and `optimizer.step()`.

The loss function, the model and the training loop stay as they are; each step follows the one rule of both stages
(objective.py)::

    parameter.grad ← c_L · parameter.grad            every parameter of the optimizer
    d.grad         ← d.grad + c_S · ∂Ŝ/∂d            rank parameters
    G.grad         ← G.grad + 2β G                   cores, the ridge

Only gradients that this step has made are changed: a parameter without one (frozen, or of a layer that the step did not
use) is left alone by the optimizer, and by the size and the ridge with it, as weight decay leaves it alone too.
The hook comes after clipping and after a GradScaler's unscaling, so the size gradient is neither clipped nor scaled;
inactive entries and slices then have exactly zero gradient from the loss (masking) and from the size, and a clipped
norm is the same before and after pruning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from comera.errors import RankError
from comera.nn.bonds import named_trains
from comera.rank.objective import EarlyStage, Scales, early_scales
from comera.rank.prune import PruneReport, prune_, unwrap
from comera.rank.size import SizeTable, size_tables

_EARLY = EarlyStage()


class RankController:
    """Adapts the ranks of a model's chains while any optimizer trains it.

    model: with at least one compressed layer; the chains are those that it has now.
    early: weights of the early stage.
    Raises RankError for a model without compressed layers.
    """

    def __init__(self, model: nn.Module, early: EarlyStage = _EARLY) -> None:
        self.model = model
        self.early = early
        self._trains = [train for _, train in named_trains(model)]
        self._cores = [core for train in self._trains for core in train.cores]
        if not self._trains:
            raise RankError(
                f"expected a model with compressed layers, got {type(model).__name__} without any: "
                "call comera.tensorize_(model) first"
            )
        self._tables: list[SizeTable] = []
        self._hooks: dict[Optimizer, RemovableHandle] = {}
        self._surrogate_0: float | None = None
        self._loss: Tensor | None = None

    def attach(self, optimizer: Optimizer) -> RankController:
        """Adapt at each step of `optimizer`, for the parameters that it holds; returns self.

        Several optimizers may be attached. The first one fixes Ŝ_0, the size that γ is relative to, unless
        `load_state_dict` has brought it. Raises RankError for an optimizer that is attached already or that holds no
        parameter of the chains.
        """
        optimizer = unwrap(optimizer)
        if optimizer in self._hooks:
            raise RankError(f"this {type(optimizer).__name__} is attached already: attach each optimizer once")
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if {p for train in self._trains for p in train.parameters()}.isdisjoint(held):
            raise RankError(
                f"this {type(optimizer).__name__} holds {len(held)} parameters, none of them a core or rank parameter "
                "of the model: make it after tensorize_, from comera.param_groups(model, ...)"
            )
        if self._surrogate_0 is None:
            self._surrogate_0 = sum(float(table.surrogate().detach()) for table in self._current_tables())
        self._hooks[optimizer] = optimizer.register_step_pre_hook(self._before_step)
        return self

    def detach(self) -> None:
        """Let go of all optimizers; they step without rank adaptation from now on."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def observe(self, loss: Tensor) -> None:
        """Keep the step's loss, a scalar: detached, on its device, for stages that weigh it. Call before the step."""
        if loss.numel() != 1:
            raise RankError(f"expected the loss as a scalar, got shape {tuple(loss.shape)}: reduce it first")
        self._loss = loss.detach()

    def prune_(self) -> PruneReport:
        """Cut the inactive slices out of the model and the attached optimizers: see `comera.rank.prune.prune_`."""
        return prune_(self.model, list(self._hooks))

    def state_dict(self) -> dict[str, float]:
        """What a resumed run needs to go on exactly: Ŝ_0, once an optimizer was attached."""
        return {} if self._surrogate_0 is None else {"surrogate_0": self._surrogate_0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`, before or after attaching. Raises RankError when it is foreign."""
        surrogate_0 = state.get("surrogate_0")
        if set(state) - {"surrogate_0"} or not isinstance(surrogate_0, float | int | None):
            raise RankError(f"expected the state of a RankController, {{'surrogate_0': number}}, got {state}")
        self._surrogate_0 = surrogate_0

    def _current_tables(self) -> list[SizeTable]:
        """The size tables of all chains, made anew when a rank, dtype or device has changed."""
        if not self._tables or not all(table.fits() for table in self._tables):
            self._tables = size_tables(self._trains)
        return self._tables

    def _scales(self) -> Scales:
        """(c_L, c_S) of the present stage."""
        assert self._surrogate_0 is not None
        return early_scales(self.early, self._surrogate_0)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook; `args` starts with the optimizer. A closure makes its gradients later: adjust them right after."""
        positional = len(args) > 1
        closure = args[1] if positional else kwargs.get("closure")
        if closure is None:
            self._adjust(optimizer)
            return None

        def adjusted() -> Any:
            loss = closure()
            self._adjust(optimizer)
            return loss

        return ((args[0], adjusted, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": adjusted})

    @torch.no_grad()
    def _adjust(self, optimizer: Optimizer) -> None:
        """Apply the rule to the gradients of `optimizer`'s parameters; waits for nothing."""
        held = {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        c_loss, c_size = self._scales()
        # Fused optimizers under a GradScaler unscale inside their kernel: meet them at the scale of their gradients.
        amp = getattr(optimizer, "grad_scale", None)
        if amp is not None:
            c_size = c_size * amp

        if held and not (isinstance(c_loss, float) and c_loss == 1):
            torch._foreach_mul_([p.grad for p in held], c_loss)
        for table in self._current_tables():
            grads = zip(table.rank_params, table.surrogate_grads(c_size), strict=True)
            pairs = [(d.grad, grad) for d, grad in grads if d in held]
            if pairs:
                torch._foreach_add_([grad for grad, _ in pairs], [grad for _, grad in pairs])
        cores = [core for core in self._cores if core in held] if self.early.ridge else []
        if cores:
            scaled = cores if amp is None else torch._foreach_mul(cores, amp)
            torch._foreach_add_([core.grad for core in cores], scaled, alpha=2 * self.early.ridge)
