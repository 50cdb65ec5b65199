"""TrainStep against the same step written out by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.step import TrainStep

from .test_stages import Tiny

Batch = tuple[Tensor, Tensor]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, 3, dtype=dtype))


def make_batches(count: int, size: int = 4, dtype: torch.dtype = torch.float64) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 5, generator=generator, dtype=dtype), torch.randn(size, 3, generator=generator, dtype=dtype))
        for _ in range(count)
    ]


def sgd(model: nn.Module, lr: float = 0.5) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def assert_same_parameters(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)


def test_step_is_the_hand_written_one() -> None:
    model, by_hand = make_model(), make_model()
    (batch,) = make_batches(1)
    result = TrainStep(model, loss_of, sgd(model))([batch])

    loss = loss_of(by_hand, batch)
    grads = torch.autograd.grad(loss, list(by_hand.parameters()))
    with torch.no_grad():
        for parameter, grad in zip(by_hand.parameters(), grads, strict=True):
            parameter.sub_(0.5 * grad)
    assert_same_parameters(model, by_hand)
    assert result.loss.item() == pytest.approx(loss.item(), rel=1e-7)  # reported in float32
    torch.testing.assert_close(result.grad_norm, torch.cat([g.flatten() for g in grads]).norm())


def test_gradients_of_an_earlier_step_do_not_linger() -> None:
    model, fresh = make_model(), make_model()
    first, second = make_batches(2)
    step = TrainStep(model, loss_of, sgd(model))
    step([first])
    fresh.load_state_dict(model.state_dict())
    step([second])
    TrainStep(fresh, loss_of, sgd(fresh))([second])
    assert_same_parameters(model, fresh)


def test_accumulated_micro_batches_are_one_large_batch() -> None:
    model, large = make_model(), make_model()
    batches = make_batches(3)
    a = TrainStep(model, loss_of, sgd(model))(batches)
    b = TrainStep(large, loss_of, sgd(large))(
        [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    )
    assert_same_parameters(model, large)
    torch.testing.assert_close(a.grad_norm, b.grad_norm)
    torch.testing.assert_close(a.loss, b.loss)


def test_clipping_bounds_the_gradient_and_reports_the_norm_before() -> None:
    model, free = make_model(), make_model()
    (batch,) = make_batches(1)
    norm = TrainStep(free, loss_of, sgd(free))([batch]).grad_norm
    result = TrainStep(model, loss_of, sgd(model), max_grad_norm=0.1)([batch])
    torch.testing.assert_close(result.grad_norm, norm)
    assert norm > 0.1
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert clipped.item() == pytest.approx(0.1, rel=1e-4)


class Recorder:
    """Stands for a RankController: sees the loss, and doubles the gradients in the optimizer's hook."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls: list[str] = []
        self.losses: list[Tensor] = []
        optimizer.register_step_pre_hook(self.before_step)

    def observe(self, loss: Tensor) -> None:
        self.calls.append("observe")
        self.losses.append(loss)

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.calls.append("hook")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= 2


def test_the_controller_sees_the_mean_loss_and_its_hook_comes_after_clipping() -> None:
    model = make_model()
    optimizer = sgd(model)
    controller = Recorder(optimizer)
    result = TrainStep(model, loss_of, optimizer, controller=controller, max_grad_norm=0.1)(make_batches(2))
    assert controller.calls == ["observe", "hook"]
    assert controller.losses[0] is result.loss
    assert not result.loss.requires_grad
    scaled = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert scaled.item() == pytest.approx(0.2, rel=1e-4)


def exchange(other: Callable[[], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda flat: (flat + other()) / 2


def test_averaging_over_processes_equals_the_joint_batch() -> None:
    """Two processes in one: the second one's flat buffer is recorded first, then met by the first one's."""
    ours, theirs = make_batches(2)
    second = make_model()
    sent: list[Tensor] = []

    def record(flat: Tensor) -> Tensor:
        sent.append(flat)
        return flat

    TrainStep(second, loss_of, sgd(second), average=record)([theirs])

    model, joint = make_model(), make_model()
    a = TrainStep(model, loss_of, sgd(model), max_grad_norm=0.3, average=exchange(lambda: sent[0]))([ours])
    b = TrainStep(joint, loss_of, sgd(joint), max_grad_norm=0.3)([ours, theirs])
    assert_same_parameters(model, joint)
    torch.testing.assert_close(a.grad_norm, b.grad_norm)
    torch.testing.assert_close(a.loss, b.loss, check_dtype=False)


def test_parameters_without_gradient_are_left_alone() -> None:
    model = make_model()
    frozen = copy.deepcopy(model[2])
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    TrainStep(model, loss_of, optimizer, max_grad_norm=1.0, average=lambda flat: flat)(make_batches(1))
    assert_same_parameters(model[2], frozen)


def test_bf16_runs_the_forward_in_bfloat16_and_keeps_parameters_in_float32() -> None:
    model = make_model(torch.float32)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    result = TrainStep(model, loss_of, sgd(model), precision="bf16")(make_batches(1, dtype=torch.float32))
    assert seen == [torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert result.loss.dtype == torch.float32
    assert result.loss.isfinite()


# --- a cut between two steps ------------------------------------------------------------------------------------------


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
