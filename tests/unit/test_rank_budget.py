"""SVD rounding over all chains: the budget holds, the least goes first, and nothing else is touched."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.errors import RankError
from comera.nn.bonds import TensorTrain, named_trains
from comera.nn.linear import TTLinear
from comera.rank.budget import RoundReport, round_
from comera.rank.target import smallest_size, spec_size
from comera.tt.decompose import tt_svd
from comera.tt.spec import TTSpec

SPEC = TTSpec(12, 12, (3, 4), (4, 3), (1, 3, 9, 3, 1))
MATRIX = TTSpec(8, 8, (8,), (8,), (1, 8, 1))


def stored(model: nn.Module) -> int:
    return sum(spec_size(train.spec) for _, train in named_trains(model))


def with_singular_values(values: list[float], seed: int) -> TTLinear:
    """An 8 × 8 layer with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))[0] for _ in range(2))
    found = tt_svd(left @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ right, MATRIX)
    return TTLinear(TensorTrain.from_numbers(found.spec, found.cores, init_std=1.0))


def layers(count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(TTLinear(SPEC, dtype=torch.float64) for _ in range(count))


def test_the_least_relative_singular_values_of_all_layers_go_first() -> None:
    steep = with_singular_values([100.0, 50.0, 20.0, 1.0, 0.5, 0.2, 0.1, 0.05], 1)
    flat = with_singular_values([1.0] * 8, 2)
    model = nn.ModuleList([steep, flat])
    report = round_(model, 17 * 11)
    assert (steep.spec.bonds, flat.spec.bonds) == ((3,), (8,))
    dropped, whole = 1 + 0.25 + 0.04 + 0.01 + 0.0025, 100**2 + 50**2 + 20**2
    assert report.rows[0].error == pytest.approx((dropped / whole) ** 0.5, rel=1e-3)
    assert report.rows[1].error == 0.0


def test_weights_turn_the_choice_round() -> None:
    steep = with_singular_values([3.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5], 1)
    flat = with_singular_values([1.0] * 8, 2)
    model = nn.ModuleDict({"steep": steep, "flat": flat})
    round_(model, 17 * 10, weights={"steep.tt": 1e3, "flat.tt": 1e-3})
    assert (steep.spec.bonds, flat.spec.bonds) == ((8,), (2,))


def test_errors_are_those_of_the_weights_and_untouched_chains_stay_to_the_bit() -> None:
    model = layers()
    with torch.no_grad():  # one layer stands for nearly nothing else than rank 1: it pays for the others
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


@pytest.mark.parametrize("kind", ["adamw", "adagrad", "momentum", "sgd"])
def test_rounded_chains_start_afresh_in_the_optimizer_and_others_go_on(kind: str) -> None:
    model = nn.ModuleList([with_singular_values([9.0] + [0.01] * 7, 1), with_singular_values([1.0] * 8, 2)]).double()
    made: dict[str, Any] = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "adagrad": lambda: torch.optim.Adagrad(model.parameters(), lr=1e-2),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2),
    }
    optimizer = made[kind]()
    x = torch.randn(5, 8, dtype=torch.float64)

    def step() -> None:
        optimizer.zero_grad()
        sum(layer(x).square().mean() for layer in model).backward()  # type: ignore[union-attr]
        optimizer.step()

    step()
    kept = copy.deepcopy(dict(optimizer.state.get(model[1].tt.cores[0], {})))
    round_(model, stored(model) - 17 * 6, optimizers=[optimizer])
    assert (model[0].spec.bonds, model[1].spec.bonds) == ((2,), (8,))
    for parameter in model[0].tt.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            assert value is None or (value == 0).all()
            assert value is None or value.ndim == 0 or value.shape == parameter.shape
    after = optimizer.state.get(model[1].tt.cores[0], {})
    assert all(torch.equal(after[key], value) for key, value in kept.items() if isinstance(value, Tensor))
    before = [p.clone() for p in model.parameters()]
    step()
    assert all(
        p.isfinite().all() and not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
    )


def test_what_cannot_be_changes_nothing() -> None:
    model = layers()
    old = [p.clone() for p in model.parameters()]
    least = smallest_size(model)
    for target, message in [
        (stored(model) + 1, "at most the present"),
        (least - 1, f"below the smallest possible, {least}"),
        ("much", "expected bytes"),
    ]:
        with pytest.raises(RankError, match=message):
            round_(model, target)
    with torch.no_grad():
        model[2].tt.cores[1][0, 0, 0] = torch.nan
    with pytest.raises(RankError, match=r"'2.tt' holds NaN or infinite.*nothing was rounded"):
        round_(model, 0.5)
    with pytest.raises(RankError, match="compressed layers, got Linear without any"):
        round_(nn.Linear(2, 2), 0.5)
    for p, value in zip(model.parameters(), old, strict=True):
        assert torch.equal(torch.nan_to_num(p), torch.nan_to_num(value)) or bool(p.isnan().any())


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
    assert model[0].spec.bonds == (0, 0, 0)
    assert report.after <= report.target
    torch.testing.assert_close(model[1](x), expected)
    torch.testing.assert_close(model[0](x), torch.zeros(4, 12, dtype=torch.float64))

    model = layers()
    round_(model, 0.6, multiple=4)
    assert all(rank in (3, 4, 8, 9) for layer in model for rank in layer.spec.bonds)


def test_a_trained_dense_model_is_decomposed_and_rounded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 48))
    with torch.no_grad():  # what training leaves: a few strong directions and noise
        for layer in (model[0], model[2]):
            strong = torch.randn(layer.out_features, 4) @ torch.randn(4, layer.in_features) * 0.05
            layer.weight.copy_(strong + 1e-3 * torch.randn_like(layer.weight))
    x = torch.randn(100, 48)
    expected = model(x)
    comera.tensorize_(model, comera.TensorizeConfig(linear=comera.TT(order=2, rank=20), init="decompose"))
    report: RoundReport = comera.round_(model, 0.3)
    assert report.after <= 0.3 * report.before
    assert float((model(x) - expected).detach().norm() / expected.detach().norm()) < 0.05


def test_rounding_all_at_once_loses_no_more_than_cutting_each_layer_alike() -> None:
    model = nn.ModuleList(
        with_singular_values([float(2.0 ** (-j * steep)) for j in range(8)], seed)
        for seed, steep in enumerate((0.1, 0.5, 1.0, 2.0))
    )
    alike = copy.deepcopy(model)
    together = round_(model, 17 * 16)
    each = [round_(layer, 17 * 4).error for layer in alike]
    assert sum(row.error**2 for row in together.rows) < sum(error**2 for error in each)
