"""SVD rounding over all tensor trains: the budget holds, the least goes first, nothing else is touched."""

import copy

import pytest
import torch
from torch import nn

from comera.errors import RankError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains
from comera.rank.budget import canonicalize_, round_
from comera.rank.target import smallest_size
from comera.rank.trains import adaptable_trains
from comera.tt.format import spec_size
from comera.tt.spec import TTMSpec

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
    model, threads = layers(1), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        round_(model, 0.5)
        canonicalize_([model[0].tt])
        with torch.no_grad():
            model[0].tt.cores[0].fill_(torch.inf)
        with pytest.raises(RankError):
            round_(model, 0.5)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
