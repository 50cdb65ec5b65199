"""The weights (c_L, c_S) of each stage: constants in the early one, by the larger gap in the late one."""

from typing import Any

import pytest
import torch

from comera.errors import ConfigError
from comera.rank.objective import EarlyStage, LateStage, early_scales, late_scales


def late(stage: LateStage, *, loss: float, target_loss: float, size: float, target_size: int) -> tuple[float, float]:
    values = {"loss": torch.tensor(loss), "size": torch.tensor(size), "surrogate": torch.tensor(50.0)}
    scales = late_scales(stage, target_loss=target_loss, target_size=target_size, **values)
    assert all(isinstance(scale, torch.Tensor) and scale.shape == () for scale in scales)
    return tuple(float(scale) for scale in scales)  # type: ignore[return-value]


def test_early_stage_keeps_the_loss_and_weighs_size_against_the_first_one() -> None:
    assert early_scales(EarlyStage(size_weight=0.02), 400.0) == (1.0, 0.02 / 400.0)
    assert early_scales(EarlyStage(size_weight=0.0), 400.0) == (1.0, 0.0)


def test_nothing_left_to_shrink_gives_no_size_gradient() -> None:
    assert early_scales(EarlyStage(), 0.0) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "size", "scales"),
    [
        (2.0, 1000.0, (0.1, 1.01 * 2.0 / 50)),  # gaps 0 and 0.8: the size is behind
        (2.5, 205.0, (1.1, 0.01 * 2.5 / 50)),  # gaps 0.2 and 0.02: the loss is behind
        (2.0 / 0.75, 800.0 / 3, (1.1, 0.01 * 2.0 / 0.75 / 50)),  # both 0.25: the loss goes first
        (1.0, 201.0, (0.1, 1.01 * 1.0 / 50)),  # loss better than its target, size nearly there
        (9.0, 200.0, (1.1, 0.0)),  # the size has arrived: it presses no more
        (1.0, 150.0, (1.1, 0.0)),  # both have arrived
    ],
)
def test_late_stage_follows_the_larger_relative_gap(loss: float, size: float, scales: tuple[float, float]) -> None:
    stage = LateStage(target_size=200, loss_weight=0.1, size_weight=0.01)
    assert late(stage, loss=loss, target_loss=2.0, size=size, target_size=200) == pytest.approx(scales)


def test_late_stage_takes_a_loss_that_is_not_positive_and_an_empty_model() -> None:
    stage = LateStage(target_size=200)
    assert late(stage, loss=-3.0, target_loss=-4.0, size=1000.0, target_size=200) == pytest.approx((0.1, 1.01 * 3 / 50))
    assert late(stage, loss=0.0, target_loss=0.0, size=0.0, target_size=1) == pytest.approx((1.1, 0.0))


@pytest.mark.parametrize("field", ["size_weight", "ridge"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_early_weights_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"EarlyStage\.{field} must be a finite number >= 0"):
        EarlyStage(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_size": 0.0}, "target_size must be above 0"),
        ({"target_size": -5}, "target_size must be above 0"),
        ({"target_size": True}, "target_size must be above 0"),
        ({"target_size": float("nan")}, "target_size must be above 0"),
        ({"target_size": 1.5}, r"a fraction of the size, in \(0, 1\], got 1.5"),
        ({"target_loss": float("inf")}, "target_loss must be a finite number"),
        ({"loss_weight": -0.1}, "loss_weight must be a finite number >= 0"),
        ({"size_weight": float("nan")}, "size_weight must be a finite number >= 0"),
        (
            {"target_size": 0.2, "start_step": 0},
            "start_step must be above 0, as .* an early one before it, got 0",
        ),
        ({"target_size": 0.2, "start_epoch": -1}, "start_epoch must be above 0"),
        ({"target_size": 0.2, "plateau": 0}, "plateau must be above 0"),
        ({"plateau": 3}, "has a start but no target_size"),
        ({"shrink": "lasso"}, "shrink must be one of sensitivity, surrogate, gate_mean, got 'lasso'"),
        ({"steps": -1}, "steps must be >= 0"),
    ],
)
def test_late_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LateStage(**fields)


def test_a_late_stage_knows_whether_it_begins_by_itself() -> None:
    assert not LateStage(target_size=0.2).starts
    assert LateStage(target_size=0.2, start_step=3).starts
    assert LateStage(target_size=0.2, start_epoch=1).starts
    assert LateStage(target_size=0.2, plateau=2).starts
