"""The rule of a step, applied by comera's AdamW as it reads gradients: the same training as by hook and torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.kernels.cpp import compiler
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import TTLinear
from comera.optim import AdamW, Muon
from comera.rank.controller import RankController
from comera.rank.importance import STATE
from comera.rank.objective import EarlyStage, LateStage, Shrink
from comera.rank.step_rule import StepRule
from comera.tt.spec import TTMSpec, TTSpec

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
RIDGE = EarlyStage(size_weight=0.5, ridge=0.02)


class Small(nn.Module):
    """A table and a layer, a layer without use, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TTMEmbedding(TTMSpec(12, 12, (3, 4), (3, 4), (1, 6, 1)))
        self.layer = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.unused = TTLinear(TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1)))
        self.norm = nn.LayerNorm(12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.layer(self.table(ids)))


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> list[StepRule]:
    """The rule of each step, as a list that grows."""
    given: list[StepRule] = []

    def give_to(rule: StepRule, optimizer: torch.optim.Optimizer) -> None:
        given.append(rule)
        before(rule, optimizer)

    before = StepRule.give_to
    monkeypatch.setattr(StepRule, "give_to", give_to)
    return given


def trained(kind: type[torch.optim.AdamW], early: EarlyStage, late: LateStage, **options: Any) -> tuple[Small, Any]:
    """A model and its optimizer after six steps, the last three of the late stage if that has a target."""
    torch.manual_seed(0)
    model = Small()
    if late.target_size is None or late.shrink != "sensitivity":  # in a canonical form zeros would have any directions
        with torch.no_grad():
            model.layer.tt.rank_params[1][2] = -0.5  # pruned
            model.table.tt.rank_params[0][0] = 0.005
    groups = [{"params": model.table.parameters()}, {"params": [*model.layer.parameters(), *model.norm.parameters()]}]
    optimizer = kind([*groups, {"params": model.unused.parameters()}], lr=1e-2, **options)
    controller = RankController(model, early, late).attach(optimizer)
    for step in range(6):
        if step == 3 and late.target_size is not None:
            controller.start_late()
        optimizer.zero_grad()
        loss = (model(torch.arange(12)) - torch.sin(torch.arange(144.0)).view(12, 12)).square().mean()
        loss.backward()
        controller.observe(loss)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("early", [EarlyStage(), RIDGE], ids=["size", "size and ridge"])
@pytest.mark.parametrize("shrink", [None, "sensitivity", "surrogate", "gate_mean"])
def test_it_trains_as_torchs_adamw_does(early: EarlyStage, shrink: Shrink | None, rules: list[StepRule]) -> None:
    late = LateStage() if shrink is None else LateStage(target_size=0.9, shrink=shrink, steps=1000)
    expected, by_torch = trained(torch.optim.AdamW, early, late)
    assert not any(rule.applied for rule in rules)
    rules.clear()
    model, optimizer = trained(AdamW, early, late)
    made = {0, 3} if shrink == "sensitivity" else {0}  # steps that make the state; a canonical form begins with none
    assert [rule.applied for rule in rules] == [step not in made for step in range(6)]
    for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        state, by = optimizer.state[p], by_torch.state[other]
        assert state.keys() == by.keys(), name
        for key, one, two in (("", p, other), *((key, state[key], by[key]) for key in state)):
            assert (one - two).norm() <= 1e-4 * two.norm(), (name, key)
    measured = [name for name, p in model.named_parameters() if STATE in optimizer.state[p]]
    used = [n for n, _ in model.named_parameters() if "rank_params" in n and not n.startswith("unused")]
    assert measured == (used if shrink == "sensitivity" else [])


def test_gradients_stay_those_of_the_loss(rules: list[StepRule]) -> None:
    model, optimizer = trained(AdamW, RIDGE, LateStage())
    gates = model.layer.tt.rank_params[1]
    assert gates.grad is not None
    before = gates.grad.clone()
    optimizer.step()
    assert rules[-1].applied
    assert torch.equal(gates.grad, before)
    slope = next(slope for d, slope in rules[-1].slopes if d is gates)
    assert slope[2] == 0  # pruned
    assert (slope[[0, 1, 3]] > 0).all()


def test_importance_is_left_by_a_gradient_that_is_not_finite(rules: list[StepRule]) -> None:
    model, optimizer = trained(AdamW, EarlyStage(), LateStage(target_size=0.9, steps=1000))
    gates = model.layer.tt.rank_params[1]
    before = optimizer.state[gates][STATE].clone()
    assert gates.grad is not None
    gates.grad[[0, 3]] = torch.tensor([torch.inf, torch.nan])
    optimizer.step()
    assert rules[-1].applied
    after = optimizer.state[gates][STATE]
    assert torch.equal(after[[0, 3]], before[[0, 3]])
    assert (after[[1, 4]] != before[[1, 4]]).all()


def test_each_of_two_optimizers_measures_its_own_gates(rules: list[StepRule]) -> None:
    torch.manual_seed(0)
    model = Small()
    own = [AdamW(model.table.parameters(), lr=1e-2), AdamW([*model.layer.parameters(), *model.norm.parameters()])]
    controller = RankController(model, late=LateStage(target_size=0.9, steps=1000, start_step=1))
    for optimizer in own:
        controller.attach(optimizer)
    for _ in range(3):
        loss = model(torch.arange(12)).square().mean()
        loss.backward()
        controller.observe(loss)
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
    assert rules[-1].applied
    for optimizer, train in zip(own, (model.table.tt, model.layer.tt), strict=True):
        assert set(optimizer.state) == {p for group in optimizer.param_groups for p in group["params"]}
        assert all(optimizer.state[d][STATE].all() for d in train.rank_params)


def test_where_torch_updates_a_group_the_rule_is_in_the_gradients(rules: list[StepRule]) -> None:
    late = LateStage(target_size=0.9, steps=1000)
    models = [trained(kind, RIDGE, late, amsgrad=True) for kind in (torch.optim.AdamW, AdamW)]
    assert not any(rule.applied for rule in rules)
    (expected, by_torch), (model, optimizer) = models
    for p, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=0, atol=0)
        torch.testing.assert_close(p.grad, other.grad, rtol=0, atol=0)
        for key in by_torch.state[other]:
            torch.testing.assert_close(optimizer.state[p][key], by_torch.state[other][key], rtol=0, atol=0)


def test_one_group_that_torch_updates_is_enough(rules: list[StepRule]) -> None:
    model, optimizer = trained(AdamW, RIDGE, LateStage())
    optimizer.param_groups[0]["amsgrad"] = True
    optimizer.state.clear()
    for _ in range(2):
        grad = model.layer.tt.rank_params[1].grad
        assert grad is not None
        before = grad.clone()
        optimizer.step()
        assert not rules[-1].applied
        assert (grad > before).any()


def test_other_optimizers_read_the_rule_in_gradients(rules: list[StepRule]) -> None:
    model = Small()
    optimizer = Muon(model)
    RankController(model, RIDGE).attach(optimizer)
    for _ in range(3):
        model(torch.arange(12)).square().mean().backward()
        optimizer.step()
    assert len(rules) == 3
    assert not any(rule.applied for rule in rules)


def test_a_second_controller_of_the_same_optimizer_counts_too(rules: list[StepRule]) -> None:
    model, optimizer = trained(AdamW, EarlyStage(), LateStage())
    RankController(model.layer, EarlyStage(size_weight=3.0)).attach(optimizer)
    gates = model.layer.tt.rank_params[1]
    assert gates.grad is not None
    before = gates.grad.clone()
    optimizer.step()
    assert [rule.applied for rule in rules[-2:]] == [True, False]
    assert (gates.grad > before).any()
