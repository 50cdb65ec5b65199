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

What a step decides on the host (counting, beginning the late stage, switching slices off) stands in `advance` and
`between_steps`; all the rest is work for the device alone, so that a CUDA graph can hold it. `replayed` says who calls
the two: the hooks, or whoever replays the step (`comera.trainer.step`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from comera.errors import RankError
from comera.nn.tensor_train import named_trains
from comera.rank.budget import RoundReport, canonicalize_, round_
from comera.rank.objective import EarlyStage, LateStage, Scales, early_scales, late_budget, late_scales
from comera.rank.prune import PruneReport, prune_, unwrap
from comera.rank.sensitivity import accumulate_, switch_off_
from comera.rank.size import SizeTable, size_tables, unpruned_ranks, unpruned_size
from comera.rank.target import resolve_target, smallest_size

_EARLY, _LATE = EarlyStage(), LateStage()
_CUT_EVERY = 20  # steps between cuts: about as many as the sensitivities look back
_HORIZON = 100  # steps over which the loss that the stages weigh is averaged: one batch says little


@dataclass
class _State:
    """What a controller remembers from step to step, as numbers.

    surrogate_0: Ŝ when adaptation began; target_size, target_loss: S0 and L0, None in the early stage; switch_size,
    switch_step: size and steps when the late stage began; steps, epochs: counted; best_held_out, evaluations_since:
    for the plateau; loss: mean of the last ones, when it was saved.
    """

    surrogate_0: float | None = None
    target_size: int | None = None
    target_loss: float | None = None
    switch_size: int = 0
    switch_step: int = 0
    steps: int = 0
    epochs: int = 0
    best_held_out: float | None = None
    evaluations_since: int = 0
    loss: float | None = None


class RankController:
    """Adapts the ranks of a model's chains while any optimizer trains it.

    model: with at least one compressed layer; the chains are those that it has now.
    early, late: the two stages; without a target in `late` the early one goes on to the end.
    multiple: cuts leave ranks at multiples of it (8 or 16 suit tensor cores) where they can.
    replayed, an attribute: set it where steps are captured and replayed; then call `advance` before each step and
    `between_steps` after it, and capture anew when `phase` changes.
    Raises RankError for a model without compressed layers.
    """

    def __init__(
        self, model: nn.Module, early: EarlyStage = _EARLY, late: LateStage = _LATE, *, multiple: int = 1
    ) -> None:
        self.model = model
        self.early = early
        self.late = late
        self.multiple = multiple
        self._trains = [train for _, train in named_trains(model)]
        self._cores = [core for train in self._trains for core in train.cores]
        if not self._trains:
            raise RankError(
                f"expected a model with compressed layers, got {type(model).__name__} without any: "
                "call comera.tensorize_(model) first"
            )
        self._tables: list[SizeTable] = []
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        self._state = _State()
        self._loss: Tensor | None = None  # mean of the last losses, on their device
        self._window: Tensor | None = None  # steps in that mean, beside it
        self.replayed = False

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
        if self._state.surrogate_0 is None:
            self._state.surrogate_0 = sum(float(table.surrogate().detach()) for table in self._current_tables())
        self._hooks[optimizer] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def detach(self) -> None:
        """Let go of all optimizers; they step without rank adaptation from now on."""
        for hook in [hook for hooks in self._hooks.values() for hook in hooks]:
            hook.remove()
        self._hooks.clear()

    @property
    def stage(self) -> Literal["early", "late"]:
        """The stage that the next step belongs to."""
        return "early" if self._state.target_size is None else "late"

    @property
    def target_size(self) -> int | None:
        """S0 in numbers stored; None in the early stage."""
        return self._state.target_size

    @property
    def target_loss(self) -> float | None:
        """L0; None in the early stage."""
        return self._state.target_loss

    def observe(self, loss: Tensor) -> None:
        """Take note of a step's loss, a scalar, before the step; waits for nothing. Counts the steps.

        Raises RankError when it is no scalar.
        """
        if loss.numel() != 1:
            raise RankError(f"expected the loss as a scalar, got shape {tuple(loss.shape)}: reduce it first")
        if not self.replayed:
            self.advance()
        value = loss.detach().reshape(()).float()
        if self._loss is None or self._window is None:
            known = self._state.loss
            self._loss = torch.zeros_like(value) if known is None else torch.full_like(value, known)
            self._window = torch.full_like(value, self._steps_averaged())
        self._loss += (value - self._loss) / self._window  # in place: a graph knows tensors by their memory

    def advance(self) -> None:
        """Count a step that begins; the host's part of `observe`. Waits for nothing."""
        self._state.steps += 1
        if self._window is not None:
            self._window.fill_(self._steps_averaged())

    def between_steps(self) -> None:
        """After a step: begin the late stage when it is time; by sensitivity, now and then switch slices off."""
        state, late = self._state, self.late
        measured = self._by_sensitivity()  # in this step, not one that begins the stage
        self._begin_if(late.start_step is not None and state.steps >= late.start_step)
        passed = state.steps - state.switch_step
        if measured and passed and passed % _CUT_EVERY == 0:
            self._cut(passed)

    @property
    def phase(self) -> Hashable:
        """What steps take from the host besides the parameters: a captured step holds while this stays equal."""
        state = self._state
        memory = [None if t is None else t.data_ptr() for t in (self._loss, self._window)]
        return state.surrogate_0, state.target_size, state.target_loss, *memory

    def epoch_ended(self) -> None:
        """Count an epoch, for `LateStage.start_epoch`."""
        self._state.epochs += 1
        self._begin_if(self.late.start_epoch is not None and self._state.epochs >= self.late.start_epoch)

    def evaluated(self, held_out_loss: float) -> None:
        """Take note of a held-out loss, for `LateStage.plateau`."""
        state = self._state
        if state.best_held_out is None or held_out_loss < state.best_held_out:
            state.best_held_out, state.evaluations_since = held_out_loss, 0
        else:
            state.evaluations_since += 1
        self._begin_if(self.late.plateau is not None and state.evaluations_since >= self.late.plateau)

    def start_late(self) -> None:
        """Begin the late stage now, between two steps: fix S0 from the present size and L0 from the last losses.

        By sensitivity, the chains are brought into canonical form, and their moments start afresh.
        Raises RankError without a target, in the late stage, before any step was observed (a late stage follows an
        early one), and for a target above the present size or below the smallest possible.
        """
        if self.late.target_size is None:
            raise RankError("expected a target for the late stage, got none: set LateStage(target_size=0.2)")
        if self.stage == "late":
            raise RankError(f"the late stage has begun already, with S0 = {self.target_size:,} numbers")
        if not self._state.steps:
            raise RankError(
                "expected an early stage before the late one, but no loss was observed yet: "
                "call observe(loss) in each step, and start_late() after the early stage"
            )
        size = self.size()
        numbers = [p for train in self._trains for p in train.parameters()]
        stored = sum(p.numel() for p in numbers)
        self._state.target_size = resolve_target(
            self.late.target_size,
            size=size,
            smallest=smallest_size(self.model, multiple=self.multiple),
            bytes_per_number=sum(p.numel() * p.element_size() for p in numbers) / max(1, stored),
            where="LateStage.target_size",
        )
        given = self.late.target_loss
        self._state.target_loss = self._mean_loss() if given is None else given
        self._state.switch_size, self._state.switch_step = size, self._state.steps
        if self.late.shrink == "sensitivity":
            canonicalize_(self._trains, list(self._hooks))

    def size(self) -> int:
        """S now: numbers of active slices and active rank parameters, those that pruning would leave. Waits."""
        return sum(unpruned_size(train) + sum(unpruned_ranks(train)) for train in self._trains)

    def prune_(self) -> PruneReport:
        """Cut the inactive slices out of the model and the attached optimizers: see `comera.rank.prune.prune_`."""
        return prune_(self.model, list(self._hooks), multiple=self.multiple)

    def meet_target_(self) -> RoundReport | None:
        """Prune, and round to S0 where that was not enough (`comera.rank.budget.round_`).

        Returns None in the early stage, and where pruning was enough.
        """
        if self._state.target_size is None:
            return None
        if self.prune_().after <= self._state.target_size:
            return None
        return round_(self.model, self._state.target_size, optimizers=list(self._hooks), multiple=self.multiple)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on exactly, JSON-ready: Ŝ_0, the stage and its targets, counts, mean loss."""
        return {**asdict(self._state), "loss": self._mean_loss()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a `state_dict`, before or after attaching. Raises RankError when it is foreign."""
        known = {field.name for field in fields(_State)}
        if set(state) != known or not all(isinstance(value, float | int | None) for value in state.values()):
            raise RankError(f"expected the state of a RankController, numbers for {sorted(known)}, got {state}")
        self._state, self._loss, self._window = _State(**state), None, None

    def _steps_averaged(self) -> int:
        return min(self._state.steps, _HORIZON)

    def _by_sensitivity(self) -> bool:
        """Whether this is a late stage that measures slices."""
        return self._state.target_size is not None and self.late.shrink == "sensitivity"

    def _mean_loss(self) -> float | None:
        return self._state.loss if self._loss is None else float(self._loss)

    def _begin_if(self, due: bool) -> None:
        if due and self.stage == "early" and self.late.target_size is not None:
            self.start_late()

    def _current_tables(self) -> list[SizeTable]:
        """The size tables of all chains, made anew when a rank, dtype or device has changed."""
        if not self._tables or not all(table.fits() for table in self._tables):
            self._tables = size_tables(self._trains)
        return self._tables

    def _scales(self) -> Scales:
        """(c_L, c_S) of the present stage."""
        state, tables = self._state, self._current_tables()
        assert state.surrogate_0 is not None
        if state.target_size is None:
            return early_scales(self.early, state.surrogate_0)
        if self._by_sensitivity():
            return 1.0, 0.0
        assert self._loss is not None
        assert state.target_loss is not None
        device = self._loss.device
        return late_scales(
            self.late,
            loss=self._loss,
            target_loss=state.target_loss,
            size=torch.stack([table.size().to(device) for table in tables]).sum(),
            target_size=state.target_size,
            surrogate=torch.stack([table.surrogate().detach().to(device) for table in tables]).sum(),
        )

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

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """By sensitivity, measure; the last optimizer to be attached ends the step."""
        if self._by_sensitivity():
            held = {p for group in optimizer.param_groups for p in group["params"]}
            accumulate_(optimizer, [d for train in self._trains for d in train.rank_params if d in held])
        if not self.replayed and optimizer is next(reversed(self._hooks)):
            self.between_steps()

    def _cut(self, passed: int) -> None:
        """Switch off what is above the budget of this moment, `passed` steps into the late stage."""
        state, size = self._state, self.size()
        assert state.target_size is not None
        if size <= state.target_size or (self.late.target_loss is not None and self._loss_behind(size)):
            return
        steps = state.switch_step // 2 if self.late.steps is None else self.late.steps
        budget = late_budget(state.switch_size, state.target_size, passed / steps if steps else 1.0)
        if size > budget:
            switch_off_(self._trains, list(self._hooks), budget, multiple=self.multiple)

    def _loss_behind(self, size: int) -> bool:
        """Whether the loss is relatively further from its target than the size from its own. Waits for the device."""
        state, loss = self._state, self._mean_loss()
        assert loss is not None
        assert state.target_loss is not None
        assert state.target_size is not None
        return (loss - state.target_loss) * size >= (size - state.target_size) * abs(loss)
