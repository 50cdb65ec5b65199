"""SVD rounding over all tensor trains: the budget holds, the least goes first, nothing else is touched."""

import copy
import warnings
from collections.abc import Sequence
from itertools import product
from math import log
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import comera
from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains
from comera.rank.allocate import allocate as allocate_with_tables
from comera.rank.budget import canonicalize_, round_
from comera.rank.report import RankReport
from comera.rank.target import smallest_size
from comera.rank.trains import adaptable_trains
from comera.tt import tt_spec
from comera.tt.decompose import round_cores
from comera.tt.format import spec_size
from comera.tt.spec import TTMSpec, TTSpec

from ...helpers.layers_to_round import OPTIMIZERS, SPEC, layers, stored, with_singular_values


def test_the_least_relative_singular_values_of_all_layers_go_first() -> None:
    steep = with_singular_values([100.0, 50.0, 20.0, 1.0, 0.5, 0.2, 0.1, 0.05], 1)
    flat = with_singular_values([1.0] * 8, 2)
    model = nn.ModuleList([steep, flat])
    report = round_(model, 17 * 11)
    assert (steep.spec.inner_ranks, flat.spec.inner_ranks) == ((3,), (8,))
    dropped, whole = 1 + 0.25 + 0.04 + 0.01 + 0.0025, 100**2 + 50**2 + 20**2
    assert report.rows[0].error == pytest.approx((dropped / whole) ** 0.5, rel=1e-3)
    assert report.rows[1].error == 0.0


def test_weights_reverse_the_choice() -> None:
    steep = with_singular_values([3.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5], 1)
    flat = with_singular_values([1.0] * 8, 2)
    model = nn.ModuleDict({"steep": steep, "flat": flat})
    round_(model, 17 * 10, weights={"steep.tt": 1e3, "flat.tt": 1e-3})
    assert (steep.spec.inner_ranks, flat.spec.inner_ranks) == ((8,), (2,))


def test_errors_are_those_of_the_weights_and_untouched_trains_stay_to_the_bit() -> None:
    model = layers()
    with torch.no_grad():  # one layer is close to rank 1: it pays for the others
        for d in model[1].tt.rank_params:
            d[1:] *= 0.02
    before = [train.dense().detach() for _, train in named_trains(model)]
    cores = [[p.clone() for p in layer.tt.parameters()] for layer in model]
    report = round_(model, stored(model) - 150)
    assert report.after <= report.target == report.before - 150
    changed = [row.before != row.after for row in report.rows]
    assert changed[1]
    for layer, dense, row, old in zip(model, before, report.rows, cores, strict=True):
        measured = float((layer.tt.dense().detach() - dense).norm() / dense.norm())
        assert measured == pytest.approx(row.error, abs=1e-9)
        if row.before == row.after:
            assert all(torch.equal(p, value) for p, value in zip(layer.tt.parameters(), old, strict=True))
    assert report.error == max(row.error for row in report.rows)


def step(model: nn.ModuleList, optimizer: torch.optim.Optimizer) -> None:
    x = torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8)
    optimizer.zero_grad()
    torch.stack([layer(x).square().mean() for layer in model]).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rounded_trains_start_afresh_in_the_optimizer_and_others_go_on(kind: str) -> None:
    model = nn.ModuleList([with_singular_values([9.0] + [0.01] * 7, 1), with_singular_values([1.0] * 8, 2)]).double()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    others = list(model[1].tt.parameters())
    kept = [copy.deepcopy(optimizer.state.get(p, {})) for p in others]
    round_(model, stored(model) - 17 * 6, optimizers=[optimizer])
    assert (model[0].spec.inner_ranks, model[1].spec.inner_ranks) == ((2,), (8,))
    assert repr([optimizer.state.get(p, {}) for p in others]) == repr(kept)

    fresh = copy.deepcopy(model)
    step(fresh, OPTIMIZERS[kind](fresh.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer)
    for p, first in zip(model[0].tt.parameters(), fresh[0].tt.parameters(), strict=True):
        torch.testing.assert_close(p, first, rtol=0, atol=0)
    for p, old in zip(model.parameters(), before, strict=True):
        assert p.isfinite().all()
        assert not torch.equal(p, old)


def test_a_wrapped_optimizer_is_found() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = nn.ModuleList([with_singular_values([9.0, 5.0] + [0.01] * 6, 1).double()])
    inner = torch.optim.AdamW(model.parameters())
    step(model, inner)
    round_(model, 0.5, optimizers=[Wrapper(inner)])
    assert [p for p, state in inner.state.items() if state] == [model[0].bias]


def test_what_cannot_be_changes_nothing() -> None:
    model = layers()
    old = [p.clone() for p in model.parameters()]
    least = smallest_size(adaptable_trains(model).values())
    for target, message in [
        (stored(model) + 1, "at most the present"),
        (least - 1, f"below the smallest possible, {least}"),
        ("much", "expected bytes"),
    ]:
        with pytest.raises(RankError, match=message):
            round_(model, target)
    for weights, message in [
        ({"3.tt": 1.0}, r"expected finite values >= 0 for tensor trains \(0.tt, 1.tt, 2.tt\), got '3.tt': 1.0"),
        ({"0.tt": -1.0}, "got '0.tt': -1.0"),
        ({"0.tt": float("nan")}, "got '0.tt': nan"),
    ]:
        with pytest.raises(RankError, match=message):
            round_(model, 0.5, weights=weights)
    with pytest.raises(RankError, match="multiples of 1 or more, got 0"):
        round_(model, 0.5, multiple=0)
    for broken in (model[2].tt.cores[1][0, 0], model[2].tt.rank_params[1]):
        with torch.no_grad():
            good = broken.clone()
            broken[0] = torch.nan
        with pytest.raises(RankError, match=r"'2.tt' holds NaN or infinite.*nothing was rounded"):
            round_(model, 0.5)
        with pytest.raises(RankError, match=r"holds NaN or infinite.*nothing was rounded"):
            canonicalize_(layer.tt for layer in model)
        with torch.no_grad():
            broken.copy_(good)
    with pytest.raises(RankError, match="compressed layers, got Linear without any"):
        round_(nn.Linear(2, 2), 0.5)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), old, strict=True))


def test_a_met_target_changes_nothing() -> None:
    model = layers()
    old = [p.clone() for p in model.parameters()]
    report = round_(model, 1.0)
    assert not report.changed
    assert report.error == 0.0
    assert str(report).startswith("rounded nothing: ")
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), old, strict=True))


def test_zero_layers_go_for_free_and_ranks_stay_at_multiples() -> None:
    model = layers()
    with torch.no_grad():
        model[0].tt.cores[2].zero_()
    x = torch.randn(4, 12, dtype=torch.float64)
    expected = model[1](x)
    report = round_(model, stored(model) - spec_size(SPEC))
    assert model[0].spec.inner_ranks == (0, 0, 0)
    assert report.after <= report.target
    torch.testing.assert_close(model[1](x), expected)
    torch.testing.assert_close(model[0](x), torch.zeros(4, 12, dtype=torch.float64))

    model = layers()
    round_(model, 0.6, multiple=4)
    assert all(rank in (3, 4, 8, 9) for layer in model for rank in layer.spec.inner_ranks)


def test_pruned_gates_count_as_zero_and_go_without_error() -> None:
    model = layers(1)
    train = model[0].tt
    with torch.no_grad():
        train.rank_params[1][3:] = -0.5
    dense = train.dense().detach()
    report = round_(model, stored(model) - 50)
    assert train.spec.inner_ranks == (3, 3, 3)
    assert report.error < 1e-12
    torch.testing.assert_close(train.dense(), dense, rtol=0, atol=1e-12)


def test_tied_trains_are_rounded_once() -> None:
    table = TTMEmbedding(TTMSpec(30, 12, (5, 6), (3, 4), (1, 12, 1)), dtype=torch.float64)
    model = nn.ModuleDict({"table": table, "head": TTMProjection(table.tt)})
    report = round_(model, 0.5)
    assert [row.name for row in report.rows] == ["table.tt"]
    assert report.after == stored(model) == spec_size(table.spec) <= report.before // 2
    assert model["head"].tt is table.tt
    ids, x = torch.arange(30), torch.randn(2, 12, dtype=torch.float64)
    torch.testing.assert_close(table(ids), table.weight)
    torch.testing.assert_close(model["head"](x), x @ table.weight.T)


def test_cores_come_balanced_in_their_dtype_and_a_held_loss_does_no_harm() -> None:
    torch.manual_seed(0)
    layer = TTLinear(SPEC, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.tt.rank_params[1].copy_(torch.linspace(1, 1 / 3, 9))
    x = torch.ones(2, 12, dtype=torch.bfloat16)
    loss = layer(x).sum()
    loss.backward()
    parameters = list(layer.parameters())
    exact = copy.deepcopy(layer).double()
    report, wanted = round_(layer, 0.6), round_(exact, 0.6)
    assert report.rows == wanted.rows  # absorbed in float64: bfloat16 keeps only the cast at the end
    assert all(a is b for a, b in zip(parameters, layer.parameters(), strict=True))
    assert {p.dtype for p in layer.tt.cores} == {torch.bfloat16}
    norms = [float(core.detach().double().norm()) for core in layer.tt.cores]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-2)
    assert all((d == 1).all() for d in layer.tt.rank_params)
    layer(x).sum().backward()
    assert [tuple(core.grad.shape) for core in layer.tt.cores] == list(layer.spec.core_shapes)
    assert loss.grad_fn is not None


def test_bytes_count_what_the_trains_take_and_an_empty_model_is_no_error() -> None:
    model = nn.ModuleList([*layers(1), TTLinear(SPEC, dtype=torch.bfloat16)])
    count, gates = spec_size(SPEC), sum(SPEC.inner_ranks)
    stored = 8 * count + 2 * (count - gates) + 4 * gates  # gates of bfloat16 cores are float32
    with pytest.warns(UserWarning, match="in bfloat16 and float64"):
        assert round_(model, f"{8 * count} B").target == 8 * count * 2 * count // stored
    empty = TTLinear(SPEC.with_ranks(0))
    assert round_(empty, 0.5).after == 0
    with pytest.raises(RankError, match="at most the present 0 parameters"):
        round_(empty, "1 kB")


def test_the_report_reads_as_a_table() -> None:
    steep, flat = with_singular_values([100.0] + [1.0] * 7, 1), with_singular_values([1.0] * 8, 2)
    report = round_(nn.ModuleDict({"steep": steep, "flat": flat}), 17 * 9 + 5)
    assert report.table().rows == (("steep.tt", "8", "1", "2.64%"),)
    assert repr(report) == "<RankReport: 1 of 2 tensor trains rounded: 272 -> 153 parameters (56.2%, target 158)>"
    assert report.to_frame()["after"].to_list() == ["1", "8"]


def test_the_number_of_threads_is_as_before_whatever_happens() -> None:
    model = layers(1)
    torch.set_num_threads(2)
    round_(model, 0.5)
    canonicalize_([model[0].tt])
    with torch.no_grad():
        model[0].tt.cores[0].fill_(torch.inf)
    with pytest.raises(RankError):
        round_(model, 0.5)
    assert torch.get_num_threads() == 2


# --- which ranks are kept ---------------------------------------------------------------------------------------------


ONE = TTSpec(12, 12, (12,), (12,), (1, 6, 1))  # 24 core entries and a gate per rank


TWO = TTSpec(12, 12, (3, 4), (12,), (1, 3, 12, 1))


def allocate(
    specs: Sequence[TTSpec], importances: Sequence[Sequence[Sequence[float]]], budget: int, **options: Any
) -> list[tuple[int, ...]]:
    return allocate_with_tables(specs, importances, [], budget, **options)[0]


def size_of(specs: Sequence[TTSpec], ranks: Sequence[Sequence[int]]) -> int:
    return sum(spec_size(spec.with_ranks((1, *inner, 1))) for spec, inner in zip(specs, ranks, strict=True))


def lost(importances: list[list[list[float]]], ranks: Sequence[Sequence[int]]) -> float:
    """What a choice of ranks costs: Σ T log(T / t) over all inner ranks."""
    return sum(
        sum(gates) * log(sum(gates) / sum(gates[len(gates) - rank :]))
        for train, inner in zip(importances, ranks, strict=True)
        for gates, rank in zip(train, inner, strict=True)
        if rank
    )


def test_the_least_important_gates_of_all_trains_go_first() -> None:
    strong, weak = [[4.0, 5.0, 6.0, 7.0, 8.0, 9.0]], [[0.1, 0.1, 0.1, 0.1, 0.2, 4.0]]
    assert allocate([ONE, ONE], [strong, weak], 25 * 7) == [(6,), (1,)]
    assert allocate([ONE, ONE], [strong, weak], 25 * 12) == [(6,), (6,)]
    assert allocate([ONE, ONE], [strong, weak], 25 * 3) == [(2,), (1,)]


def test_what_has_not_been_measured_goes_only_as_far_as_the_budget_asks() -> None:
    """As after a first step without labels, or of an expert that got no token."""
    spec = tt_spec(64, 64, order=4, rank=8)
    size, zeros, ones = spec_size(spec), [[0.0] * 8] * 3, [[1.0] * 8] * 3
    assert allocate([spec, spec], [zeros, zeros], 2 * size) == [(8, 8, 8)] * 2
    for importances in ([zeros, zeros], [zeros, ones]):
        ranks = allocate([spec, spec], importances, 2 * size - 10)
        assert 1.9 * size < sum(spec_size(spec, inner) for inner in ranks) <= 2 * size - 10
    assert ranks[1] == (8, 8, 8)


def test_no_rank_is_cut_to_one_while_others_stay_high() -> None:
    spec = TTSpec(512, 512, (8, 8, 8), (8, 8, 8), (1, 8, 30, 30, 30, 8, 1))
    flat = [[1 / rank] * rank for rank in spec.inner_ranks]
    (ranks,) = allocate([spec], [flat], spec_size(spec) // 5)
    assert min(ranks) >= 5  # by importance per parameter alone: 1 in the middle, 30 beside it


@pytest.mark.parametrize(("budget", "ranks"), [(10**6, (3, 12)), (1, (1, 1)), (0, (1, 1))])
def test_from_everything_to_the_smallest(budget: int, ranks: tuple[int, ...]) -> None:
    assert allocate([TWO], [[[1.0] * 3, [1.0] * 12]], budget) == [ranks]


def test_empty_trains_and_trains_without_inner_ranks_stay() -> None:
    alone = TTSpec(12, 1, (12,), (1,), (1, 1, 1))
    assert allocate([ONE, alone], [[[]], [[2.0]]], 1) == [(0,), (1,)]
    assert allocate([], [], 5) == []


def test_gates_of_no_importance_are_free() -> None:
    assert allocate([ONE, ONE], [[[0.0] * 6], [[1.0] * 6]], 25 * 7) == [(1,), (6,)]


@pytest.mark.parametrize("budget", [25 * 11, 25 * 7, 25 * 5, 1])
def test_ranks_stay_at_multiples(budget: int) -> None:
    ranks = allocate([ONE, ONE], [[[1.0] * 6], [[2.0] * 6]], budget, multiple=4)
    assert all(rank in (4, 6) for (rank,) in ranks)
    assert size_of([ONE, ONE], ranks) <= max(budget, 25 * 8)


def test_rounding_takes_out_what_the_neighbours_do_not_allow() -> None:
    spec = TTSpec(24, 24, (2, 12), (12, 2), (1, 2, 20, 2, 1))
    wide = [[1.0] * 2, [1e-9] * 19 + [1.0], [1.0] * 2]
    (ranks,) = allocate([spec], [wide], 60, rounding=True)
    assert ranks[1] <= 12 * min(ranks[0], ranks[2])
    assert size_of([spec], [ranks]) <= 60


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_choice_is_the_best_of_its_size_but_for_what_is_given_back(data: st.DataObject) -> None:
    specs = [TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 5, 3, 1)), TTSpec(8, 9, (2, 4), (9,), (1, 2, 6, 1))]
    entries = st.floats(0.01, 10)
    trains = [
        [sorted(data.draw(st.lists(entries, min_size=rank, max_size=rank))) for rank in spec.inner_ranks]
        for spec in specs
    ]
    largest, smallest = size_of(specs, [spec.inner_ranks for spec in specs]), size_of(specs, [(1, 1, 1), (1, 1)])
    budget = data.draw(st.integers(smallest, largest))
    rounding = data.draw(st.booleans())
    found = allocate(specs, trains, budget, rounding=rounding)
    assert size_of(specs, found) <= budget
    if rounding:
        assert all(possible(spec, inner) for spec, inner in zip(specs, found, strict=True))
    # No choice whose size is at most halfway between the smallest and the budget costs less.
    choices = [
        [
            inner
            for inner in product(*(range(1, rank + 1) for rank in spec.inner_ranks))
            if not rounding or possible(spec, inner)
        ]
        for spec in specs
    ]
    best = min(
        lost(trains, choice) for choice in product(*choices) if size_of(specs, choice) <= (budget + smallest) / 2
    )
    assert lost(trains, found) <= best + 1e-9


def possible(spec: TTSpec, inner: Sequence[int]) -> bool:
    ends = [1, *inner, 1]
    return all(a <= n * b and b <= n * a for a, n, b in zip(ends[:-1], spec.sizes, ends[1:], strict=True))


@pytest.mark.parametrize("part", [0.3, 0.5, 0.7])
def test_the_choice_comes_near_the_best_of_all(part: float) -> None:
    specs = [TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 5, 3, 1)), TTSpec(8, 9, (2, 4), (3, 3), (1, 2, 6, 3, 1))]
    importances = [
        [[0.3 * 1.7**j * (1 + k + 2 * c) for j in range(rank)] for k, rank in enumerate(spec.inner_ranks)]
        for c, spec in enumerate(specs)
    ]
    budget = int(part * size_of(specs, [spec.inner_ranks for spec in specs]))
    found = lost(importances, allocate(specs, importances, budget))
    choices = product(*(product(*(range(1, rank + 1) for rank in spec.inner_ranks)) for spec in specs))
    best = min(lost(importances, choice) for choice in choices if size_of(specs, choice) <= budget)
    assert found <= 1.1 * best  # measured: up to 1.07; what is left of the budget shrinks with more trains


# --- how much is lost -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [2, 4])
def test_a_trained_dense_model_is_decomposed_and_rounded(order: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48))
    with torch.no_grad():  # what training leaves: a few strong directions, not equally many everywhere, and noise
        for layer, rank in ((model[0], 2), (model[2], 8)):
            strong = torch.randn(layer.out_features, rank) @ torch.randn(rank, layer.in_features) * 0.05
            layer.weight.copy_(strong + 1e-3 * torch.randn_like(layer.weight))
    x = torch.randn(100, 48)
    expected = model(x)
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=order, rank=24), init="decompose"))
    uniform = copy.deepcopy(model)
    report: RankReport = comera.round_(model, 0.3)
    assert report.after <= 0.3 * report.before
    assert float((model(x) - expected).detach().norm() / expected.detach().norm()) < 0.05
    each = [round_(uniform[0], 0.3).error, round_(uniform[2], 0.3).error]
    assert sum(row.error**2 for row in report.rows) < 0.1 * sum(error**2 for error in each)


def test_bytes_of_several_dtypes_are_an_estimate_that_is_said() -> None:
    model = layers()
    next(iter(model)).to(torch.bfloat16)
    with pytest.warns(
        UserWarning, match=r"target='2kB'.*stored in bfloat16 and float\d\d.*give a number of parameters"
    ):
        round_(model, "2kB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        round_(model, 0.9)
        round_(layers(), "2kB")


def test_rounding_all_at_once_loses_no_more_than_cutting_each_layer_uniformly() -> None:
    model = nn.ModuleList(
        with_singular_values([float(2.0 ** (-j * steep)) for j in range(8)], seed)
        for seed, steep in enumerate((0.1, 0.5, 1.0, 2.0))
    )
    uniform = copy.deepcopy(model)
    together = round_(model, 17 * 16)
    each = [round_(layer, 17 * 4).error for layer in uniform]
    assert sum(row.error**2 for row in together.rows) < sum(error**2 for error in each)


def test_larger_budgets_lose_less_and_are_used() -> None:
    matrices = [with_singular_values([float(2.0 ** (-j * rate)) for j in range(8)], 7) for rate in (0.1, 0.4, 0.9)]
    trains = layers()
    for layer in trains:
        with torch.no_grad():
            layer.tt.rank_params[1].copy_(0.7 ** torch.arange(9))
    # Parameters that one more rank takes at the largest inner rank: less than that stays unused.
    for model, most in ((nn.ModuleList(matrices), 17), (trains, 4 * 3 + 4 * 3 + 1)):
        smallest, whole = smallest_size(adaptable_trains(model).values()), stored(model)
        errors = []
        for target in range(smallest, whole, 16):
            report = round_(copy.deepcopy(model), target)
            assert target - most < report.after <= target
            errors.append(sum(row.error**2 for row in report.rows))
        assert errors == sorted(errors, reverse=True)


def decaying(specs: list[TTSpec], decays: tuple[float, ...], seed: int) -> nn.ModuleList:
    """Layers whose gates decay along each inner rank, at a rate of each layer's own."""
    torch.manual_seed(seed)
    model = nn.ModuleList(TTLinear(spec, dtype=torch.float64) for spec in specs)
    for (_, train), decay in zip(named_trains(model), decays, strict=True):
        train.threshold = 0.0
        with torch.no_grad():
            for d in train.rank_params:
                d.copy_(decay ** torch.arange(len(d)))
    return model


@pytest.mark.parametrize(("decays", "seed"), [((0.3, 0.9), 4), ((0.7, 0.3), 1), ((1.0, 1.0), 6), ((0.5, 0.5), 0)])
def test_the_error_comes_near_the_best_of_all_ranks(decays: tuple[float, float], seed: int) -> None:
    specs = [TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 5, 3, 1)), TTSpec(8, 9, (2, 4), (9,), (1, 2, 6, 1))]
    model = decaying(specs, decays, seed)
    choices = []  # per layer the squared error of all ranks, by size
    for _, train in named_trains(model):
        found = [
            round_cores(train.spec, train.effective_cores(), ranks=(1, *inner, 1))
            for inner in product(*(range(1, rank + 1) for rank in train.spec.inner_ranks))
        ]
        choices.append([(spec_size(rounded.spec), rounded.error**2) for rounded in found])
    for part in (0.3, 0.5, 0.7, 0.8):
        budget = int(part * stored(model))
        best = min(e + f for (s, e), (t, f) in product(*choices) if s + t <= budget)
        together = sum(row.error**2 for row in round_(copy.deepcopy(model), budget).rows)
        # Measured over 336 such models and budgets: 1.00 in the median, 1.47 at worst (the first of these).
        assert best * (1 - 1e-9) <= together <= 1.5 * best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("rank", "factor"), [(2, 1.2), (3, 1.2), (4, 1.1), (6, 0.81), (8, 0.6), (12, 0.11)])
def test_different_layers_lose_less_than_a_uniform_rank_unless_cut_to_almost_nothing(
    rank: int, factor: float, seed: int
) -> None:
    # Squared errors, measured over 20 seeds: 0.73 to 0.80 of those of a uniform rank 6. At ranks 2 and 3, where a
    # layer keeps half of its weight at best, up to 1.20: the losses at a train's inner ranks overlap then, and allocate
    # counts each for itself.
    spec = TTSpec(48, 48, (6, 8), (8, 6), (1, 6, 24, 6, 1))
    model = decaying([spec] * 4, (1.0, 0.9, 0.7, 0.5), seed)
    ranks = (1, *(min(rank, most) for most in spec.inner_ranks), 1)
    uniform = [round_cores(spec, train.effective_cores(), ranks=ranks) for _, train in named_trains(model)]
    report = round_(model, sum(spec_size(cut.spec) for cut in uniform))
    assert sum(row.error**2 for row in report.rows) <= factor * sum(cut.error**2 for cut in uniform)
