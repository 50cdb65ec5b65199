"""The late stage: how it begins, what it does to ranks and gradients, and that its target is met."""

import copy
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.errors import ConfigError, RankError
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import named_trains
from comera.rank.budget import canonicalize_
from comera.rank.controller import RankController
from comera.rank.importance import STATE, zero_gates_
from comera.rank.objective import EarlyStage, LateStage, early_scales, late_scales
from comera.rank.size import SizeTable, unpruned_ranks, unpruned_size
from comera.tt.decompose import singular_values
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

from ...helpers.layers_to_round import OPTIMIZERS
from ...helpers.oracle import padded_weight

QUIET = EarlyStage(size_weight=0.0)


class Small(nn.Module):
    """A table, a layer that matters to the loss and one that hardly does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTMEmbedding(TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1)))
        self.needed = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.idle = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids)
        return self.needed(hidden) + 1e-3 * self.idle(hidden)


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=1e-2)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9 if kind == "momentum" else 0.0)


def train(model: nn.Module, controller: RankController, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    target = torch.sin(torch.arange(144.0)).view(12, 12)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.arange(12)) - target).square().mean()
        loss.backward()
        controller.observe(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def begun(late: LateStage, kind: str = "adamw", steps: int = 3) -> tuple[Small, RankController, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small()
    optimizer = optimizer_of(model, kind)
    controller = RankController(model, QUIET, late).attach(optimizer)
    train(model, controller, optimizer, steps)
    return model, controller, optimizer


def test_it_begins_by_call_with_a_fraction_of_the_present_size_and_the_mean_loss() -> None:
    model, controller, _ = begun(LateStage(target_size=0.5))
    size, mean = controller.size(), controller.state_dict()["loss"]
    assert (controller.stage, controller.target_size, controller.target_loss) == ("early", None, None)
    controller.start_late()
    assert controller.stage == "late"
    assert controller.target_size == size // 2
    assert controller.target_loss == mean
    assert size == sum(p.numel() for layer in (model.table, model.needed, model.idle) for p in layer.tt.parameters())


@pytest.mark.parametrize(("target", "parameters"), [(300, 300), ("1200B", 300), ("1.2 kB", 307), (1.0, None)])
def test_targets_are_parameters_bytes_or_fractions(target: Any, parameters: int | None) -> None:
    _, controller, _ = begun(LateStage(target_size=target))
    size = controller.size()
    controller.start_late()
    assert controller.target_size == (parameters or size)


def test_it_begins_after_a_step_an_epoch_or_a_plateau() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, start_step=5), steps=4)
    assert controller.stage == "early"
    train(model, controller, optimizer, 1)
    assert controller.stage == "late"

    _, controller, _ = begun(LateStage(target_size=0.5, start_epoch=2))
    controller.epoch_ended()
    assert controller.stage == "early"
    controller.epoch_ended()
    assert controller.stage == "late"

    _, controller, _ = begun(LateStage(target_size=0.5, plateau=2))
    for loss in (3.0, 2.0, 2.5, 1.9, 2.0):
        controller.evaluated(loss)
    assert controller.stage == "early"
    controller.evaluated(1.9)
    assert controller.stage == "late"


def test_without_a_target_nothing_begins() -> None:
    _, controller, _ = begun(LateStage())
    controller.epoch_ended()
    controller.evaluated(1.0)
    controller.evaluated(1.0)
    assert controller.stage == "early"
    with pytest.raises(RankError, match=r"expected a target.*LateStage\(target_size=0.2\)"):
        controller.start_late()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (10**6, r"LateStage.target_size: expected at most the present \d+ parameters"),
        ("9 MB", r"LateStage.target_size: expected at most the present \d+ parameters"),
        (5, "below the smallest possible, 60 "),
        (1e-3, "below the smallest possible, 60 "),
    ],
)
def test_a_target_out_of_reach_is_refused_before_any_step(target: float | str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        RankController(Small(), late=LateStage(target_size=target))


@pytest.mark.parametrize("target", ["0.5 GBB", "50%", "MB", "0 MB"])
def test_a_target_in_bytes_is_a_number_and_a_unit(target: str) -> None:
    with pytest.raises(ConfigError, match=r"LateStage\.target_size must be above 0, such as"):
        LateStage(target_size=target)


def test_what_cannot_begin_is_refused() -> None:
    model = Small()
    with pytest.raises(RankError, match="an early stage before the late one, but no step was taken"):
        RankController(model, late=LateStage(target_size=0.5)).start_late()
    _, controller, _ = begun(LateStage(target_size=0.5))
    controller.start_late()
    with pytest.raises(RankError, match="has begun already, with S0 = "):
        controller.start_late()


@pytest.mark.parametrize("shrink", ["sensitivity", "surrogate", "gate_mean"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "momentum", "adagrad"])
def test_the_target_is_met(shrink: Any, kind: str) -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, shrink=shrink, steps=60), kind)
    controller.start_late()
    losses = train(model, controller, optimizer, 80)
    assert controller.target_size is not None
    if shrink == "sensitivity":  # by the falling budget alone, without rounding
        assert controller.size() <= controller.target_size
    controller.meet_target_()
    assert sum(p.numel() for _, p in model.named_parameters() if "tt" in _) <= controller.target_size
    assert controller.size() <= controller.target_size
    assert all(torch.isfinite(torch.tensor(losses + train(model, controller, optimizer, 3))))


@pytest.mark.parametrize(
    ("late", "called", "after", "message"),
    [
        (LateStage(target_size=0.5), False, 0, r"the late stage never began, .* to [\d,]+ .*at once: .*start_step"),
        (LateStage(target_size=0.5, steps=60), True, 12, r"after 12 of its 60 steps, .* to [\d,]+ .*at once"),
        (LateStage(target_size=0.5, steps=60), True, 60, None),
        (LateStage(target_size=1.0), False, 0, None),  # nothing to cut
    ],
)
def test_a_target_that_is_met_at_once_and_not_by_the_stage_warns(
    late: LateStage, called: bool, after: int, message: str | None
) -> None:
    model, controller, optimizer = begun(late)
    if called:
        controller.start_late()
    train(model, controller, optimizer, after)
    if message is None:
        controller.meet_target_()
        return
    with pytest.warns(UserWarning, match=message):
        controller.meet_target_()


@pytest.mark.parametrize("steps", [1, 7, 30])
def test_a_short_stage_falls_over_all_of_its_steps(steps: int) -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, steps=steps))
    controller.start_late()
    sizes = []
    for _ in range(steps):
        train(model, controller, optimizer, 1)
        sizes.append(controller.size())
    assert controller.target_size is not None
    assert sizes[-1] <= controller.target_size
    assert len(set(sizes)) >= min(steps, 5)


def test_the_layer_of_least_importance_goes_first() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.6, steps=40))
    controller.start_late()
    train(model, controller, optimizer, 60)
    controller.prune_()
    assert model.idle.tt.spec.numel < 0.3 * 180
    assert model.needed.tt.spec.numel > 2 * model.idle.tt.spec.numel
    assert min(model.idle.tt.spec.inner_ranks) >= 1


def test_the_switch_keeps_the_function_and_makes_slices_orthogonal() -> None:
    model, controller, _ = begun(LateStage(target_size=0.5))
    before = model(torch.arange(12))
    controller.start_late()
    torch.testing.assert_close(model(torch.arange(12)), before)
    tt = model.needed.tt
    cores = [core.double() for core in tt.effective_cores()]
    left = torch.tensordot(cores[0].flatten(0, 1), cores[1], dims=1).flatten(0, -2)
    right = torch.tensordot(cores[2], cores[3].flatten(1), dims=1).flatten(1)
    for gram in (left.T @ left, right @ right.T):
        torch.testing.assert_close(gram, gram.diagonal().diag(), atol=1e-6, rtol=0)
    sigma = left.norm(dim=0) * right.norm(dim=1)
    dense = torch.linalg.svdvals(tt.dense().detach().double())
    torch.testing.assert_close(sigma, dense[: len(sigma)], atol=1e-5, rtol=1e-5)


def test_importance_is_the_running_mean_of_the_squared_first_order_change() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.9, steps=1000))
    controller.start_late()
    d = model.needed.tt.rank_params[1]
    mean: Tensor | None = None
    for _ in range(5):
        train(model, controller, optimizer, 1)
        assert d.grad is not None
        change = (d.detach() * d.grad).square()
        mean = change if mean is None else 0.95 * mean + 0.05 * change
        torch.testing.assert_close(optimizer.state[d][STATE], mean)


def test_a_gradient_that_is_not_finite_leaves_the_importance() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.9, steps=1000), "sgd")
    controller.start_late()
    train(model, controller, optimizer, 2)
    d = model.needed.tt.rank_params[1]
    before = optimizer.state[d][STATE].clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    controller._after_step(optimizer, (), {})
    torch.testing.assert_close(optimizer.state[d][STATE], before)


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
def test_no_momentum_brings_back_a_zeroed_gate(kind: str) -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, steps=1000), kind)
    controller.start_late()
    train(model, controller, optimizer, 5)
    trains = [model.table.tt, model.needed.tt, model.idle.tt]
    zero_gates_(trains, [optimizer], 200)
    zeroed = [(d, d == 0) for tt in trains for d in tt.rank_params]
    assert sum(int(mask.sum()) for _, mask in zeroed) > 0
    assert controller.size() <= 200
    train(model, controller, optimizer, 10)
    assert all((d[mask] == 0).all() for d, mask in zeroed)


def test_a_layer_that_is_frozen_within_the_stage_keeps_its_gates() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.3, steps=8))
    controller.start_late()
    train(model, controller, optimizer, 2)
    model.needed.requires_grad_(False)
    before, others = model.needed.tt.dense().clone(), unpruned_size(model.table.tt)
    train(model, controller, optimizer, 8)
    assert torch.equal(model.needed.tt.dense(), before)
    assert unpruned_size(model.table.tt) < others


def test_a_target_loss_makes_the_size_wait() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, steps=0, target_loss=1e-9))
    controller.start_late()
    size = controller.size()
    train(model, controller, optimizer, 60)
    assert controller.size() == size

    model, controller, optimizer = begun(LateStage(target_size=0.5, steps=0, target_loss=1e9))
    controller.start_late()
    train(model, controller, optimizer, 21)
    assert controller.size() <= size // 2


def test_by_surrogate_the_hook_scales_the_loss_and_adds_the_size() -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.5, shrink="surrogate"), "sgd")
    controller.start_late()
    optimizer.zero_grad()
    loss = model(torch.arange(12)).square().mean()
    loss.backward()
    controller.observe(loss)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    tables = [SizeTable([tt]) for tt in (model.table.tt, model.needed.tt, model.idle.tt)]
    assert controller.target_size is not None
    assert controller.target_loss is not None
    size = torch.tensor(float(controller.size()))
    surrogate = torch.stack([table.surrogate().detach() for table in tables]).sum()
    size_grad = SizeTable([model.needed.tt]).surrogate_grads()[1]
    optimizer.step()
    c_loss, c_size = late_scales(
        controller.late,
        loss=torch.tensor(controller.state_dict()["loss"]),
        target_loss=controller.target_loss,
        size=size,
        target_size=controller.target_size,
        surrogate=surrogate,
    )
    for name, p in model.named_parameters():
        extra = c_size * size_grad if name == "needed.tt.rank_params.1" else 0.0
        if "rank_params" not in name or name == "needed.tt.rank_params.1":
            torch.testing.assert_close(p.grad, before[name] * c_loss + extra)


@pytest.mark.parametrize(("behind", "c_loss", "c_size"), [("loss", 1.1, 0.01), ("size", 0.1, 1.01)])
def test_by_gate_mean_every_unpruned_gate_gets_its_share_of_a_constant(
    behind: str, c_loss: float, c_size: float
) -> None:
    # loss - 0.8 decides: a large one is behind any size
    model, controller, optimizer = begun(LateStage(target_size=0.5, shrink="gate_mean"), "sgd")
    controller.start_late()
    assert controller.target_loss == 0.8
    with torch.no_grad():
        model.needed.tt.rank_params[1][0] = 0.005  # pruned
    optimizer.zero_grad()
    model(torch.arange(12)).square().mean().backward()
    for _ in range(1000):
        controller.observe(torch.tensor(1e6 if behind == "loss" else 1e-3))
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    gates = [d for _, tt in named_trains(model) for d in tt.rank_params]
    share = c_size / sum(int((d > 0.01).sum()) for d in gates)
    optimizer.step()
    for name, p in model.named_parameters():
        if name in before:
            unpruned = (p.detach() + 0.0 > 0.01) if "rank_params" in name else torch.zeros_like(p)
            torch.testing.assert_close(p.grad, before[name] * c_loss + share * unpruned)


@pytest.mark.parametrize("shrink", ["sensitivity", "surrogate", "gate_mean"])
def test_a_resumed_late_stage_goes_on_to_the_bit(shrink: Any) -> None:
    model, controller, optimizer = begun(LateStage(target_size=0.4, shrink=shrink, steps=60))
    controller.start_late()
    train(model, controller, optimizer, 25)
    controller.prune_()
    state = json.loads(json.dumps(controller.state_dict()))
    other = copy.deepcopy(model)
    resumed_optimizer = optimizer_of(other, "adamw")
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed = RankController(other, QUIET, controller.late)
    resumed.load_state_dict(state)
    resumed.attach(resumed_optimizer)
    assert resumed.stage == "late"
    expected = train(model, controller, optimizer, 50)
    assert train(other, resumed, resumed_optimizer, 50) == expected
    assert resumed.size() == controller.size()
    assert resumed.state_dict() == controller.state_dict()


@pytest.mark.parametrize(("other", "said"), [(0.25, True), (90, True), (0.5, False), ("1kB", False)])
def test_another_target_of_a_resumed_stage_is_not_taken_in_silence(other: Any, said: bool) -> None:
    model, controller, _ = begun(LateStage(target_size=0.5))
    controller.start_late()
    resumed = RankController(model, late=LateStage(target_size=other))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.load_state_dict(controller.state_dict())
    assert resumed.target_size == controller.target_size
    assert [f"LateStage.target_size is {other!r}, but the late stage" in str(each.message) for each in caught] == [
        True
    ] * said


def test_canonical_form_refuses_parameters_that_are_not_finite() -> None:
    model = Small()
    with torch.no_grad():
        model.idle.tt.cores[1].fill_(torch.nan)
    before = [p.clone() for p in model.needed.parameters()]
    with pytest.raises(RankError, match="NaN or infinite"):
        canonicalize_([model.needed.tt, model.idle.tt])
    assert all(torch.equal(p, value) for p, value in zip(model.needed.parameters(), before, strict=True))


# --- the weights (c_L, c_S) of each stage -----------------------------------------------------------------------------


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
        ({"target_size": 0.2, "start_step": 0}, "start_step must be above 0, as .* an early one before it, got 0"),
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


# --- the canonical form of tensor trains ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw-fused", "adagrad", "nadam"])
def test_a_canonical_train_is_the_same_weight_and_its_slices_are_singular_directions(kind: str) -> None:
    torch.manual_seed(0)
    layer = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)), dtype=torch.float64)
    train = layer.tt
    with torch.no_grad():
        train.rank_params[1].copy_(torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 0.3, 1.0, 0.005, 1.5]))
    optimizer = OPTIMIZERS[kind](layer.parameters())
    layer(torch.ones(1, 12, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    dense, ranks, size = train.dense().detach(), unpruned_ranks(train), unpruned_size(train)
    assert ranks == (3, 6, 3)
    canonicalize_([train], [optimizer])
    torch.testing.assert_close(train.dense(), dense, rtol=0, atol=1e-12)
    assert (unpruned_ranks(train), unpruned_size(train)) == (ranks, size)  # what was pruned still is
    assert train.rank_params[1].tolist() == [1.0] * 6 + [0.0] * 3
    fresh = OPTIMIZERS[kind](layer.parameters())
    assert repr([optimizer.state[p] for p in train.parameters()]) == repr([fresh.state[p] for p in train.parameters()])
    # Zeroing one gate makes an error of its singular value, independently of the others.
    for k, sigma in enumerate(singular_values(train.spec, train.effective_cores())):
        for j in range(ranks[k]):
            with torch.no_grad():
                train.rank_params[k][j] = 0.0
                assert float((train.dense() - dense).norm()) == pytest.approx(float(sigma[j]), rel=1e-9)
                train.rank_params[k][j] = 1.0


def test_canonical_blocks_are_the_same_weight_and_their_components_singular_directions() -> None:
    torch.manual_seed(0)
    train = BTTLinear(BTTSpec(9, 11, (2, 5), (2, 6), ((3, 0), (1, 4))), dtype=torch.float64).tt
    with torch.no_grad():
        train.rank_params[0].copy_(torch.tensor([2.0, 0.0, 1.0, -1.0, 0.5, 0.3, 1.0, 0.005]))
    dense, size = train.dense().detach(), unpruned_size(train)
    canonicalize_([train])
    torch.testing.assert_close(train.dense(), dense, rtol=0, atol=1e-12)
    assert train.spec.rows_of_ranks == ((3, 0), (1, 4))
    assert train.rank_params[0].tolist() == [1, 1, 0, 0, 1, 1, 1, 0]  # the block of one component was pruned whole
    assert unpruned_size(train) == size
    whole = padded_weight(train.spec, train.effective_cores())
    errors = []
    for j in train.unpruned()[0].nonzero().flatten():
        with torch.no_grad():
            train.rank_params[0][j] = 0.0
            errors.append(float((padded_weight(train.spec, train.effective_cores()) - whole).norm()))
            train.rank_params[0][j] = 1.0
    sigma = singular_values(train.spec, train.effective_cores())[0]
    assert sorted(errors, reverse=True) == pytest.approx(sigma[:5].tolist(), rel=1e-9)


def test_devices_of_a_context_do_not_reach_into_canonical_blocks() -> None:
    model = nn.ModuleList([BTTLinear(BTTSpec(9, 11, (2, 5), (2, 6), ((3, 0), (1, 4))))])
    with torch.device("meta"):
        canonicalize_(layer.tt for layer in model)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
