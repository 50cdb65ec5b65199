"""The two stages of rank adaptation: their settings, and the weights (c_L, c_S) that each gives to loss and size.

Training weighs the task loss L against the model size Ŝ (docs/method.md §2). In either stage, a step follows one rule::

    ∂/∂parameters:  c_L · ∂L      and for the gates  + c_S · ∂Ŝ/∂d

so a stage is just a way to choose (c_L, c_S): floats, or scalars on the device where the choice depends on the loss,
which then needs no synchronization. The ridge β Σ‖G_k‖_F² on the cores belongs to both stages: without it, the gates
shrink for free while the cores grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Literal, get_args

import torch
from torch import Tensor

from comera.errors import ConfigError, check_fields
from comera.rank.target import bytes_of

Shrink = Literal["sensitivity", "surrogate", "gate_mean"]
Scales = tuple[float | Tensor, float | Tensor]


@dataclass(frozen=True)
class EarlyStage:
    """Linear scalarization, min L + γ Ŝ/Ŝ_0 + β Σ‖G_k‖_F² ([CoMERA] eq. 9), for stable convergence first.

    Raises:
        ConfigError: a negative or non-finite value.

    Example:
        >>> from comera import EarlyStage
        >>> EarlyStage(size_weight=0.02)
        EarlyStage(size_weight=0.02, ridge=0.0)
    """

    size_weight: float = 0.01
    """γ: weight of the initial model size against the loss; 0 leaves the ranks to the loss alone."""
    ridge: float = 0.0
    """β: weight of the squared norm of the cores, in both stages; it keeps them from growing while the gates shrink."""

    def __post_init__(self) -> None:
        check_fields(self, "EarlyStage.", _weight_checks(self, "size_weight", "ridge"))


def _weight_checks(stage: EarlyStage | LateStage, *names: str) -> dict[str, tuple[bool, str]]:
    return {name: (0 <= getattr(stage, name) < inf, "a finite number >= 0, where 0 turns it off") for name in names}


@dataclass(frozen=True)
class LateStage:
    """Shrinks the model to `target_size` over `steps` steps.

    By achievement scalarization towards a loss L0 and a size S0 of your choice ([CoMERA] eq. 10)::

        min  max{ (L − L0)/L, (S − S0)/S } + ρ_L L + ρ_S S

    It starts when the first of `start_step`, `start_epoch` and `plateau` is reached, or when
    `RankController.start_late` is called.

    Raises:
        ConfigError: a value out of range, or a start without a target size.

    Example:
        >>> from comera import LateStage
        >>> late = LateStage(target_size=0.2, start_step=2000)  # from step 2000 on, down to a fifth of the parameters
        >>> late.starts
        True
    """

    target_size: int | float | str | None = None
    """S0, what all tensorized layers together may store in the end: a fraction of their size when the stage starts
    (0.2), a number of parameters (350000) or bytes ("1.5MB"). None: no late stage."""
    target_loss: float | None = None
    """L0, the loss to hold: the size does not fall while the loss is relatively further from its target. None: by
    sensitivity, the size never waits; by surrogate, the mean loss of the last steps before the stage; by gate_mean, 0.8
    as in the authors' code."""
    shrink: Shrink = "sensitivity"
    """How the ranks fall. sensitivity: the gates of least importance to the loss are zeroed along a falling budget.
    surrogate: as published, the optimizer moves all gates down the gradient of the size's ℓ1 surrogate. gate_mean: as
    in the authors' code, and in both stages, down that of the mean of the unpruned gates, not rescaled by the loss."""
    steps: int | None = None
    """sensitivity: steps over which the budget falls to S0, after which training goes on at the final size. None: half
    as many as the early stage took."""
    loss_weight: float = 0.1
    """ρ_L, surrogate and gate_mean: weight of the loss while the size is further from its target."""
    size_weight: float = 0.01
    """ρ_S, surrogate and gate_mean: weight of the size while the loss is further from its target."""
    start_step: int | None = None
    """Step after which the late stage starts."""
    start_epoch: int | None = None
    """Epoch after which the late stage starts."""
    plateau: int | None = None
    """Start after this many evaluations in a row without a new lowest held-out loss."""

    def __post_init__(self) -> None:
        target = self.target_size
        if isinstance(target, float) and target > 1:
            raise ConfigError(
                f"LateStage.target_size as a float is a fraction of the size, in (0, 1], got {target}: give a number "
                "of parameters as an integer, or bytes as a string such as '1.5MB'"
            )
        if target is None and self.starts:
            raise ConfigError("LateStage has a start but no target_size: set the size to reach, such as 0.2")
        if isinstance(target, str):
            positive = bool(bytes_of(target))
        else:
            positive = target is None or (target is not True and target > 0)
        checks = _weight_checks(self, "loss_weight", "size_weight") | {
            "target_size": (positive, "above 0, such as 0.2, 350000 or '1.5MB'"),
            "target_loss": (self.target_loss is None or isfinite(self.target_loss), "a finite number"),
            "shrink": (self.shrink in get_args(Shrink), f"one of {', '.join(get_args(Shrink))}"),
            "steps": (self.steps is None or self.steps >= 0, ">= 0, where 0 cuts to the target at once"),
        }
        for name in ("start_step", "start_epoch", "plateau"):
            value = getattr(self, name)
            late = value is None or 0 < value < inf
            checks[name] = late, "above 0, as the late stage needs an early one before it"
        check_fields(self, "LateStage.", checks)

    @property
    def starts(self) -> bool:
        """Whether the stage starts by itself, without a call."""
        return (self.start_step, self.start_epoch, self.plateau) != (None, None, None)

    @property
    def weighs_losses(self) -> bool:
        """Whether decisions read the mean loss, so that processes must share it."""
        return self.target_size is not None and (self.shrink != "sensitivity" or self.target_loss is not None)

    def due(self, *, steps: int = 0, epochs: int = 0, evaluations: int = 0) -> bool:
        """Whether the stage starts after this many steps, epochs, or evaluations without a new lowest loss."""
        counts = ((self.start_step, steps), (self.start_epoch, epochs), (self.plateau, evaluations))
        return self.target_size is not None and any(limit is not None and count >= limit for limit, count in counts)


def early_scales(stage: EarlyStage, surrogate_0: float) -> Scales:
    """(c_L, c_S) = (1, γ / Ŝ_0), where Ŝ_0 = `surrogate_0` is Ŝ when adaptation began; (1, 0) if that is 0."""
    return 1.0, stage.size_weight / surrogate_0 if surrogate_0 else 0.0


def late_scales(
    stage: LateStage, *, loss: Tensor, target_loss: float, size: Tensor, target_size: int, surrogate: Tensor | None
) -> Scales:
    """(c_L, c_S) for the larger relative gap, in units in which the loss keeps its own gradient.

    Loss behind, (L − L0)/L ≥ (S − S0)/S:   (1 + ρ_L,   ρ_S · L/Ŝ)
    Size behind:                            (ρ_L,       (1 + ρ_S) · L/Ŝ)
    Size met, S ≤ S0 (beyond [CoMERA]):     (1 + ρ_L,   0)

    loss, size, surrogate: scalars on one device; a loss that is not positive weighs by its absolute value. A surrogate
    of None omits the factor L/Ŝ. Does not synchronize.
    """
    scale = loss.abs()
    tiny = torch.finfo(scale.dtype).tiny
    loss_gap = (loss - target_loss) / scale.clamp_min(tiny)
    size_gap = (size - target_size) / size.clamp_min(1)
    loss_behind = loss_gap >= size_gap
    met = size <= target_size
    c_loss = torch.where(loss_behind | met, 1 + stage.loss_weight, stage.loss_weight)
    weight = torch.where(loss_behind, stage.size_weight, 1 + stage.size_weight)
    unit = 1.0 if surrogate is None else scale / surrogate.clamp_min(tiny)
    c_size = torch.where(met, 0.0, weight * unit)
    return c_loss, c_size


def loss_behind(loss: float | None, size: int, target_loss: float, target_size: int) -> bool:
    """Whether the loss (None: there was none yet) is relatively further from its target than the size from its own."""
    return loss is None or (loss - target_loss) * size >= (size - target_size) * abs(loss)


def late_budget(first_size: int, target_size: int, done: float) -> int:
    """What the model may store after the fraction `done` of the late stage's steps: S0 + (S1 − S0)(1 − done)³.

    Most goes early, while much of the model is redundant, and little at a time near the end (Zhu and Gupta 2017, "To
    prune, or not to prune").
    """
    return target_size + int((first_size - target_size) * (1 - min(max(done, 0.0), 1.0)) ** 3)
