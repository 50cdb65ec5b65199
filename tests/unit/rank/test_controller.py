"""The hook between backward() and step(): what it adds to which gradient, and what it leaves alone."""

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.optim.adamw import AdamW
from comera.optim.param_groups import param_groups
from comera.rank.budget import round_
from comera.rank.controller import RankController
from comera.rank.importance import STATE
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.rank.size import SizeTable
from comera.tt.spec import TTMSpec, TTSpec


class Tied(nn.Module):
    """An embedding and the head tied to it around a linear layer, and a tensor train of order 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = TTMEmbedding(TTMSpec(11, 6, (3, 4), (2, 3), (1, 5, 1)))
        self.linear = TTLinear(TTSpec(6, 6, (3, 2), (2, 3), (1, 3, 4, 3, 1)))
        self.segments = TTMEmbedding(TTMSpec(2, 6, (2,), (6,), (1, 1)))
        self.norm = nn.LayerNorm(6)
        self.head = TTMProjection(self.embedding.tt)

    def forward(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.linear(self.embedding(ids)) + self.segments(ids % 2))
        return self.head(hidden)


def backward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.arange(10)).square().mean()
    loss.backward()
    return loss


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_the_hook_adds_size_and_ridge_to_the_loss_gradients() -> None:
    torch.manual_seed(0)
    model, stage = Tied(), EarlyStage(size_weight=0.3, ridge=0.02)
    optimizer = sgd(model)
    RankController(model, early=stage).attach(optimizer)
    trains = {"embedding.tt": model.embedding.tt, "linear.tt": model.linear.tt, "segments.tt": model.segments.tt}
    surrogate_0 = sum(SizeTable([train]).surrogate().item() for train in trains.values())
    with torch.no_grad():  # Ŝ_0 is the size at attach, not the present one
        model.linear.tt.rank_params[1][1] = -0.5
        model.embedding.tt.rank_params[0][2] = 0.0
    backward(model)
    expected = grads(model)
    for name, train in trains.items():
        for k, grad in enumerate(SizeTable([train]).surrogate_grads()):
            expected[f"{name}.rank_params.{k}"] += 0.3 / surrogate_0 * grad
        for k, core in enumerate(train.cores):
            expected[f"{name}.cores.{k}"] += 2 * 0.02 * core.detach()
    optimizer.step()
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")
    assert model.linear.tt.rank_params[1].grad[1] == 0
    assert model.embedding.tt.rank_params[0].grad[2] == 0


@pytest.mark.parametrize("attached", [True, False])
def test_without_weights_or_once_detached_the_gradients_stay_to_the_bit(attached: bool) -> None:
    model = Tied()
    optimizer = sgd(model)
    controller = RankController(model, early=EarlyStage(size_weight=0.0 if attached else 5.0)).attach(optimizer)
    if not attached:
        controller.detach()
    backward(model)
    expected = grads(model)
    optimizer.step()
    for name, grad in grads(model).items():
        assert torch.equal(grad, expected[name]), name
    if not attached:
        controller.attach(optimizer)


def test_a_stage_that_scales_the_loss_scales_every_gradient_by_a_device_scalar(monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.tensor(0.5), torch.tensor(0.25)
    monkeypatch.setattr("comera.rank.controller.stage_scales", lambda *_: scales)
    torch.manual_seed(0)
    model = Tied()
    optimizer = sgd(model)
    RankController(model).attach(optimizer)
    backward(model)
    expected = {name: 0.5 * grad for name, grad in grads(model).items()}
    for k, grad in enumerate(SizeTable([model.linear.tt]).surrogate_grads()):
        expected[f"linear.tt.rank_params.{k}"] += 0.25 * grad
    for k, grad in enumerate(SizeTable([model.embedding.tt]).surrogate_grads()):
        expected[f"embedding.tt.rank_params.{k}"] += 0.25 * grad
    optimizer.step()
    for name, grad in grads(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-8)


def test_frozen_and_unused_parameters_get_no_invented_gradient() -> None:
    model = Tied()
    model.linear.tt.rank_params[0].requires_grad_(False)
    model.linear.tt.cores[0].requires_grad_(False)
    optimizer = sgd(model)
    RankController(model, early=EarlyStage(ridge=0.1)).attach(optimizer)
    model.linear(torch.ones(1, 6)).sum().backward()  # the embedding is not used
    optimizer.step()
    assert model.linear.tt.rank_params[0].grad is None
    assert model.linear.tt.cores[0].grad is None
    assert model.embedding.tt.rank_params[0].grad is None
    assert all(core.grad is None for core in model.embedding.tt.cores)
    assert torch.equal(model.embedding.tt.rank_params[0], torch.ones(5))


def test_a_step_without_any_gradient_does_nothing() -> None:
    model = Tied()
    optimizer = sgd(model)
    RankController(model, early=EarlyStage(ridge=0.1)).attach(optimizer)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_several_optimizers_each_adjust_what_they_hold() -> None:
    torch.manual_seed(0)
    model = Tied()
    groups = {group.pop("name"): group for group in param_groups(model, lr=0.0, rates="flat")}
    ranks, cores = torch.optim.SGD([groups["ranks"]]), torch.optim.SGD([groups["cores"], groups["tables"]])
    RankController(model, early=EarlyStage(size_weight=1.0, ridge=0.1)).attach(ranks).attach(cores)
    backward(model)
    first = grads(model)
    ranks.step()
    changed = {name for name, grad in grads(model).items() if not torch.equal(grad, first[name])}
    assert changed == {name for name in first if "rank_params" in name}
    second = grads(model)
    cores.step()
    changed = {name for name, grad in grads(model).items() if not torch.equal(grad, second[name])}
    assert changed == {name for name in first if "cores" in name}


@pytest.mark.parametrize("by_name", [False, True])
def test_gradients_made_by_a_closure_are_adjusted_after_it(by_name: bool) -> None:
    results = []
    for closing in (False, True):
        torch.manual_seed(0)
        model = Tied()
        optimizer = sgd(model)
        RankController(model, early=EarlyStage(size_weight=1.0)).attach(optimizer)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            return backward(model)

        if not closing:
            closure()
            optimizer.step()
        elif by_name:
            assert isinstance(optimizer.step(closure=closure), Tensor)
        else:
            assert isinstance(optimizer.step(closure), Tensor)
        results.append(model.linear.tt.rank_params[1].detach().clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("fused", [False, True])
def test_under_a_grad_scaler_the_size_gradient_meets_the_loss_gradient_at_its_scale(fused: bool) -> None:
    results = []
    for scale in (None, 1024.0):
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        RankController(model, early=EarlyStage(size_weight=1.0, ridge=0.05)).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        scaler.scale(model(torch.arange(10)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        results[-1] += moments
    for plain, scaled in zip(*results, strict=True):
        torch.testing.assert_close(scaled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, AdamW])
def test_a_step_that_a_fused_optimizer_skips_changes_no_importance(kind: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = kind(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    controller = RankController(model, late=LateStage(target_size=0.9, start_step=1, steps=1000)).attach(optimizer)

    def step(overflow: bool) -> list[Tensor]:
        loss = model(torch.arange(10)).square().mean()
        scaler.scale(loss).backward()
        if overflow:
            model.norm.weight.grad.fill_(torch.inf)
        controller.observe(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return [optimizer.state[d].get(STATE, d).clone() for d in model.linear.tt.rank_params]

    step(False), step(False)
    before = step(False)
    assert all(map(torch.equal, step(True), before))
    assert not any(map(torch.equal, step(False), before))


def test_a_wrapped_optimizer_is_found() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = Tied()
    inner = sgd(model)
    controller = RankController(model).attach(Wrapper(inner))
    with pytest.raises(RankError, match="attached already"):
        controller.attach(inner)


class Outer(torch.optim.Optimizer):
    """Sharpness-aware minimization, Lookahead and their kind: groups and state of their own, the steps of another."""

    def __init__(self, params: Any, **others: torch.optim.Optimizer) -> None:
        super().__init__(params, {})
        vars(self).update(others)
        self.stepped = next(iter(others.values()))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["slow"] = p.detach() + self.state[p].get("slow", 0)
        self.stepped.step(closure)


def test_a_wrapper_of_any_name_is_followed_and_its_own_state_is_cut() -> None:
    model = Tied()
    groups = param_groups(model, lr=1e-2)
    optimizer = Outer(groups, base_optimizer=torch.optim.AdamW(groups))
    controller = RankController(model).attach(optimizer)
    backward(model)
    optimizer.step()
    with torch.no_grad():
        model.linear.tt.rank_params[1][:2] = 0
    before = {p: p.shape for p in model.parameters()}
    controller.prune_()
    assert any(p.shape != before[p] for p in model.parameters())
    assert all(optimizer.state[p]["slow"].shape == p.shape for p in model.parameters())
    optimizer.step()
    again = copy.deepcopy(controller)
    with torch.no_grad():
        again.model.linear.tt.rank_params[1][:1] = 0
    again.prune_()  # of the copy's model, with the state of the copy's optimizers
    assert all(optimizer.state[p]["slow"].shape == p.shape for p in model.parameters())


def test_a_wrapper_of_several_optimizers_is_refused() -> None:
    model = Tied()
    optimizer = Outer(model.parameters(), first=sgd(model), second=sgd(model))
    with pytest.raises(RankError, match="with several, first and second"):
        RankController(model).attach(optimizer)


def test_what_cannot_be_attached_is_refused() -> None:
    model = Tied()
    optimizer = sgd(model)
    controller = RankController(model).attach(optimizer)
    with pytest.raises(RankError, match="SGD is attached already"):
        controller.attach(optimizer)
    with pytest.raises(RankError, match=r"holds 2 parameters, none of them a core or rank parameter.*tensorize_"):
        controller.attach(torch.optim.SGD(model.norm.parameters(), lr=0.1))
    with pytest.raises(RankError, match="compressed layers, got Linear without any"):
        RankController(nn.Linear(2, 2))


def test_an_optimizer_with_one_history_of_all_parameters_is_refused_before_anything_changes() -> None:
    model = Tied()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3)
    optimizer.step(lambda: backward(model))
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(RankError, match=r"LBFGS keeps one history.*AdamW"):
        RankController(model).attach(optimizer)
    for change in (lambda: round_(model, 0.5, optimizers=[optimizer]), lambda: prune_(model, [optimizer])):
        with pytest.raises(RankError, match="nothing was changed"):
            change()
    assert all(map(torch.equal, before, model.parameters()))


def test_observe_averages_the_losses_detached_and_refuses_unreduced_ones() -> None:
    model = Tied()
    optimizer = sgd(model)
    controller = RankController(model).attach(optimizer)
    losses = torch.rand(250, dtype=torch.float64, requires_grad=True)
    for loss in losses[:100]:
        controller.observe(loss)
        optimizer.step()
    mean = losses[:100].detach().mean()
    assert controller.state_dict()["loss"] == pytest.approx(float(mean), rel=1e-6)
    for loss in losses.detach()[100:]:
        controller.observe(loss)
        optimizer.step()
        mean += (loss - mean) / 100
    assert controller.state_dict()["loss"] == pytest.approx(float(mean), rel=1e-6)
    with pytest.raises(RankError, match=r"scalar, got shape \(3,\)"):
        controller.observe(torch.ones(3))


def test_the_state_goes_through_json_exactly_and_outlives_pruning() -> None:
    model = Tied()
    with torch.no_grad():
        model.linear.tt.rank_params[0].mul_(1 / 3)
    controller = RankController(model)
    assert controller.state_dict()["surrogate_0"] is None
    controller.attach(sgd(model))
    controller.observe(torch.tensor(1 / 3))
    state = controller.state_dict()
    sizes = [SizeTable([layer.tt]).surrogate().item() for layer in (model.embedding, model.linear, model.segments)]
    assert state["surrogate_0"] == pytest.approx(sum(sizes))
    with torch.no_grad():
        model.linear.tt.rank_params[0][0] = 0.0
    assert controller.prune_().changed

    resumed = RankController(model)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.attach(sgd(model))
    assert resumed.state_dict() == state


@pytest.mark.parametrize("state", [{"surrogate_0": 1.0}, {"surrogate_0": 1.0, "momentum": 2}, {"steps": "many"}])
def test_a_foreign_state_is_refused(state: dict[str, Any]) -> None:
    controller = RankController(Tied())
    before = controller.state_dict()
    with pytest.raises(RankError, match="expected the state of a RankController"):
        controller.load_state_dict(state if "steps" not in state else {**before, **state})
    assert controller.state_dict() == before


def test_a_size_weight_alone_makes_ranks_fall_and_pruning_goes_on() -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3, rank_lr=0.1))
    controller = RankController(model, early=EarlyStage(size_weight=100.0)).attach(optimizer)
    for _ in range(30):
        loss = backward(model)
        controller.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        controller.prune_()
    assert model.linear.tt.spec.inner_ranks == (0, 0, 0)
    assert model.segments.tt.spec.order == 1
    assert torch.isfinite(backward(model))


SCHEDULES: dict[str, Any] = {
    "one maximum": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-3, total_steps=9), True),
    "one base": (lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-4, 1e-3, cycle_momentum=False), True),
    "by hand": (lambda o: [group.update(lr=1e-3) for group in o.param_groups], True),
    "a maximum each": (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=9),
        False,
    ),
    "none": (lambda o: None, False),
    "warm-up from zero": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 9), False),
    "cosine": (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9), False),
    "on a plateau": (lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o), False),
    "scaled by hand": (lambda o: [group.update(lr=group["lr"] * 0.1) for group in o.param_groups], False),
    "zero by hand": (lambda o: [group.update(lr=0.0) for group in o.param_groups], False),
    "one group by hand": (lambda o: o.param_groups[0].update(lr=1e-4), False),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_that_one_number_overwrites_are_said_once(schedule: str) -> None:
    make, overwrites = SCHEDULES[schedule]
    model = Tied()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    controller = RankController(model).attach(optimizer)
    made = make(optimizer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            backward(model)
            optimizer.step()
            if isinstance(made, torch.optim.lr_scheduler.LRScheduler):
                made.step(*[1.0] * isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau))
            controller.epoch_ended()
    said = [one for one in said if "a schedule has overwritten the rates" in str(one.message)]
    assert len(said) == overwrites
    assert all('max_lr=[group["lr"] for group in optimizer.param_groups]' in str(one.message) for one in said)


@pytest.mark.parametrize("groups", ["flat", "one rate for cores", "plain", "tensors"])
def test_equal_rates_by_choice_are_not_said(groups: str) -> None:
    model = Tied()
    made: Any = {
        "flat": lambda: param_groups(model, lr=1e-3, rates="flat"),
        "one rate for cores": lambda: param_groups(model, lr=1e-3, core_lr=1e-3),
        "plain": lambda: [{"params": [p]} for p in model.parameters()],
        "tensors": lambda: [group | {"lr": torch.tensor(1e-3)} for group in param_groups(model, lr=1e-3)],
    }[groups]()
    optimizer = torch.optim.AdamW(made, lr=1e-3)
    RankController(model).attach(optimizer)
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
