"""`tensorize_(model, ratio=...)`: the whole model becomes that many times smaller, whatever its layers."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, TensorizeReport, tensorize_
from comera.convert.ratio import LEAST_ROW, fit_ranks
from comera.errors import ConversionError, SpecError
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.size import model_size
from comera.nn.tensor_train import named_trains
from comera.tt.format import spec_size
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

FORMATS = {
    "default": None,
    "TT": TensorizeConfig(linear=TT()),
    "TT of order 4": TensorizeConfig(linear=TT(order=4), embedding=TTM(order=2)),
    "one layer dense": TensorizeConfig(overrides={"up": None}),
    "a layer of its own": TensorizeConfig(overrides={"up": TT(order=2)}),
}


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 128)
        self.up = nn.Linear(128, 512)
        self.norm = nn.LayerNorm(512)
        self.down = nn.Linear(512, 128, bias=False)
        self.head = nn.Linear(128, 1000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("ratio", [1.2, 2, 3.1])
def test_the_model_is_as_small_as_asked_and_hardly_smaller(ratio: float, formats: str, tied: bool) -> None:
    model = Net(tied)
    before = count(model)
    report = tensorize_(model, FORMATS[formats], ratio=ratio)
    assert count(model) == report.total
    assert report.dense_total == before
    assert 0.98 * before < report.total * ratio <= before


@pytest.mark.parametrize(("tied", "layers"), [("untie", ["embed", "head"]), ("share", ["embed"])])
def test_a_weight_that_is_untied_counts_once_in_the_dense_model(tied: str, layers: list[str]) -> None:
    model = Net(tied=True)
    before = count(model)
    report = tensorize_(model, TensorizeConfig(tied=tied), ratio=4)  # type: ignore[arg-type]
    assert {name.removesuffix(".tt") for name, _ in named_trains(model)} == {*layers, "up", "down"}
    assert 0.98 * before < 4 * report.total <= before


@pytest.mark.parametrize(
    ("tied", "config", "ratio", "plain"),
    [
        (True, None, 2.5, True),
        (True, None, 10, False),  # too few parameters for each row
        (False, None, 2.5, False),  # a lookup alone has nothing from it
        (True, TensorizeConfig(tied="untie"), 2.5, False),
        (True, TensorizeConfig(TT(), TTM(order=4)), 2.5, False),
        (True, TensorizeConfig(TT(), TTM()), 2.5, True),
        (True, TensorizeConfig(overrides={"head": None}), 1.5, False),
    ],
)
def test_a_table_that_makes_logits_too_becomes_one_of_plain_low_rank(
    tied: bool, config: TensorizeConfig | None, ratio: float, plain: bool
) -> None:
    model = Net(tied)
    before = count(model)
    assert 0.97 * before < ratio * tensorize_(model, config, ratio=ratio).total <= before
    spec = dict(named_trains(model))["embed.tt"].spec
    assert isinstance(spec, TTMSpec)
    assert (spec.row_modes == (1000, 1)) == plain
    assert spec.order == (2 if plain else 4)
    assert not plain or spec.ranks[1] >= LEAST_ROW


def test_layers_get_about_the_same_share_of_their_full_rank() -> None:
    specs = [btt_spec(768, 768), btt_spec(768, 3072), tt_spec(768, 768, rank=1), ttm_spec(3052, 768, rank=1)]
    fitted = fit_ranks(specs, 600_000, min_ratio=1.0)
    shares = [max(spec.inner_ranks) / spec.levels[-1] for spec in fitted]
    assert max(shares) - min(shares) < 1 / 700  # one rank of the layer with the fewest


def test_small_layers_beside_large_tables_keep_ranks() -> None:
    model = nn.ModuleList(
        [nn.Embedding(100_000, 64), nn.Embedding(300_000, 64), nn.Linear(64, 256), nn.Linear(256, 32)]
    )
    report = tensorize_(model, TensorizeConfig(linear=TT(order=2), embedding=TTM(order=2)), ratio=50)
    assert report.total <= report.dense_total / 50
    *tables, up, down = report.rows
    assert all(max(row.spec.inner_ranks) >= 16 for row in (up, down) if row.spec)
    assert sum(row.stored for row in tables) > 0.9 * report.size.tensorized


LAYERS = st.tuples(st.integers(8, 300), st.integers(8, 300), st.sampled_from([TT(2), TT(4), BTT(), TTM(3)]))


@settings(max_examples=40, deadline=None)
@given(layers=st.lists(LAYERS, min_size=1, max_size=4), part=st.floats(0, 1))
def test_any_budget_is_met_and_used(layers: list[tuple[int, int, TT | BTT | TTM]], part: float) -> None:
    """The budget holds, every layer is smaller than dense, and no rank could rise any more."""
    specs = [replace(form, rank=1).spec(rows, cols) for rows, cols, form in layers]
    specs = [spec for spec in specs if spec.ratio > 1]
    least = sum(map(spec_size, specs))
    budget = least + int(part * sum(spec.dense_numel for spec in specs))
    fitted = fit_ranks(specs, budget, min_ratio=1.0)
    left = budget - sum(map(spec_size, fitted))
    assert left >= 0
    assert all(spec.ratio > 1 for spec in fitted)
    for spec in fitted:
        level = next(each for each in spec.levels if max(spec.ranks_at(each)) >= max(spec.inner_ranks))
        more = [rank for rank in spec.levels if rank > level][:1]
        for rank in more:
            raised = spec_size(spec, spec.ranks_at(rank))
            assert raised - spec_size(spec) > left or raised >= spec.dense_numel


def test_a_model_on_the_meta_device_gets_the_same_ranks() -> None:
    with torch.device("meta"):
        empty = Net()
    assert _specs(tensorize_(empty, ratio=4)) == _specs(tensorize_(Net(), ratio=4))
    assert all(p.is_meta for p in empty.parameters())


def test_dtype_and_bias_are_kept() -> None:
    model = Net().to(torch.bfloat16)
    bias = model.up.bias
    tensorize_(model, ratio=4)
    assert isinstance(model.up, BTTLinear)
    assert model.up.bias is bias
    assert {core.dtype for _, train in named_trains(model) for core in train.cores} == {torch.bfloat16}


def test_converting_again_at_a_ratio_that_is_met_changes_nothing() -> None:
    model = Net()
    first = tensorize_(model, ratio=4)
    again = tensorize_(model, ratio=4)
    assert (again.total, again.dense_total) == (first.total, first.dense_total)
    with pytest.raises(ConversionError, match=r"ratio=40: Net can become 4 times smaller at most"):
        tensorize_(model, ratio=40)


def test_what_is_compressed_already_counts_as_dense_before() -> None:
    model = Net()
    dense = count(model)
    tensorize_(model, TensorizeConfig(linear=None, embedding=TTM(order=2, rank=20)))
    report = tensorize_(model, ratio=5)
    assert report.dense_total == dense
    assert 0.98 * dense < 5 * count(model) <= dense


@pytest.mark.parametrize("linear", [BTT(), TT(order=4)])
def test_a_trained_model_is_decomposed_to_the_ratio(linear: TT | BTT) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 120), nn.ReLU(), nn.Linear(120, 96)).double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    broken = copy.deepcopy(model)
    nn.init.constant_(broken[0].weight, float("nan"))
    with pytest.raises(SpecError, match="NaN"):
        tensorize_(broken, TensorizeConfig(linear=linear), ratio=2, init="decompose")
    report = tensorize_(model, TensorizeConfig(linear=linear), ratio=2, init="decompose")
    for name, row in zip(("0", "2"), (row for row in report.rows if row.compressed), strict=True):
        weight = before[f"{name}.weight"]
        error = model.get_submodule(name).weight.detach() - weight  # type: ignore[operator]
        found = float(error.norm() / weight.norm())
        assert row.error == pytest.approx(found, abs=1e-9)
        assert 0.1 < found < 0.8
    assert report.total * 2 <= report.dense_total


def test_a_decomposition_to_a_ratio_keeps_the_largest_singular_values_of_all_blocks() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[0].weight[:, 32:] *= 1e-6  # the later input blocks matter less
    tensorize_(model, TensorizeConfig(BTT()), ratio=2.2, init="decompose")
    spec = model[0].spec
    assert isinstance(model[0], BTTLinear)
    first, last = spec.rows_of_ranks[0], spec.rows_of_ranks[-1]
    assert min(first) > max(last)


def test_a_trained_model_is_decomposed_into_two_factors_by_default() -> None:
    trained, fresh = Net(), Net()
    tensorize_(trained, ratio=3, init="decompose")
    tensorize_(fresh, ratio=3)
    assert {(type(train.spec), train.spec.order) for _, train in named_trains(trained)} == {(TTSpec, 2), (TTMSpec, 2)}
    assert BTTSpec in {type(train.spec) for _, train in named_trains(fresh)}


def test_the_size_must_be_given_once() -> None:
    model = Net()
    kept = [id(p) for p in model.parameters()]
    cases: list[tuple[Callable[[], TensorizeReport], type[Exception], str]] = [
        (lambda: tensorize_(model), ConversionError, "a size, got neither a ratio nor ranks: give ratio=10"),
        (lambda: tensorize_(model, TensorizeConfig()), SpecError, r"TTM\(\) has no rank.*TTM\(rank=32\).*ratio"),
        (lambda: tensorize_(model, TensorizeConfig(BTT(1)), ratio=3), ConversionError, "'linear' has rank 1: leave"),
        (
            lambda: tensorize_(model, TensorizeConfig(overrides={"up": TT(rank=2)}), ratio=3),
            ConversionError,
            r"ratio=3 chooses all ranks, but 'up' has rank 2: .* as in TT\(\)",
        ),
    ]  # fmt: skip
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    assert [id(p) for p in model.parameters()] == kept


@pytest.mark.parametrize("ratio", [1, 0.5, 0, -2, float("nan"), float("inf"), True, "10", None])
def test_a_ratio_must_be_above_one(ratio: float) -> None:
    with pytest.raises(ConversionError, match="ratio: expected a number above 1" if ratio is not None else "size"):
        tensorize_(Net(), ratio=ratio)


def test_a_model_too_small_for_the_ratio_says_the_largest() -> None:
    model = Net()
    with pytest.raises(ConversionError, match=r"ratio=100: Net can become ([\d.]+) times smaller at most") as refused:
        tensorize_(model, ratio=100)
    assert "Tensor trains reach" in str(refused.value)
    assert "TensorizeConfig(linear=comera.TT())" in str(refused.value)
    assert all(type(layer) is nn.Linear for layer in (model.up, model.down, model.head))
    largest = float(str(refused.value).split("can become ")[1].split()[0])
    tensorize_(model, ratio=largest)
    assert model_size(model).ratio >= largest
    other = Net()
    tensorize_(other, TensorizeConfig(linear=TT()), ratio=100)
    assert isinstance(other.up, TTLinear)
    assert model_size(other).ratio >= 100


def _specs(report: TensorizeReport) -> list[object]:
    return [row.spec for row in report.rows]
