"""tensorize_: what is converted, what is kept, what is refused."""

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.convert import BTT, TT, TTM, LayerRow, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError, SpecError
from comera.export import serving_copy
from comera.nn.embedding import TTMEmbedding
from comera.nn.linear import BTTLinear, TTLinear
from comera.nn.tensor_train import named_trains
from comera.pretrained import load_pretrained, save_pretrained

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
    with pytest.raises(ValueError, match=r"stay dense. 0 .*left dense as configured"):
        tensorize_(nn.Sequential(nn.Linear(64, 64)), TensorizeConfig(linear=None))


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


def test_marks_on_weights_move_along_and_back() -> None:
    model = nn.Sequential(nn.Embedding(500, 64), nn.Linear(64, 64), nn.LSTM(64, 64))
    marked = [model[0].weight, model[1].weight, model[2].weight_hh_l0]
    for weight in marked:
        weight._no_weight_decay = True
    assert tensorize_(model, ratio=3, init="decompose").rows

    def found() -> set[str]:
        return {name for name, p in model.named_parameters() if getattr(p, "_no_weight_decay", False)}

    trains = dict(named_trains(model))
    held = {"0.tt", "1.tt", next(name for name in trains if "weight_hh_l0" in name)}
    assert found() == {f"{at}.{name}" for at in held for name, _ in trains[at].named_parameters()}
    materialize_(model)
    assert found() == {"0.weight", "1.weight", "2.weight_hh_l0"}


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


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: TT(order=1), SpecError, "TT needs an order of at least 2"),
        (lambda: TT(order=True), SpecError, "order"),
        (lambda: TTM(order=0), SpecError, "TTM needs an order of at least 1"),
        (lambda: TT(rank=0), SpecError, "TT needs rank to be an integer >= 1, a tuple of them or None, got 0"),
        (lambda: TTM(rank=(1, 0, 1)), SpecError, "TTM needs rank to be an integer >= 1"),
        (lambda: BTT(rank=0), SpecError, "BTT needs rank to be an integer >= 1 or None, got 0"),
        (lambda: TT(rank=2.5), SpecError, "got 2.5"),
        (lambda: TT(rank=()), SpecError, r"got \(\)"),
        (lambda: TT(in_modes=(4, 0)), SpecError, "in_modes to be a tuple of positive integers or None"),
        (lambda: TTM(col_modes="8·8"), SpecError, "col_modes to be"),
        (lambda: TTM(row_modes=(-1, -1)), SpecError, r"integers, one of which may be -1, or None, got \(-1, -1\)"),
        (lambda: TT(in_modes=(-1, 4)), SpecError, "in_modes to be a tuple of positive integers or None"),
        (lambda: BTT(rank=(1, 2)), SpecError, r"BTT needs rank to be an integer >= 1 or None, got \(1, 2\)"),
        (lambda: BTT(rank=True), SpecError, "got True"),
        (lambda: BTT(blocks=4), SpecError, "blocks to be two integers >= 1 or None, got 4"),
        (lambda: BTT(blocks=(4, 0)), SpecError, "blocks to be two integers"),
        (lambda: BTT(blocks=(4, 4, 4)), SpecError, "blocks to be two integers"),
        (lambda: TensorizeConfig(embedding=BTT()), ConversionError, "embedding must be a TTM or None"),
        (lambda: TensorizeConfig(linear=TTM()), ConversionError, "linear must be a TT, a BTT or None"),
        (lambda: TensorizeConfig(embedding=TT()), ConversionError, "embedding must be a TTM or None"),
        (lambda: TensorizeConfig(overrides={"a": 3}), ConversionError, "overrides must be a mapping"),
        (lambda: TensorizeConfig(overrides=[("a", None)]), ConversionError, "overrides must be a mapping"),
        (lambda: TensorizeConfig(tied="yes"), ConversionError, "tied must be 'share' or 'untie', got 'yes'"),
        (lambda: TensorizeConfig(init="svd"), ConversionError, "init must be"),
        (lambda: TensorizeConfig(init_std=0.0), ConversionError, "init_std must be"),
        (lambda: TensorizeConfig(min_ratio=-1), ConversionError, "min_ratio must be"),
        (lambda: TensorizeConfig(threshold=1.0), ConversionError, "threshold must be in"),
    ],
)
def test_configurations_are_checked_at_construction(
    make: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make()


def test_configurations_take_lists_and_keep_their_own_overrides() -> None:
    assert TT(rank=[1, 2, 1], in_modes=[4], out_modes=[4]) == TT(rank=(1, 2, 1), in_modes=(4,), out_modes=(4,))
    overrides: dict[str, TT | TTM | None] = {"up": None}
    config = TensorizeConfig(overrides=overrides)
    overrides["down"] = None
    assert config.overrides == {"up": None}


def test_given_modes_determine_the_order() -> None:
    assert TT(rank=3, in_modes=(4, 4), out_modes=(16,)).spec(16, 16).order == 3
    assert TTM(row_modes=(4, 4), rank=3).spec(16, 16).order == 2
    assert TT(order=5, rank=3, in_modes=(4, 4)).spec(16, 64).split == 2


def test_one_mode_of_a_table_is_what_the_others_leave() -> None:
    assert TTM(row_modes=(-1, 10), col_modes=(4, -1), rank=3).spec(95, 16).row_modes == (10, 10)
    plain = TTM.low_rank(5).spec(95, 16)
    assert (plain.row_modes, plain.col_modes, plain.inner_ranks) == ((95, 1), (1, 16), (5,))
    assert TTM.low_rank(50).spec(95, 16).inner_ranks == (16,)
    assert TTM.low_rank().rank is None  # for a ratio


def test_blocks_may_be_a_list() -> None:
    assert BTT(blocks=[2, 4]) == BTT(blocks=(2, 4))  # type: ignore[arg-type]
    assert hash(BTT(blocks=[2, 4])) == hash(BTT(blocks=(2, 4)))  # type: ignore[arg-type]


# --- block tensor trains ----------------------------------------------------------------------------------------------


BLOCKS = TensorizeConfig(linear=BTT(rank=2), embedding=TTM(order=2, rank=4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_linear_layers_become_blocks_and_come_back(dtype: torch.dtype) -> None:
    model = Net().to(dtype)
    bias = model.up.bias
    report = tensorize_(model, replace(BLOCKS, overrides={"blocks.0": TT(order=4, rank=4), "blocks.1": BTT(1, (4, 6))}))
    assert kinds(model) == {**kinds(Net()), "embed": "TTMEmbedding", "up": "BTTLinear"} | {
        "blocks.0": "TTLinear",
        "blocks.1": "BTTLinear",
    }
    assert [str(tt.spec) for _, tt in named_trains(model)][1::2] == ["BTT 4·8 / 8·8 rank 2", "BTT 4·16 / 6·8 rank 1"]
    assert model.up.bias is bias
    assert {row.name: row.stored for row in report.rows}["up"] == model.up.tt.spec.numel + model.up.tt.spec.rank_numel
    assert report.total == sum(p.numel() for p in model.parameters())
    assert "BTT 4·8 / 8·8 rank 2" in str(report)
    expected = model(IDS)
    materialize_(model)
    assert kinds(model) == kinds(Net())
    torch.testing.assert_close(model(IDS), expected, **({"rtol": 0.1, "atol": 0.05} if dtype == torch.bfloat16 else {}))


def test_blocks_are_decomposed_one_by_one() -> None:
    model, x = Net().double(), torch.randn(5, 32, dtype=torch.float64)
    expected = model.up(x)
    report = tensorize_(model, replace(BLOCKS, linear=BTT(rank=99), min_ratio=0, init="decompose"))
    torch.testing.assert_close(model.up(x), expected)
    errors = {row.name: row.error for row in report.rows}
    assert errors["up"] < 1e-12
    model = Net()
    weight = model.up.weight.detach().double()
    report = tensorize_(model, replace(BLOCKS, init="decompose"))
    blocks = weight.t().reshape(4, 8, 8, 8).transpose(1, 2)
    tail = torch.linalg.svdvals(blocks)[..., 2:].norm() / weight.norm()
    assert {row.name: row.error for row in report.rows}["up"] == pytest.approx(float(tail), rel=1e-4)


def test_tied_linear_layers_share_blocks_on_the_meta_device_too() -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        model[1].weight = model[0].weight
        tensorize_(model, BLOCKS)
        assert model[0].tt is model[1].tt
        assert isinstance(model[0], BTTLinear)
        assert all(value.device.type == device for value in model.state_dict().values())


# --- the way back -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_materialize_gives_the_same_function(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Net().to(dtype).eval()
    bias = model.up.bias
    tensorize_(model, SMALL)
    with torch.no_grad():
        model.up.tt.rank_params[1][2] = -1.0  # pruned
        model.blocks[1].bias.fill_(0.3)
    model.blocks[0].tt.requires_grad_(False)
    want = model(IDS)
    assert materialize_(model) is model
    assert kinds(model) == kinds(Net())
    torch.testing.assert_close(model(IDS), want, rtol=tolerance, atol=tolerance)
    assert model.up.bias is bias
    assert model.embed.padding_idx == 0
    assert model.embed.weight[0].abs().max() == 0
    assert [p.requires_grad for p in model.blocks.parameters()] == [False, True, True]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert not model.up.training


def test_materialize_sums_half_precisions_in_float32() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(torch.bfloat16)
    tensorize_(model, SMALL)
    want = copy.deepcopy(model[0].tt).to(torch.float64).dense().t()
    weight = materialize_(model)[0].weight
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.double(), want, rtol=2**-8, atol=1e-6)


def test_materialize_needs_something_to_materialize() -> None:
    with pytest.raises(ConversionError, match="nothing to materialize in Net"):
        materialize_(Net())
    model = nn.Sequential(nn.Linear(64, 64))
    tensorize_(model, SMALL)
    with pytest.raises(ConversionError, match="a single TTLinear has no parent"):
        materialize_(model[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_padding_row_that_is_read_is_one_like_the_others(value: float, tied: bool, device: str) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(64, 32, padding_idx=2), "head": nn.Linear(32, 64, bias=False)})
    with torch.no_grad():
        model["table"].weight[2] = value
    model.to(device)
    if tied:
        model["head"].weight = model["table"].weight
    kept = tied or (value > 0 and device == "cpu")
    notes = {row.name: row.note for row in tensorize_(model, TensorizeConfig(TT(rank=4), TTM(rank=4))).rows}
    assert notes["table"] == ("row 2, of padding, is one like the others" if kept else "")
    assert model["table"].tt.padding_row is kept
    if device == "cpu":
        assert bool(model["table"](torch.tensor([2])).any()) is kept


@pytest.mark.parametrize("fill", [0.0, 3.0])
def test_a_tied_padding_row_is_decomposed_trained_saved_and_materialized(fill: float, tmp_path: Path) -> None:
    def build() -> nn.ModuleDict:
        layers = {"table": nn.Embedding(24, 16, padding_idx=2), "head": nn.Linear(16, 24, bias=False)}
        layers["head"].weight = layers["table"].weight
        return nn.ModuleDict(layers).to(torch.float64)

    model = build()
    with torch.no_grad():
        model["table"].weight[2] = fill
    ids, x = torch.tensor([[2, 5], [0, 2]]), torch.randn(3, 16, dtype=torch.float64)
    want = model["table"](ids), model["head"](x)
    tensorize_(model, TensorizeConfig(embedding=TTM(order=2, rank=16), min_ratio=0.0, init="decompose"))
    torch.testing.assert_close((model["table"](ids), model["head"](x)), want)
    before = model["head"].weight[2].clone()
    model["head"](x)[:, 2].sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad if p.grad is not None else 0
    assert not torch.equal(model["head"].weight[2], before)
    want = model["table"](ids), model["head"](x)
    save_pretrained(model, tmp_path)
    served: Any = serving_copy(model)
    torch.testing.assert_close((served["table"](ids), served["head"](x)), want)
    loaded = load_pretrained(build(), tmp_path)
    assert torch.equal(loaded["table"](ids), want[0])
    materialize_(loaded)
    assert loaded["table"].padding_idx == 2
    torch.testing.assert_close((loaded["table"](ids), loaded["head"](x)), want)


def test_the_padding_row_of_a_bag_tied_to_a_head_stays_zero() -> None:
    model = nn.ModuleDict({"table": nn.EmbeddingBag(64, 32, padding_idx=2), "head": nn.Linear(32, 64, bias=False)})
    model["head"].weight = model["table"].weight
    notes = {row.name: row.note for row in tensorize_(model, TensorizeConfig(TT(rank=4), TTM(rank=4))).rows}
    assert notes["table"] == "row 2, of padding, has logit 0"
    assert not model["head"](torch.randn(3, 32))[:, 2].any()
