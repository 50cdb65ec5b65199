"""RankController: rank adaptation as a hook between `backward()` and `optimizer.step()`.

Loss function, model and training loop stay as they are; in both stages, each step follows one rule (objective.py)::

    parameter.grad ← c_L · parameter.grad            every parameter of the optimizer
    d.grad         ← d.grad + c_S · ∂Ŝ/∂d            gates
    G.grad         ← G.grad + 2β G                   cores, the ridge

`comera.optim.AdamW` applies it as it reads gradients, in one pass; the hook writes it into those of any other. Only
gradients of the present step are changed: a parameter without one (frozen, or in a layer that the step did not use) is
left alone by the size and the ridge, as it is by the optimizer and its weight decay. The hook runs after clipping and
after a GradScaler's unscaling, so the size gradient is neither clipped nor scaled. Pruned gates and their slices get
exactly zero gradient from both loss (masking) and size, so a clipped norm is the same before and after pruning.

What a step decides on the host (counting, starting the late stage, zeroing gates) is in `advance` and `between_steps`.
The rest is work for the device alone, so that a CUDA graph can capture it. `replayed` says what calls the two: the
hooks, or the replay of the step (`comera.trainer.step`).

Several processes must decide alike. Sizes and importances follow from parameters and gradients, which they share; the
losses that a decision reads are averaged over them.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from comera.distributed import follow_state_, several, shapes_changed, sum_
from comera.errors import RankError
from comera.nn.changes import notify_conversion
from comera.rank.budget import canonicalize_, round_
from comera.rank.copies import Copies, trains_of_copies, warn_of_strays
from comera.rank.importance import update_importance_, zero_gates_
from comera.rank.loss_mean import LossMean
from comera.rank.objective import EarlyStage, LateStage, late_budget, loss_behind
from comera.rank.optimizer_state import check_cuttable, parameters_of, rates_overwritten, unwrap
from comera.rank.prune import prune_
from comera.rank.report import RankReport
from comera.rank.size import SizeTable, size_tables, unpruned_ranks, unpruned_size
from comera.rank.state import RankState
from comera.rank.step_rule import GivenRules, HookArgs, StepRule, stage_scales, step_rule
from comera.rank.target import check_target, late_target

_EARLY, _LATE = EarlyStage(), LateStage()
_AUTHORS_LOSS = 0.8  # L0, fixed in the authors' code
# Most steps between two rounds of zeroing gates, about as far as the importances look back; a stage has at least as
# many rounds, the last at its end.
_ZERO_EVERY = 20
_CHECKED_STEPS = 3  # at the beginning, whose rates are looked at; and one after each epoch


class RankController:
    """Adapts the ranks of a model's tensor trains while any optimizer trains it.

    In the early stage, the size of the model is a small term beside the loss. The late stage brings the size down to a
    target: it zeroes the gates of least importance along a falling budget (or, as published, lets the optimizer shrink
    all of them). `prune_` turns zeroed gates into smaller tensors whenever you like, and `meet_target_` guarantees the
    target at the end.

    Args:
        model: has at least one compressed layer or adapter; the controller adapts the tensor trains that it holds now,
            beside adapters only what is trained with them. Give a DistributedDataParallel wrapper rather than what it
            wraps, so that it follows the ranks when they fall.
        early, late: the two stages. Without `late.target_size`, the early stage goes on to the end.
        multiple: keep ranks at multiples of it (8 or 16 suit tensor cores) where possible.
        copies: all that average the model's parameters, modules (`AveragedModel`, timm's `ModelEmaV3`) or objects with
            the averages in a list `shadow_params` (diffusers' `EMAModel`); or a function that returns them. They are
            cut with it, and where its tensor trains get another basis, averages start again from the new values.

    Attributes:
        replayed: set it if steps are captured and replayed (CUDA graphs). Then call `advance` before and
            `between_steps` after each step, and capture again when `phase` changes.

    Raises:
        RankError: no compressed layers, or sharded ones, copies of other ranks, a target size beside an activation or
            out of reach: below the smallest possible, above the present one.

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
        self,
        model: nn.Module,
        early: EarlyStage = _EARLY,
        late: LateStage = _LATE,
        *,
        multiple: int = 1,
        copies: Copies = (),
    ) -> None:
        self.model, self.early, self.late, self.multiple, self.copies = model, early, late, multiple, copies
        self.replayed = False
        self._trains = list(trains_of_copies(model, () if callable(copies) else copies))
        self._cores = [core for train in self._trains for core in train.cores]
        if not self._trains:
            raise RankError(
                f"expected a model with compressed layers, got {type(model).__name__} without any: "
                "call comera.tensorize_(model) first"
            )
        if late.target_size is not None:
            check_target(self._trains, late.target_size, multiple=multiple)
        self._tables: list[SizeTable] = []
        self._hooks: dict[Optimizer, list[RemovableHandle]] = {}
        self._optimizers: list[Optimizer] = []  # as attached: they may wrap those that take the steps, and have state
        self._given = GivenRules()
        self._to_check, self._warned = _CHECKED_STEPS, False  # rates
        self._state, self._losses = RankState(), LossMean()

    def attach(self, optimizer: Optimizer) -> RankController:
        """Adapt at each step of `optimizer`, for the parameters that it holds; returns self.

        Several optimizers can be attached. The first fixes Ŝ_0, the size that γ is relative to, unless
        `load_state_dict` has restored it. Raises RankError for an optimizer that is already attached, that holds no
        parameter of the tensor trains, or whose state cannot be cut (LBFGS).
        """
        check_cuttable([optimizer])
        attached, optimizer = optimizer, unwrap(optimizer)
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
        self._optimizers.append(attached)
        return self

    def detach(self) -> None:
        """Release all optimizers; from now on they step without rank adaptation."""
        for optimizer, hooks in self._hooks.items():
            self._given.withdraw(optimizer)
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self._optimizers.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_hooks": {}, "_given": GivenRules()}

    def __setstate__(self, state: dict[str, Any]) -> None:  # torch copies optimizers without their hooks
        vars(self).update(state, _optimizers=[])
        for optimizer in state["_optimizers"]:
            self.attach(optimizer)

    @property
    def attached(self) -> tuple[Optimizer, ...]:
        """The optimizers at whose steps ranks adapt, without what wraps them."""
        return tuple(self._hooks)

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

    @property
    def losses_left_out(self) -> int:
        """Observed losses that were not finite, and so are in no mean. Synchronizes."""
        return self._losses.host()[2]

    def observe(self, loss: Tensor) -> None:
        """Record the loss of a step, or of each of its micro-batches, before the optimizer's step.

        loss: a scalar. One that is not finite (an overflow under a GradScaler) is skipped, and counted in
        `losses_left_out`. Does not synchronize. Raises RankError for a loss that is not a scalar.
        """
        if loss.numel() != 1:
            raise RankError(f"expected the loss as a scalar, got shape {tuple(loss.shape)}: reduce it first")
        self._losses.add(loss)

    def _rule(self, grad_scale: Tensor | None) -> StepRule:
        """The rule of the step whose losses have been observed. grad_scale: as for `StepRule`."""
        self._losses.end_step(sum_ if self.late.weighs_losses else None)
        loss, tables = self._losses.mean, self._current_tables()
        if self.stage == "late" and not self._by_sensitivity() and (loss is None or self._state.target_loss is None):
            raise RankError(f"expected a finite loss for shrink={self.late.shrink!r}, but {self._no_loss()}")
        scales = stage_scales(self.early, self.late, self._state, loss, tables)
        return step_rule(scales, tables, self.late.shrink, self._cores, self.early.ridge, self._measured(), grad_scale)

    def advance(self) -> None:
        """Count an optimizer step. Does not synchronize."""
        self._state.steps += 1

    def between_steps(self) -> None:
        """After a step: start the late stage if it is due; by sensitivity, zero gates at intervals."""
        state = self._state
        measured = self._by_sensitivity()  # in this step; False if this step starts the stage
        self._start_late_if_due(steps=state.steps)
        passed = state.steps - state.switch_step
        ends = state.zero_every > 0 and passed == self._late_steps
        if measured and passed and (ends or passed % (state.zero_every or _ZERO_EVERY) == 0):
            self._zero_gates(passed)

    @property
    def phase(self) -> Hashable:
        """What a step reads from the host besides the parameters: a captured step is valid while this stays equal."""
        state = self._state
        return state.surrogate_0, state.target_size, state.target_loss, self._losses.address

    def epoch_ended(self) -> None:
        """Count an epoch, for `LateStage.start_epoch`."""
        self._state.epochs += 1
        self._to_check = max(self._to_check, 1)  # averaging of weights changes rates between epochs
        self._start_late_if_due(epochs=self._state.epochs)

    def evaluated(self, held_out_loss: float) -> None:
        """Record a held-out loss, for `LateStage.plateau`; in every process, which then read its mean over all."""
        state = self._state
        if self.late.plateau is not None and several():
            losses = torch.tensor([held_out_loss, 1.0], dtype=torch.float64, device=self._cores[0].device)
            sum_(losses)
            held_out_loss = float(losses[0] / losses[1])
        if isfinite(held_out_loss) and (state.best_held_out is None or held_out_loss < state.best_held_out):
            state.best_held_out, state.evaluations_since = held_out_loss, 0
        else:
            state.evaluations_since += 1
        self._start_late_if_due(evaluations=state.evaluations_since)

    def start_late(self) -> None:
        """Start the late stage now, between two steps: fix S0 from the present size and L0 from the last losses.

        By sensitivity, the tensor trains are brought into canonical form and their optimizer state is reset. A model
        whose late stage began before (in the run that saved it) keeps the size that fractions count from.
        Raises RankError without a target, in the late stage, before any step (a late stage follows an early one), for
        a target above that size or below the smallest possible, and where the stage weighs losses but no finite one was
        observed.
        """
        if self.stage == "late":
            raise RankError(f"the late stage has begun already, with S0 = {self.target_size:,} parameters")
        if self.late.target_size is not None and not self._state.steps:
            raise RankError(
                "expected an early stage before the late one, but no step was taken yet: call start_late() after the "
                "early stage, or meet_target_() to cut the model at once"
            )
        if self.late.weighs_losses and self._losses.host()[0] is None:
            raise RankError(f"expected a finite loss before the late stage, but {self._no_loss()}")
        target, sizes = self._resolve_target(), self._sizes()
        specs = [train.spec for train in self._trains]
        if self.late.shrink == "sensitivity":
            copies = trains_of_copies(self.model, self.copies)
            warn_of_strays(self.model, copies)
            canonicalize_(self._trains, self._optimizers, copies)
        self._begin(target, sizes)
        if specs != [train.spec for train in self._trains]:
            shapes_changed(self.model)

    def size(self) -> int:
        """Parameters that pruning would leave now: S plus the unpruned gates. Synchronizes."""
        return sum(self._sizes())

    def prune_(self) -> RankReport:
        """Cut pruned slices out of the model, its copies and the attached optimizers: see `comera.rank.prune_`."""
        return prune_(self.model, self._optimizers, multiple=self.multiple, copies=self.copies)

    def meet_target_(self) -> RankReport:
        """Prune, then round to S0 if that was not enough (`comera.round_`); the target is met in either stage.

        In the early stage S0 is fixed now, as `start_late` would, and the late stage begins with it. What rounding has
        to cut because the stage has not begun or not ended costs quality, and there is a warning.
        Returns a report on both. Raises RankError, with nothing changed, without a target size or for one too small.
        """
        early = self.stage == "early"
        target = self._resolve_target() if early else self._state.target_size
        assert target is not None
        sizes = self._sizes()
        report = replace(self.prune_(), target=target)
        if report.after > target:
            if left := self._left_to_do():
                warnings.warn(
                    f"{left}, so the model is cut from {report.after:,} to {target:,} parameters in tensor trains at "
                    "once: train on to recover, or begin earlier (LateStage's start_step, or start_late), with "
                    "LateStage.steps that end before the training does",
                    stacklevel=2,
                )
            options: dict[str, Any] = {"multiple": self.multiple, "copies": self.copies}
            report = round_(self.model, target, optimizers=self._optimizers, **options).following(report)
        if early:
            self._begin(target, sizes)
        return report

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue exactly, JSON-ready: Ŝ_0, stage, targets, counts and mean loss."""
        mean, steps, skipped = self._losses.host()
        return {**asdict(self._state), "loss": mean, "losses": steps, "losses_left_out": skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, after the model's own; a late stage that has begun keeps its target.

        Warns if that is not this controller's target. Raises RankError if it is not one of a RankController.
        """
        self._state = RankState.of(state)
        self._warn_of_another_target()
        self._losses = LossMean(self._state.loss, self._state.losses, self._state.losses_left_out)
        follow_state_(self.model)

    def _warn_of_another_target(self) -> None:
        asked, kept, began = self.late.target_size, self._state.target_size, self._state.switch_size
        if kept is None or asked is None or isinstance(asked, str):  # bytes depend on the dtypes of that time
            return
        wanted = asked * began if isinstance(asked, float) else asked
        counted = sum(train.late_from or 0 for train in self._trains)
        elsewhere = isinstance(asked, float) and counted not in (0, began)  # an earlier stage, from which it counts
        if abs(wanted - kept) > 1 and not elsewhere:
            warnings.warn(
                f"LateStage.target_size is {asked!r}, but the late stage that goes on has a target of {kept:,} of "
                f"{began:,} parameters, and keeps it: for another one load the model alone, or round_ it in the end",
                stacklevel=3,
            )

    def _sizes(self) -> list[int]:
        """Parameters that pruning would leave of each tensor train. Synchronizes."""
        return [unpruned_size(train) + sum(unpruned_ranks(train)) for train in self._trains]

    def _resolve_target(self) -> int:
        """S0 by `late.target_size`."""
        if self.late.target_size is None:
            raise RankError("expected a target for the late stage, got none: set LateStage(target_size=0.2)")
        sizes = dict(zip(self._trains, self._sizes(), strict=True))
        target = late_target(self.late.target_size, sizes, multiple=self.multiple)
        if not self._losses.observed:
            warnings.warn(f"the late stage begins, but {self._no_loss()}", stacklevel=3)
        return target

    @property
    def _late_steps(self) -> int:
        """Steps over which the budget falls, by sensitivity."""
        return self._state.switch_step // 2 if self.late.steps is None else self.late.steps

    def _left_to_do(self) -> str:
        """What of the late stage is not done; "" if all of it is."""
        if self.stage == "early":
            return "the late stage never began"
        passed = self._state.steps - self._state.switch_step
        if not self._by_sensitivity() or passed >= self._late_steps:
            return ""
        return f"the late stage ends after {passed:,} of its {self._late_steps:,} steps"

    def _begin(self, target: int, sizes: Sequence[int]) -> None:
        """Begin the late stage, at these `sizes` of the tensor trains, towards `target` parameters."""
        state = self._state
        state.target_size, state.switch_size, state.switch_step = target, sum(sizes), state.steps
        state.zero_every = min(max(self._late_steps // _ZERO_EVERY, 1), _ZERO_EVERY)
        default = _AUTHORS_LOSS if self.late.shrink == "gate_mean" else self._losses.host()[0]
        state.target_loss = default if self.late.target_loss is None else self.late.target_loss
        copies = trains_of_copies(self.model, self.copies)
        for train, size in zip(self._trains, sizes, strict=True):
            for each in (train, *copies[train]):
                each.late_from = size if each.late_from is None else each.late_from
        notify_conversion(self.model)

    def _no_loss(self) -> str:
        skipped = self.losses_left_out
        what = f"the {skipped:,} that were observed were not" if skipped else "none was ever observed"
        return f"{what}: call observe(loss) before each step of the optimizer"

    def _by_sensitivity(self) -> bool:
        """Whether this is a late stage that measures importances."""
        return self.stage == "late" and self.late.shrink == "sensitivity"

    def _measured(self) -> list[Tensor]:
        """The gates whose importance a step updates: by sensitivity in the late stage all, otherwise none."""
        return [d for train in self._trains for d in train.rank_params] if self._by_sensitivity() else []

    def _start_late_if_due(self, **counts: int) -> None:
        if self.stage == "early" and self.late.due(**counts):
            self.start_late()

    def _current_tables(self) -> list[SizeTable]:
        """The size tables of all tensor trains, rebuilt when a rank, dtype or device has changed."""
        if not self._tables or not all(table.fits() for table in self._tables):
            self._tables = size_tables(self._trains)
        return self._tables

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HookArgs | None:
        if self._to_check and not self._warned:
            self._check_rates()
        return self._given.begin(self._rule, args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        measured = self._measured()
        update_importance_(optimizer, measured, self._given.end(optimizer, bool(measured)))
        if not self.replayed and optimizer is next(reversed(self._hooks)):  # that attached last ends the step
            self.advance()
            self.between_steps()

    def _check_rates(self) -> None:
        """Warn once where one number has replaced the rates of `comera.param_groups`. Does not synchronize."""
        self._to_check -= 1
        self._warned = any(map(rates_overwritten, self._hooks))
        if self._warned:
            warnings.warn(
                "a schedule has overwritten the rates of comera.param_groups, which differ by group, with one number: "
                "use one that scales each group's rate (LambdaLR, CosineAnnealingLR), or give it a rate for each, as "
                'OneCycleLR(optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], ...) and '
                "StochasticWeightAveraging(swa_lrs=[...]) take them",
                stacklevel=2,
            )

    def _zero_gates(self, passed: int) -> None:
        """Zero the gates that exceed the present budget, `passed` steps into the late stage."""
        state, size = self._state, self.size()
        assert state.target_size is not None
        if size <= state.target_size:
            return
        target_loss = None if self.late.target_loss is None else state.target_loss
        if target_loss is not None and loss_behind(self._losses.host()[0], size, target_loss, state.target_size):
            return
        done = passed / self._late_steps if self._late_steps else 1.0
        budget = late_budget(state.switch_size, state.target_size, done)
        if size > budget:
            zero_gates_(self._trains, self._optimizers, budget, multiple=self.multiple)
