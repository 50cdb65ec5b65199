"""Rounding to a budget over random models: the target is met, and what was lost is what the report says."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.size import model_size
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.rank.budget import round_
from comera.rank.target import smallest_size
from comera.rank.trains import adaptable_trains
from comera.tt.spec import BTTSpec, Spec, TTMSpec

from ..helpers.oracle import padded_weight, unfoldings
from ..helpers.strategies import random_cores, specs

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@st.composite
def models(draw: st.DrawFn, *, pruned: bool = True) -> nn.ModuleList:
    """One to three layers of any format, embeddings with a tied head; some gates may be pruned."""
    layers: list[nn.Module] = []
    for seed, spec in enumerate(draw(st.lists(specs(), min_size=1, max_size=3))):
        entry = st.sampled_from([1.0, 0.4, 1.7] + pruned * [0.01, -0.3])
        gates = [draw(st.lists(entry, min_size=rank, max_size=rank)) for rank in spec.inner_ranks]
        rank_params = [torch.tensor(values, dtype=torch.float64) for values in gates]
        train = TensorTrain.from_tensors(spec, random_cores(spec, seed=seed), rank_params, init_std=1.0)
        if isinstance(spec, TTMSpec):
            layers += [TTMEmbedding(train), TTMProjection(train)]
        else:
            layers.append((BTTLinear if isinstance(spec, BTTSpec) else TTLinear)(train))
    return nn.ModuleList(layers)


def target_of(data: st.DataObject, model: nn.Module, multiple: int = 1) -> int:
    """Any target that can be met."""
    smallest, present = smallest_size(adaptable_trains(model).values(), multiple=multiple), model_size(model).tensorized
    assume(present > 0)
    return data.draw(st.integers(max(1, smallest), present), label="target")


def weights_of(model: nn.Module) -> list[Tensor]:
    """The weight of each tensor train with its padding."""
    return [padded_weight(train.spec, train.effective_cores()).detach() for _, train in named_trains(model)]


def usable(spec: Spec) -> tuple[int, ...]:
    """Ranks without what their neighbours cannot use."""
    ranks, sizes = list(spec.ranks), spec.reach
    for _ in range(spec.order):
        for k in range(1, spec.order):
            ranks[k] = min(ranks[k], ranks[k - 1] * sizes[k - 1], sizes[k] * ranks[k + 1])
    return tuple(ranks[1:-1])


@settings(max_examples=60, deadline=None)
@given(model=models(), data=st.data())
def test_the_target_is_met_and_the_errors_are_those_of_the_weights(model: nn.ModuleList, data: st.DataObject) -> None:
    target, present = target_of(data, model), model_size(model).tensorized
    before = weights_of(model)
    old = [[p.detach().clone() for p in train.parameters()] for _, train in named_trains(model)]
    report = round_(model, target)

    assert (report.before, report.target) == (present, target)
    assert report.after == model_size(model).tensorized <= target
    found = zip(named_trains(model), report.rows, before, weights_of(model), old, strict=True)
    for (name, train), row, weight, rounded, parameters in found:
        assert (row.name, row.after) == (name, train.spec.inner_ranks)
        norm = float(weight.norm())
        assert abs(float((rounded - weight).norm()) - row.error * norm) <= 1e-9 * max(1.0, norm)
        if row.before == row.after:
            assert row.error == 0
            assert all(torch.equal(a, b) for a, b in zip(parameters, train.parameters(), strict=True))
            continue
        if norm == 0:
            assert not any(row.after)
            continue
        assert row.after == usable(train.spec)
        assert all(0 < after <= before for after, before in zip(row.after, row.before, strict=True))
        # TT-SVD: no better than the best at one inner rank, no worse than the losses at all of them together
        tails = [
            float(torch.linalg.svdvals(matrix)[rank:].square().sum())
            for matrix, rank in zip(unfoldings(train.spec, weight), row.after, strict=True)
        ]
        squared, slack = (row.error * norm) ** 2, 1e-9 * norm**2
        assert max(tails) - slack <= squared <= sum(tails) + slack
    if report.after:
        assert not round_(model, report.after).changed


@settings(max_examples=40, deadline=None)
@given(model=models(), data=st.data(), multiple=st.sampled_from([2, 3, 8]))
def test_ranks_stay_at_multiples_or_at_what_can_be_used(
    model: nn.ModuleList, data: st.DataObject, multiple: int
) -> None:
    before = [train.spec for _, train in named_trains(model)]
    report = round_(model, target_of(data, model, multiple), multiple=multiple)
    assert report.after <= report.target
    for spec, row in zip(before, report.rows, strict=True):
        if row.before != row.after:
            full = usable(spec)
            assert all(r % multiple == 0 or r == most for r, most in zip(row.after, full, strict=True))


@settings(max_examples=40, deadline=None)
@given(model=models(pruned=False), data=st.data())
def test_what_is_left_over_is_too_little_for_any_rank(model: nn.ModuleList, data: st.DataObject) -> None:
    before = {name: train.spec for name, train in named_trains(model)}
    report = round_(model, target_of(data, model))
    for name, train in named_trains(model):
        ranks, sizes, reach = train.spec.ranks, train.spec.sizes, train.spec.reach
        for k, (most, rank) in enumerate(zip(usable(before[name]), train.spec.inner_ranks, strict=True), start=1):
            if 0 < rank < min(most, ranks[k - 1] * reach[k - 1], reach[k] * ranks[k + 1]):
                more = ranks[k - 1] * sizes[k - 1] + sizes[k] * ranks[k + 1] + 1
                assert report.after + more > report.target


@pytest.mark.parametrize("kind", OPTIMIZERS)
@settings(max_examples=20, deadline=None)
@given(model=models(), data=st.data())
def test_rounded_trains_lose_their_state_others_keep_it_and_steps_go_on(
    kind: str, model: nn.ModuleList, data: st.DataObject
) -> None:
    target = target_of(data, model)
    optimizer = OPTIMIZERS[kind](model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([train.dense().square().sum() for _, train in named_trains(model)]).sum().backward()
        optimizer.step()

    step()
    kept = {p: copy.deepcopy(dict(optimizer.state[p])) for p in model.parameters()}
    report = round_(model, target, optimizers=[optimizer])
    for row, (_, train) in zip(report.rows, named_trains(model), strict=True):
        for p in train.parameters():
            state = optimizer.state.get(p, {})
            if row.before != row.after:
                assert not state
                continue
            assert state.keys() == kept[p].keys()
            for key, value in kept[p].items():
                assert torch.equal(state[key], value) if isinstance(value, Tensor) else state[key] == value
    step()
    assert all(p.isfinite().all() for p in model.parameters())


@settings(max_examples=25, deadline=None)
@given(model=models(), data=st.data(), bad=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_parameters_that_are_not_finite_change_nothing(model: nn.ModuleList, data: st.DataObject, bad: float) -> None:
    target = target_of(data, model)
    assume(target < model_size(model).tensorized)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    compressed = [p for _, train in named_trains(model) for p in train.parameters() if p.numel()]
    with torch.no_grad():
        data.draw(st.sampled_from(compressed)).view(-1)[0] = bad
    values, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    specs_before = [train.spec for _, train in named_trains(model)]
    with pytest.raises(RankError, match=r"holds NaN or infinite values.*nothing was rounded"):
        round_(model, target, optimizers=[optimizer])
    assert [train.spec for _, train in named_trains(model)] == specs_before
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, values[key], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
