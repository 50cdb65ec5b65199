"""The stages of rank adaptation as pure functions that return two numbers, (c_L, c_S).

Training weighs the task loss L against the model size Ŝ (METHOD §2). Whatever the stage, a step follows one rule::

    ∂/∂parameters:  c_L · ∂L      and on the rank parameters  + c_S · ∂Ŝ/∂d

so a stage is no more than a way to choose (c_L, c_S): numbers, or scalars on the device where the choice depends on
the loss, which then needs no wait. The ridge β Σ‖G_k‖_F² on the cores belongs to the stages' common ground: without
it the rank parameters shrink for free while the cores grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

import torch
from torch import Tensor

from comera.errors import ConfigError

Scales = tuple[float | Tensor, float | Tensor]


@dataclass(frozen=True)
class EarlyStage:
    """Linear scalarisation: min L + γ Ŝ/Ŝ_0 + β Σ‖G_k‖_F² ([CoMERA] eq. 9), for stable convergence first.

    Raises ConfigError on a negative or non-finite value.
    """

    size_weight: float = 0.01
    """γ: what the whole initial size weighs against the loss; 0 leaves the ranks to the loss alone."""

    ridge: float = 0.0
    """β: what the squared norm of the cores weighs, in both stages; it keeps them from growing while the rank
    parameters shrink."""

    def __post_init__(self) -> None:
        for name in ("size_weight", "ridge"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise ConfigError(f"EarlyStage.{name} must be a finite number >= 0, got {value}: 0 turns it off")


@dataclass(frozen=True)
class LateStage:
    """Achievement scalarisation towards a loss L0 and a size S0 that the user names ([CoMERA] eq. 10)::

        min  max{ (L − L0)/L, (S − S0)/S } + ρ_L L + ρ_S S

    It begins at the first of `start_step`, `start_epoch` and `plateau` that is reached, or by a call of
    `RankController.start_late`. Raises ConfigError for a value out of range.
    """

    target_size: int | float | str | None = None
    """S0, what all tensorized layers together may store in the end: a part of their size at the switch (0.2), numbers
    (350000) or bytes ("1.5MB"). Left out: no late stage."""

    target_loss: float | None = None
    """L0, the loss to hold: while it is relatively further away than the size, the size waits. Left out: sensitivity
    does not wait; surrogate takes the mean loss of the last steps before the switch."""

    shrink: Literal["sensitivity", "surrogate"] = "sensitivity"
    """How the ranks fall. sensitivity: entries that the loss leans on least are switched off along a falling budget;
    surrogate: as published, the optimizer moves all rank parameters down the gradient of the size's ℓ1 surrogate."""

    steps: int | None = None
    """sensitivity: steps over which the budget falls to S0, after which the model trains on at its final size; left
    out: as many as half the early stage took."""

    loss_weight: float = 0.1
    """ρ_L, surrogate: what the loss weighs while the size is further from its target."""

    size_weight: float = 0.01
    """ρ_S, surrogate: what the size weighs while the loss is further from its target."""

    start_step: int | None = None
    """Step after which the late stage begins."""

    start_epoch: int | None = None
    """Epoch after which the late stage begins."""

    plateau: int | None = None
    """Begin after this many evaluations in a row without a new lowest held-out loss."""

    def __post_init__(self) -> None:
        target = self.target_size
        if isinstance(target, bool) or (isinstance(target, float | int) and not 0 < target < float("inf")):
            raise ConfigError(f"LateStage.target_size must be above 0, got {target!r}: such as 0.2, 350000 or '1.5MB'")
        if isinstance(target, float) and target > 1:
            raise ConfigError(
                f"LateStage.target_size as a float is a part of the size, in (0, 1], got {target}: give an integer "
                "for numbers, or a text such as '1.5MB' for bytes"
            )
        if self.target_loss is not None and not isfinite(self.target_loss):
            raise ConfigError(f"LateStage.target_loss must be a finite number, got {self.target_loss}")
        for name in ("loss_weight", "size_weight"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise ConfigError(f"LateStage.{name} must be a finite number >= 0, got {value}")
        if self.shrink not in ("sensitivity", "surrogate"):
            raise ConfigError(f"LateStage.shrink must be 'sensitivity' or 'surrogate', got {self.shrink!r}")
        if self.steps is not None and self.steps < 0:
            raise ConfigError(f"LateStage.steps must be >= 0, got {self.steps}: 0 cuts to the target at once")
        if target is None and self.starts:
            raise ConfigError("LateStage has a start but no target_size: set the size to reach, such as 0.2")
        for name in ("start_step", "start_epoch", "plateau"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(
                    f"LateStage.{name} must be above 0, got {value}: the late stage needs an early one before it"
                )

    @property
    def starts(self) -> bool:
        """Whether it begins by itself, without a call."""
        return not (self.start_step is None and self.start_epoch is None and self.plateau is None)


def early_scales(stage: EarlyStage, surrogate_0: float) -> Scales:
    """(c_L, c_S) = (1, γ / Ŝ_0), with Ŝ_0 = `surrogate_0`, the Ŝ that adaptation began with; (1, 0) if that is 0."""
    return 1.0, stage.size_weight / surrogate_0 if surrogate_0 else 0.0


def late_scales(
    stage: LateStage, *, loss: Tensor, target_loss: float, size: Tensor, target_size: int, surrogate: Tensor
) -> Scales:
    """(c_L, c_S) of the larger relative gap, in units in which the loss keeps its own gradient; waits for nothing.

    Loss behind, (L − L0)/L ≥ (S − S0)/S:   (1 + ρ_L,   ρ_S · L/Ŝ)
    Size behind:                            (ρ_L,       (1 + ρ_S) · L/Ŝ)
    Size met, S ≤ S0 (beyond):              (1 + ρ_L,   0)

    loss, size, surrogate: scalars on one device; a loss that is not positive weighs by its absolute value.
    """
    scale = loss.abs()
    tiny = torch.finfo(scale.dtype).tiny
    loss_gap = (loss - target_loss) / scale.clamp_min(tiny)
    size_gap = (size - target_size) / size.clamp_min(1)
    loss_behind = loss_gap >= size_gap
    met = size <= target_size
    c_loss = torch.where(loss_behind | met, 1 + stage.loss_weight, stage.loss_weight)
    weight = torch.where(loss_behind, stage.size_weight, 1 + stage.size_weight)
    c_size = torch.where(met, 0.0, weight * scale / surrogate.clamp_min(tiny))
    return c_loss, c_size


def late_budget(first_size: int, target_size: int, done: float) -> int:
    """What the model may store once the part `done` of the late stage's steps is over: S0 + (S1 − S0)(1 − done)³.

    Much goes early, while much of it is idle, and little at a time at the end (Zhu and Gupta 2017, "To prune, or not
    to prune").
    """
    return target_size + int((first_size - target_size) * (1 - min(max(done, 0.0), 1.0)) ** 3)
