"""A cut between two steps of training: the next step is the one of the masked model."""

import pytest
import torch

from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.step import TrainStep

from .test_stages import Tiny


def make_step(precision: str, clip: float) -> tuple[Tiny, TrainStep, RankController]:
    task = Tiny()
    task.model.eval()  # without dropout
    optimizer = torch.optim.AdamW(param_groups(task.model, lr=1e-2), fused=True)
    late = LateStage(target_size=0.5, start_step=2, shrink="surrogate")
    controller = RankController(task.model, EarlyStage(), late).attach(optimizer)
    step = TrainStep(task.model, task.loss, optimizer, controller=controller, max_grad_norm=clip, precision=precision)
    return task, step, controller


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_step_after_a_cut_is_the_masked_one(precision: str, clip: float, accumulation: int) -> None:
    pair = [make_step(precision, clip) for _ in range(2)]
    (cut, step_cut, controller), (masked, step_masked, _) = pair
    for k in range(3):
        batches = [cut.train_batch(3 * k, micro, 0, 1) for micro in range(accumulation)]
        for _, step, _ in pair:
            step(batches)
    for task in (cut, masked):
        with torch.no_grad():
            task.model.get_parameter("1.tt.rank_params.2")[[0, 3]] = -0.5  # too far down for momentum to revive
            task.model.get_parameter("1.tt.rank_params.1")[1] = -0.5
    assert controller.stage == "late"
    assert controller.prune_().changed
    for k in range(3, 5):
        batches = [cut.train_batch(3 * k, micro, 0, 1) for micro in range(accumulation)]
        a, b = step_cut(batches), step_masked(batches)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(a.loss, b.loss, **tolerance)
        torch.testing.assert_close(a.grad_norm, b.grad_norm, **tolerance)
    if precision == "fp32":
        weights = [task.model.get_submodule("1.tt").dense() for task in (cut, masked)]  # type: ignore[operator]
        torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
