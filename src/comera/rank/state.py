"""What a `RankController` remembers from step to step, as its checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from comera.errors import RankError

_LATER = {"losses", "losses_left_out", "zero_every"}  # not in older states


@dataclass
class RankState:
    """Its fields are the keys of `RankController.state_dict`."""

    surrogate_0: float | None = None  # Ŝ when adaptation began
    target_size: int | None = None  # S0; None in the early stage
    target_loss: float | None = None  # L0; None in the early stage
    switch_size: int = 0  # when the late stage started
    switch_step: int = 0
    zero_every: int = 0  # steps between two rounds of zeroing gates; 0 in older states: 20, and none at the end
    steps: int = 0
    epochs: int = 0
    best_held_out: float | None = None  # for LateStage.plateau
    evaluations_since: int = 0  # that best one
    loss: float | None = None  # mean of the last losses, as of saving
    losses: int = 0  # steps in that mean
    losses_left_out: int = 0  # because they were not finite

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RankState:
        """Read a `state_dict`; a loss that is not finite counts as none. Raises RankError if it is not one."""
        known = {field.name for field in fields(cls)}
        if not known - _LATER <= set(state) <= known or not all(_fits(*item) for item in state.items()):
            raise RankError(f"expected the state of a RankController, numbers for {sorted(known)}, got {state}")
        finite = {key: value if value is None or isfinite(value) else None for key, value in state.items()}
        return cls(**{"losses": state["steps"], **finite})


_COUNTS = {field.name for field in fields(RankState) if field.type == "int"}


def _fits(key: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, float | int | None):
        return False
    if key in _COUNTS or (key == "target_size" and value is not None):
        return isinstance(value, int) and value >= 0
    return True
