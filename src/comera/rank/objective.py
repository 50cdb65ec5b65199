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
    """β: what the squared norm of the cores weighs; it keeps them from growing while the rank parameters shrink."""

    def __post_init__(self) -> None:
        for name in ("size_weight", "ridge"):
            value = getattr(self, name)
            if not isfinite(value) or value < 0:
                raise ConfigError(f"EarlyStage.{name} must be a finite number >= 0, got {value}: 0 turns it off")


def early_scales(stage: EarlyStage, surrogate_0: float) -> Scales:
    """(c_L, c_S) = (1, γ / Ŝ_0), with Ŝ_0 = `surrogate_0`, the Ŝ that adaptation began with; (1, 0) if that is 0."""
    return 1.0, stage.size_weight / surrogate_0 if surrogate_0 else 0.0
