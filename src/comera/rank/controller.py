"""RankController: rank adaptation as a hook between `backward()` and `optimizer.step()`.

Loss function, model and training loop stay as they are; in both stages, each step follows one rule (objective.py)::

    parameter.grad ← c_L · parameter.grad            every parameter of the optimizer
    d.grad         ← d.grad + c_S · ∂Ŝ/∂d            gates
    G.grad         ← G.grad + 2β G                   cores, the ridge

Only gradients of the present step are changed: a parameter without one (frozen, or in a layer that the step did not
use) is left alone by the size and the ridge, as it is by the optimizer and its weight decay. The hook runs after
clipping and after a GradScaler's unscaling, so the size gradient is neither clipped nor scaled. Pruned gates and their
slices get exactly zero gradient from both loss (masking) and size, so a clipped norm is the same before and after
pruning.

What a step decides on the host (counting, starting the late stage, zeroing gates) is in `advance` and `between_steps`.
The rest is work for the device alone, so that a CUDA graph can capture it. `replayed` says who calls the two: the
hooks, or whoever replays the step (`comera.trainer.step`).
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
from comera.rank.budget import canonicalize_, round_
from comera.rank.importance import update_importance_, zero_gates_
from comera.rank.objective import EarlyStage, LateStage, Scales, early_scales, late_budget, late_scales
from comera.rank.optimizer_state import unwrap
from comera.rank.prune import prune_
from comera.rank.report import RankReport
from comera.rank.size import SizeTable, size_tables, unpruned_ranks, unpruned_size
from comera.rank.step_rule import HookArgs, adjust_gradients_, parameters_of, run_before_step
from comera.rank.target import target_of

_EARLY, _LATE = EarlyStage(), LateStage()
_ZERO_EVERY = 20  # steps between two rounds of zeroing gates: about as far as the importances look back
_HORIZON = 100  # steps over which the loss that the stages weigh is averaged: a single batch says little


@dataclass
class _State:
    """What a controller remembers from step to step; its fields are the keys of `state_dict`."""

    surrogate_0: float | None = None  # Ŝ when adaptation began
    target_size: int | None = None  # S0; None in the early stage
    target_loss: float | None = None  # L0; None in the early stage
    switch_size: int = 0  # when the late stage started
    switch_step: int = 0
    steps: int = 0
    epochs: int = 0
    best_held_out: float | None = None  # for LateStage.plateau
    evaluations_since: int = 0  # that best one
    loss: float | None = None  # mean of the last losses, as of saving


class RankController:
    """Adapts the ranks of a model's tensor trains while any optimizer trains it.

    In the early stage, the size of the model is a small term beside the loss. The late stage brings the size down to a
    target: it zeroes the gates of least importance along a falling budget (or, as published, lets the optimizer shrink
    all of them). `prune_` turns zeroed gates into smaller tensors whenever you like, and `meet_target_` guarantees the
    target at the end.

    Args:
        model: has at least one compressed layer; the controller adapts the tensor trains that it holds now.
        early, late: the two stages. Without `late.target_size`, the early stage goes on to the end.
        multiple: keep ranks at multiples of it (8 or 16 suit tensor cores) where possible.

    Attributes:
        replayed: set it if steps are captured and replayed (CUDA graphs). Then call `advance` before and
            `between_steps` after each step, and capture again when `phase` changes.

    Raises:
        RankError: a model without compressed layers, or one whose compressed layers are sharded over processes.

    Example:
        >>> import torch, comera
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16))
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
        >>> optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
        >>> late = comera.LateStage(target_size=0.5, start_step=20)
        >>> ranks = comera.RankController(model, late=late).attach(optimizer)
        >>> inputs, labels = torch.randn(32, 64), torch.randint(16, (32,))
        >>> for step in range(60):
        ...     loss = nn.functional.cross_entropy(model(inputs), labels)
        ...     loss.backward()
        ...     ranks.observe(loss)
        ...     optimizer.step()  # adapts the ranks
        ...     optimizer.zero_grad()
        >>> ranks.stage
        'late'
        >>> _ = ranks.meet_target_()
        >>> comera.model_size(model).tensorized <= ranks.target_size
        True
    """

    def __init__(
        self, model: nn.Module, early: EarlyStage = _EARLY, late: LateStage = _LATE, *, multiple: int = 1
    ) -> None:
        self.model, self.early, self.late, self.multiple = model, early, late, multiple
        self.replayed = False
        self._trains = [train for _, train in named_trains(model)]
        self._cores = [core for train in self._trains for core in train.cores]
        if not self._trains:
            raise RankError(
                f"expected a model with compressed layers, got {type(model).__name__} without any: "
                "call comera.tensorize_(model) first"
            )
        if any(hasattr(core, "to_local") for core in self._cores):
            raise RankError(
                "expected tensor trains that are whole on every process, got some that fully_shard has spread: call "
                "comera.integrations.fsdp.replicate_ first, then fully_shard with what it returns as ignored_params"
            )
        self._tables: list[SizeTable] = []
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        self._state = _State()
        self._loss: Tensor | None = None  # mean of the last losses, on their device
        self._window: Tensor | None = None  # steps in that mean, on the same device

    def attach(self, optimizer: Optimizer) -> RankController:
        """Adapt at each step of `optimizer`, for the parameters that it holds; returns self.

        Several optimizers can be attached. The first fixes Ŝ_0, the size that γ is relative to, unless
        `load_state_dict` has restored it. Raises RankError for an optimizer that is already attached or that holds no
        parameter of the tensor trains.
        """
        optimizer = unwrap(optimizer)
        if optimizer in self._hooks:
            raise RankError(f"this {type(optimizer).__name__} is attached already: attach each optimizer once")
        held = parameters_of(optimizer)
        if held.isdisjoint(p for train in self._trains for p in train.parameters()):
            raise RankError(
                f"this {type(optimizer).__name__} holds {len(held)} parameters, none of them a core or rank parameter "
                "of the model: create it after tensorize_, from comera.param_groups(model, ...)"
            )
        if self._state.surrogate_0 is None:
            self._state.surrogate_0 = sum(float(table.surrogate().detach()) for table in self._current_tables())
        self._hooks[optimizer] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        return self

    def detach(self) -> None:
        """Release all optimizers; from now on they step without rank adaptation."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()

    @property
    def stage(self) -> Literal["early", "late"]:
        """The stage that the next step belongs to."""
        return "early" if self._state.target_size is None else "late"

    @property
    def target_size(self) -> int | None:
        """S0 in stored parameters; None in the early stage."""
        return self._state.target_size

    @property
    def target_loss(self) -> float | None:
        """L0; None in the early stage."""
        return self._state.target_loss

    def observe(self, loss: Tensor) -> None:
        """Record the loss of a step, a scalar, before the optimizer's step; counts the steps. Does not synchronize.

        Raises RankError for a loss that is not a scalar.
        """
        if loss.numel() != 1:
            raise RankError(f"expected the loss as a scalar, got shape {tuple(loss.shape)}: reduce it first")
        if not self.replayed:
            self.advance()
        value = loss.detach().reshape(()).float()
        if self._loss is None or self._window is None:
            saved = self._state.loss
            self._loss = torch.zeros_like(value) if saved is None else torch.full_like(value, saved)
            self._window = torch.full_like(value, self._steps_averaged())
        self._loss += (value - self._loss) / self._window  # in place: a CUDA graph knows tensors by their memory

    def advance(self) -> None:
        """Count a step that begins: the part of `observe` that runs on the host. Does not synchronize."""
        self._state.steps += 1
        if self._window is not None:
            self._window.fill_(self._steps_averaged())

    def between_steps(self) -> None:
        """After a step: start the late stage if it is due; by sensitivity, zero gates at intervals."""
        state = self._state
        measured = self._by_sensitivity()  # in this step; False if this step starts the stage
        self._start_late_if_due(steps=state.steps)
        passed = state.steps - state.switch_step
        if measured and passed and passed % _ZERO_EVERY == 0:
            self._zero_gates(passed)

    @property
    def phase(self) -> Hashable:
        """What a step reads from the host besides the parameters: a captured step is valid while this stays equal."""
        state = self._state
        memory = [None if t is None else t.data_ptr() for t in (self._loss, self._window)]
        return state.surrogate_0, state.target_size, state.target_loss, *memory

    def epoch_ended(self) -> None:
        """Count an epoch, for `LateStage.start_epoch`."""
        self._state.epochs += 1
        self._start_late_if_due(epochs=self._state.epochs)

    def evaluated(self, held_out_loss: float) -> None:
        """Record a held-out loss, for `LateStage.plateau`."""
        state = self._state
        if state.best_held_out is None or held_out_loss < state.best_held_out:
            state.best_held_out, state.evaluations_since = held_out_loss, 0
        else:
            state.evaluations_since += 1
        self._start_late_if_due(evaluations=state.evaluations_since)

    def start_late(self) -> None:
        """Start the late stage now, between two steps: fix S0 from the present size and L0 from the last losses.

        By sensitivity, the tensor trains are brought into canonical form and their optimizer state is reset.
        Raises RankError without a target, in the late stage, before any step was observed (a late stage follows an
        early one), and for a target above the present size or below the smallest possible.
        """
        if self.late.target_size is None:
            raise RankError("expected a target for the late stage, got none: set LateStage(target_size=0.2)")
        if self.stage == "late":
            raise RankError(f"the late stage has begun already, with S0 = {self.target_size:,} parameters")
        state, size = self._state, self.size()
        if not state.steps:
            raise RankError(
                "expected an early stage before the late one, but no loss was observed yet: "
                "call observe(loss) in each step, and start_late() after the early stage"
            )
        target, where = self.late.target_size, "LateStage.target_size"
        state.target_size = target_of(self.model, target, size=size, multiple=self.multiple, where=where)
        state.target_loss = self._mean_loss() if self.late.target_loss is None else self.late.target_loss
        state.switch_size, state.switch_step = size, state.steps
        if self.late.shrink == "sensitivity":
            canonicalize_(self._trains, list(self._hooks))

    def size(self) -> int:
        """Parameters that pruning would leave now: S plus the unpruned gates. Synchronizes."""
        return sum(unpruned_size(train) + sum(unpruned_ranks(train)) for train in self._trains)

    def prune_(self) -> RankReport:
        """Cut pruned slices out of the model and the attached optimizers: see `comera.rank.prune_`."""
        return prune_(self.model, list(self._hooks), multiple=self.multiple)

    def meet_target_(self) -> RankReport | None:
        """Prune, then round to S0 if that was not enough (`comera.round_`).

        Returns the report on rounding; None in the early stage, or if pruning was enough.
        """
        if self._state.target_size is None or self.prune_().after <= self._state.target_size:
            return None
        return round_(self.model, self._state.target_size, optimizers=list(self._hooks), multiple=self.multiple)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue exactly, JSON-ready: Ŝ_0, stage, targets, counts and mean loss."""
        return {**asdict(self._state), "loss": self._mean_loss()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, before or after attaching. Raises RankError if it is not one of a RankController."""
        known = {field.name for field in fields(_State)}
        if set(state) != known or not all(isinstance(value, float | int | None) for value in state.values()):
            raise RankError(f"expected the state of a RankController, numbers for {sorted(known)}, got {state}")
        self._state, self._loss, self._window = _State(**state), None, None

    def _steps_averaged(self) -> int:
        return min(self._state.steps, _HORIZON)

    def _by_sensitivity(self) -> bool:
        """Whether this is a late stage that measures importances."""
        return self.stage == "late" and self.late.shrink == "sensitivity"

    def _mean_loss(self) -> float | None:
        return self._state.loss if self._loss is None else float(self._loss)

    def _start_late_if_due(self, **counts: int) -> None:
        if self.stage == "early" and self.late.due(**counts):
            self.start_late()

    def _current_tables(self) -> list[SizeTable]:
        """The size tables of all tensor trains, rebuilt when a rank, dtype or device has changed."""
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

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookArgs | None:
        def adjust() -> None:
            adjust_gradients_(optimizer, self._scales(), self._current_tables(), self._cores, self.early.ridge)

        return run_before_step(adjust, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """By sensitivity, measure. The optimizer that was attached last ends the step."""
        if self._by_sensitivity():
            held = parameters_of(optimizer)
            update_importance_(optimizer, [d for train in self._trains for d in train.rank_params if d in held])
        if not self.replayed and optimizer is next(reversed(self._hooks)):
            self.between_steps()

    def _zero_gates(self, passed: int) -> None:
        """Zero the gates that exceed the present budget, `passed` steps into the late stage."""
        state, size = self._state, self.size()
        assert state.target_size is not None
        if size <= state.target_size or (self.late.target_loss is not None and self._loss_behind(size)):
            return
        steps = state.switch_step // 2 if self.late.steps is None else self.late.steps
        budget = late_budget(state.switch_size, state.target_size, passed / steps if steps else 1.0)
        if size > budget:
            zero_gates_(self._trains, list(self._hooks), budget, multiple=self.multiple)

    def _loss_behind(self, size: int) -> bool:
        """Whether the loss is relatively further from its target than the size from its own. Synchronizes."""
        state, loss = self._state, self._mean_loss()
        assert loss is not None
        assert state.target_loss is not None
        assert state.target_size is not None
        return (loss - state.target_loss) * size >= (size - state.target_size) * abs(loss)
