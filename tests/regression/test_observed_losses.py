"""What a controller makes of the losses that it observes: steps of the optimizer, and finite values, count."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.errors import RankError
from comera.nn.linear import TTLinear
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.tt.spec import TTSpec

QUIET = EarlyStage(size_weight=0.0)


def begun(late: LateStage, early: EarlyStage = QUIET) -> tuple[nn.Module, RankController, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    return model, RankController(model, early, late).attach(optimizer), optimizer


def micro_batch(model: nn.Module, k: int = 0) -> Tensor:
    loss: Tensor = (model(torch.eye(12)) - torch.sin(torch.arange(144.0) + k).view(12, 12)).square().mean()
    loss.backward()
    return loss


def test_micro_batches_of_one_step_count_as_one() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, start_step=8))
    losses = []
    for step in range(7):
        for k in range(3):
            loss = micro_batch(model, step + k)
            controller.observe(loss)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = controller.state_dict()
    assert state["steps"] == 7
    assert state["losses"] == 7
    assert state["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
    assert controller.stage == "early"
    controller.observe(micro_batch(model))
    optimizer.step()
    assert controller.stage == "late"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_overflowed_is_skipped_and_counted(value: float) -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, shrink="surrogate"))
    for k in range(6):
        loss = micro_batch(model, k)
        controller.observe(loss if k != 2 else torch.tensor(value))
        if k != 2:  # as a GradScaler skips the step
            optimizer.step()
        optimizer.zero_grad()
    assert controller.losses_left_out == controller.state_dict()["losses_left_out"] == 1
    controller.start_late()
    assert controller.target_loss is not None
    assert controller.target_loss > 0
    for k in range(6):
        controller.observe(micro_batch(model, k) if k != 2 else torch.tensor(value))
        optimizer.step()
        optimizer.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    resumed = RankController(model)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.losses_left_out == 2
    assert resumed.state_dict() == controller.state_dict()


@pytest.mark.parametrize("late", [LateStage(target_size=0.5, shrink="surrogate"), LateStage(0.5, target_loss=1.0)])
def test_the_switch_refuses_a_target_loss_that_it_never_saw(late: LateStage) -> None:
    model, controller, optimizer = begun(late)
    micro_batch(model)
    controller.observe(torch.tensor(torch.nan))
    optimizer.step()
    with pytest.raises(RankError, match=r"expected a finite loss.*the 1 that were observed were not"):
        controller.start_late()
    assert controller.stage == "early"


def test_a_held_out_loss_that_is_not_finite_is_never_the_best() -> None:
    _, controller, optimizer = begun(LateStage(target_size=0.5, plateau=2))
    optimizer.step()
    controller.evaluated(torch.nan)
    controller.evaluated(1.0)
    assert controller.state_dict()["best_held_out"] == 1.0
    assert controller.stage == "early"


def test_a_state_of_before_losses_were_counted_is_restored_without_its_nan() -> None:
    _, controller, optimizer = begun(LateStage())
    for k in range(3):
        controller.observe(torch.tensor(float(k)))
        optimizer.step()
    old: dict[str, Any] = controller.state_dict()
    del old["losses"], old["losses_left_out"]
    resumed = RankController(controller.model)
    resumed.load_state_dict(old)
    assert resumed.state_dict() == controller.state_dict()
    resumed.load_state_dict({**old, "loss": torch.nan})
    assert resumed.state_dict()["loss"] is None
