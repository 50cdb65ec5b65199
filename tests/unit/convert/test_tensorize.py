"""tensorize_: what is converted, what is kept, what is refused."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.convert import BTT, TT, TTM, LayerRow, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError, SpecError
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains

from ...helpers.small_net import IDS, SMALL, Net, kinds


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}


def assert_untouched(model: nn.Module, before: dict[str, tuple[int, Tensor]]) -> None:
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(id(after[name]) == ident and torch.equal(after[name], value) for name, (ident, value) in before.items())


@pytest.mark.parametrize("convert_", [comera.ngrams_, comera.fuse_, materialize_, partial(tensorize_, ratio=3)])
def test_what_is_no_module_is_refused(convert_: Callable[[Any], object]) -> None:
    with pytest.raises(ConversionError, match=r"expected a torch\.nn\.Module, got 5 \(int\)"):
        convert_(5)


def test_layers_become_compressed_and_small_ones_stay() -> None:
    model = Net()
    report = tensorize_(model, SMALL)
    assert kinds(model) == {
        "": "Net",
        "embed": "TTMEmbedding",
        "up": "TTLinear",
        "norm": "LayerNorm",
        "blocks": "ModuleList",
        "blocks.0": "TTLinear",
        "blocks.1": "TTLinear",
        "head": "Linear",
    }
    model(IDS).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    rows = {row.name: row for row in report.rows}
    assert [name for name, row in rows.items() if row.layer] == ["embed", "up", "blocks.0", "blocks.1", "head"]
    assert (rows["norm"].layer, rows["norm"].note) == (False, "no matrix")
    assert "min_ratio" in rows["head"].note
    assert report.total == sum(p.numel() for p in model.parameters())
    assert report.dense_total == sum(p.numel() for p in Net().parameters())


def test_dtype_device_bias_mode_and_requires_grad_are_kept() -> None:
    model = Net().to(torch.float64).eval()
    model.up.weight.requires_grad_(False)
    model.up.train()
    biases = model.up.bias, model.blocks[1].bias
    tensorize_(model, SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert (model.up.bias, model.blocks[1].bias) == biases
    assert model.up.bias is biases[0]
    assert model.blocks[0].bias is None
    assert [p.requires_grad for p in model.up.parameters()] == [True] + [False] * 7
    assert model.up.training
    assert not model.embed.training


def test_the_random_std_is_that_of_the_weight() -> None:
    model = Net()
    with torch.no_grad():
        model.up.weight.mul_(7)
        model.blocks[0].weight.fill_(0.5)  # constant: says nothing, so nn.Linear's own scheme is taken
    want = model.up.weight.std().item()
    tensorize_(model, SMALL)
    assert model.up.tt.init_std == pytest.approx(want, rel=1e-3)
    assert model.up.weight.std().item() == pytest.approx(want, rel=0.1)
    assert model.blocks[0].tt.init_std == pytest.approx((3 * 64) ** -0.5)


def test_init_std_and_threshold_come_from_the_config() -> None:
    model = Net()
    tensorize_(model, replace(SMALL, init_std=0.25, threshold=0.05))
    assert {(tt.init_std, tt.threshold) for _, tt in named_trains(model)} == {(0.25, 0.05)}
    assert model.embed.weight.std().item() == pytest.approx(0.25, rel=0.1)


def test_a_generator_makes_it_reproducible_and_leaves_the_global_one() -> None:
    a, b = Net(), Net()
    state = torch.get_rng_state()
    for model in (a, b):
        tensorize_(model, replace(SMALL, init_std=0.1), generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.up.weight, b.up.weight)


def test_decomposing_at_full_rank_keeps_the_function() -> None:
    torch.manual_seed(0)
    model = Net().to(torch.float64)
    with torch.no_grad():
        want = model(IDS)
    config = TensorizeConfig(
        linear=TT(order=4, rank=64), embedding=TTM(order=2, rank=99), init="decompose", min_ratio=0
    )
    report = tensorize_(model, config)
    torch.testing.assert_close(model(IDS), want, rtol=1e-9, atol=1e-9)
    assert all(row.error is not None and row.error < 1e-12 for row in report.rows if row.layer)
    assert "error" in str(report)


def test_decomposing_at_low_rank_reports_the_error_of_each_layer() -> None:
    model = Net()
    weight = model.up.weight.detach().clone()
    rows = {row.name: row for row in tensorize_(model, replace(SMALL, init="decompose")).rows}
    error = (model.up.weight - weight).norm() / weight.norm()
    assert rows["up"].error == pytest.approx(error.item(), rel=1e-4)
    assert rows["head"].error is None


@pytest.mark.parametrize("init", ["random", "decompose"])
def test_nothing_is_shared_with_the_replaced_weights(init: str) -> None:
    model = Net()
    old = {p.untyped_storage().data_ptr() for p in (model.up.weight, model.embed.weight, model.blocks[0].weight)}
    tensorize_(model, TensorizeConfig(TT(order=2, rank=64), TTM(order=1), init=init, min_ratio=0))
    assert not old & {p.untyped_storage().data_ptr() for _, tt in named_trains(model) for p in tt.parameters()}


def test_overrides_choose_by_name_and_the_last_match_wins() -> None:
    model = Net()
    overrides = {"blocks.*": None, "*.1": TT(order=2, rank=3), "embed": TTM(order=3, rank=2)}
    report = tensorize_(model, replace(SMALL, overrides=overrides))
    assert isinstance(model.blocks[0], nn.Linear)
    assert isinstance(model.blocks[1], TTLinear)
    assert (model.blocks[1].spec.order, model.blocks[1].spec.inner_ranks) == (2, (3,))
    assert model.embed.spec.order == 3
    notes = {row.name: row.note for row in report.rows}
    assert notes["blocks.0"] == "left dense as configured"


def test_kinds_can_be_left_dense() -> None:
    model = Net()
    tensorize_(model, replace(SMALL, embedding=None))
    assert isinstance(model.embed, nn.Embedding)
    other = Net()
    tensorize_(other, replace(SMALL, linear=None))
    assert isinstance(other.up, nn.Linear)
    assert isinstance(other.embed, TTMEmbedding)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block.*": None}, "'block.*' matches no layer that can be converted.*Near matches: .*blocks"),
        ({"norm": None}, r"matches only norm \(LayerNorm\)"),
        ({"embed": BTT()}, "gives a BTT to embed .*, which needs a TTM or None"),
        ({"embed": TT()}, r"'embed' gives a TT to embed \(Embedding 60 -> 32\), which needs a TTM or None"),
        ({"*": TTM()}, "gives a TTM to up .*, which needs a TT, a BTT or None"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(overrides: dict[str, TT | TTM | None], message: str) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(ConversionError, match=message):
        tensorize_(model, replace(SMALL, overrides=overrides))
    assert_untouched(model, before)


@pytest.mark.parametrize(
    "config",
    [
        replace(SMALL, overrides={"head": TT(rank=4, in_modes=(5, 5), out_modes=(2,))}),
        replace(SMALL, overrides={"blocks.1": TT(order=3, rank=(1, 8, 4000, 1))}),
        replace(SMALL, embedding=TTM(row_modes=(5, 5), rank=3)),
    ],
)
def test_an_error_in_any_layer_leaves_the_model_untouched(config: TensorizeConfig) -> None:
    model = Net()
    before = snapshot(model)
    with pytest.raises(SpecError, match=r"^(head|blocks\.1|embed) \("):
        tensorize_(model, config)
    assert_untouched(model, before)


def test_a_weight_that_cannot_be_decomposed_leaves_the_model_untouched() -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[1].weight[0, 0] = float("nan")
    kept = model.embed, model.up, *model.blocks
    with pytest.raises(SpecError, match=r"blocks\.1 \(Linear 64 -> 48\): .*NaN"):
        tensorize_(model, replace(SMALL, init="decompose"))
    assert (model.embed, model.up, *model.blocks) == kept


def test_a_second_call_changes_nothing_and_says_so() -> None:
    model = Net()
    tensorize_(model, SMALL)
    before, state = snapshot(model), torch.get_rng_state()
    report = tensorize_(model, replace(SMALL, overrides={"up": TT(rank=2)}))
    assert_untouched(model, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert {row.note for row in report.rows if row.compressed} == {"already compressed"}
    assert (report.total, report.dense_total) == (sum(p.numel() for p in model.parameters()), 11_474)


def test_a_second_call_converts_what_was_left() -> None:
    model = Net()
    tensorize_(model, replace(SMALL, linear=None))
    table = model.embed
    tensorize_(model, SMALL)
    assert model.embed is table
    assert isinstance(model.up, TTLinear)


def test_a_model_in_which_nothing_matches_is_an_error() -> None:
    with pytest.raises(ConversionError, match="expected layers whose type is exactly one of Linear, Embedding"):
        tensorize_(nn.Sequential(nn.LayerNorm(4), nn.ReLU()), SMALL)
    with pytest.raises(ConversionError, match=r"all of its 1 layers stay dense. 0 \(Linear 4 -> 4\): would store"):
        tensorize_(nn.Sequential(nn.Linear(4, 4)), SMALL)


@pytest.mark.parametrize("layer", [nn.Linear(8, 8), nn.Embedding(8, 8)])
def test_a_root_layer_is_an_error(layer: nn.Module) -> None:
    with pytest.raises(ConversionError, match=r"nn.Sequential\(layer\), or make a comera.nn.TTLinear"):
        tensorize_(layer, SMALL)


def test_min_ratio_decides_what_pays() -> None:
    model = Net()
    report = tensorize_(model, replace(SMALL, min_ratio=11))
    ratios = {row.name: row.ratio for row in report.rows if row.compressed}
    assert set(ratios) == {"blocks.0"}
    assert all(ratio is not None and ratio > 11 for ratio in ratios.values())


def test_hooks_move_along_and_their_handles_still_work() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    calls: list[str] = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: calls.append(f"before {type(module).__name__}")),
        model[0].register_forward_hook(lambda module, args, kwargs, out: calls.append("after"), with_kwargs=True),
        model[0].register_full_backward_hook(lambda module, gin, gout: calls.append("backward")),
    ]
    tensorize_(model, SMALL)
    x = torch.randn(2, 64, requires_grad=True)
    model(x).sum().backward()
    assert calls == ["before TTLinear", "after", "backward"]
    for handle in handles:
        handle.remove()
    materialize_(model)(x)
    assert len(calls) == 3


def test_a_module_registered_twice_becomes_one_new_module() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(64, 64)})
    report = tensorize_(model, replace(SMALL, overrides={"b.0": TT(order=2, rank=2)}))
    assert model["a"] is model["b"][0]
    assert model["a"].spec.order == 2
    assert [row.name for row in report.rows] == ["a", "c"]
    materialize_(model)
    assert model["a"] is model["b"][0]


def test_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    monkeypatch.setattr("comera.convert.tensorize.DistributedDataParallel", Wrapper)
    with pytest.raises(ConversionError, match="convert first, then wrap"):
        tensorize_(Wrapper(Net()), SMALL)


def test_a_lazy_model_is_refused_until_it_has_shapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that lazy modules may change
        model = nn.Sequential(nn.Linear(64, 64), nn.LazyLinear(64))
    with pytest.raises(ConversionError, match=r"1\.weight has no shape yet .*run one batch"):
        tensorize_(model, SMALL)
    model(torch.randn(2, 64))
    tensorize_(model, SMALL)
    assert isinstance(model[1], TTLinear)


def test_conversion_on_the_meta_device_then_initialization() -> None:
    with torch.device("meta"):
        model = Net()
    tensorize_(model, SMALL)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model.up.weight.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.1)
    assert model.embed.weight[1:].std().item() == pytest.approx(1.0, rel=0.1)
    assert model.up.bias.abs().max() == 0
    assert model(IDS).isfinite().all()


def test_meta_has_nothing_to_decompose() -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ConversionError, match=r"embed \(Embedding 60 -> 32\) is on the meta device: use init='random'"):
        tensorize_(model, replace(SMALL, init="decompose"))
    assert isinstance(model.up, nn.Linear)


def test_the_report_prints_a_table_and_is_json_ready() -> None:
    report = tensorize_(Net(), SMALL)
    table = report.table()
    assert table.header == ("layer", "was", "is", "modes and ranks", "dense", "stored", "ratio", "note")
    assert table.rows[-2][:5] == ("compressed layers", "", "", "", "11,136")
    assert table.rows[-1] == ("whole model", "", "", "", "11,474", f"{report.total:,}", f"{report.ratio:.1f}x", "")
    headline = f"4 of 5 layers compressed, 11,474 -> {report.total:,} parameters, {report.ratio:.1f}x smaller"
    assert repr(report) == f"<TensorizeReport: {headline}>"
    assert str(report) == f"{table.markdown()}\n\n{headline}"
    frame = report.to_frame()
    assert frame["layer"].to_list() == [row.name for row in report.rows]
    assert frame["stored"].sum() + frame["bias"].sum() == report.total
    data = json.loads(json.dumps(report.to_dict()))
    assert tuple(map(LayerRow.from_dict, data["rows"])) == report.rows
    assert sum(row["dense"] for row in data["rows"] if row["spec"]) == data["dense_tensorized"]
    assert sum(row["stored"] for row in data["rows"] if row["spec"]) == data["tensorized"]
    assert data["rows"][1]["ratio"] == pytest.approx(data["rows"][1]["dense"] / data["rows"][1]["stored"])
