"""The early stage's two numbers."""

import pytest

from comera.errors import ConfigError
from comera.rank.objective import EarlyStage, early_scales


def test_early_stage_keeps_the_loss_and_weighs_size_against_the_first_one() -> None:
    assert early_scales(EarlyStage(size_weight=0.02), 400.0) == (1.0, 0.02 / 400.0)
    assert early_scales(EarlyStage(size_weight=0.0), 400.0) == (1.0, 0.0)


def test_nothing_left_to_shrink_gives_no_size_gradient() -> None:
    assert early_scales(EarlyStage(), 0.0) == (1.0, 0.0)


@pytest.mark.parametrize("field", ["size_weight", "ridge"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf")])
def test_weights_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"EarlyStage\.{field} must be a finite number >= 0"):
        EarlyStage(**{field: value})
