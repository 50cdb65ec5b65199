"""Models with adapters: frozen, copied, merged, and as they were once the adapters are gone."""

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.small_net import IDS, SMALL, Net
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from comera.adapters import TTAdapter, adapt_, load_adapters_, merge_adapters_, remove_adapters_, save_adapters
from comera.convert import materialize_, tensorize_
from comera.errors import CheckpointError, ConversionError, SpecError, WeightError
from comera.nn import TTLinear, TTMProjection, model_size
from comera.nn.adapted import Adapted
from comera.tt.dense import materialize
from comera.tt.shapes import ttm_spec

from ...helpers.adapted_models import F64, FORMATS, close, layer_of, randomize_


def snapshot(model: nn.Module) -> dict[str, tuple[type[nn.Module], bool, Tensor]]:
    """Every parameter with the type of its module, whether it is trained, and a copy of its values."""
    types = {name: type(module) for name, module in model.named_modules()}
    return {
        name: (types[name.rpartition(".")[0]], p.requires_grad, p.detach().clone())
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def same(one: dict[str, tuple[type[nn.Module], bool, Tensor]], other: dict[str, tuple[type, bool, Tensor]]) -> bool:
    return list(one) == list(other) and all(
        one[name][:2] == other[name][:2] and torch.equal(one[name][2], other[name][2]) for name in one
    )


# --- models: frozen, copied, and as before ---------------------------------------------------------------------------


def net(kind: str = "dense") -> Net:
    torch.manual_seed(0)
    model = Net()
    if kind != "dense":
        tensorize_(model, SMALL)
    model.norm.requires_grad_(False)
    next(model.blocks[0].parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_only_adapters_and_chosen_heads_are_trained(kind: str) -> None:
    model = net(kind)
    report = adapt_(model, TTAdapter(rank=2), targets=["up", "blocks.*"], also_train="head")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.partition(".adapter.")[0] for name in trained if ".adapter." in name} == {"up", "blocks.0", "blocks.1"}
    heads = {name for name in trained if ".adapter." not in name}
    assert heads == {f"head.{name}" for name, _ in model.head.named_parameters()}
    assert [row.name for row in report.rows] == ["up", "blocks.0", "blocks.1"]
    assert report.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "3 layers adapted" in str(report)
    assert report.records()[0]["parameters"] == sum(p.numel() for p in model.up.adapter.parameters())


@pytest.mark.parametrize("kind", ["dense", "tt"])
def test_removal_leaves_the_model_as_it_was(kind: str) -> None:
    model = net(kind)
    before, state, modules = snapshot(model), list(model.state_dict()), list(model.modules())
    want = model(IDS)
    adapt_(model, TTAdapter(rank=2), targets=["up", "blocks.*"], also_train=["head", "norm"])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        optimizer.step()
    assert not torch.equal(model(IDS), want)
    assert remove_adapters_(model) is model
    assert same(snapshot(model), before)
    assert list(model.state_dict()) == state
    assert list(model.modules()) == modules  # the same objects
    assert torch.equal(model(IDS), want)
    assert not [name for name in vars(model) if "adapter" in name]


def test_gradients_from_before_move_no_frozen_weight() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS).square().sum().backward()
    before = snapshot(model)
    adapt_(model, TTAdapter(rank=2), targets="up")
    optimizer.step()
    remove_adapters_(model)
    assert same(snapshot(model), before)


@pytest.mark.parametrize("kind", ["dense", "tt"])
@pytest.mark.parametrize("through", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_adapted_and_go_back_on_their_own(kind: str, through: object) -> None:
    model = net(kind)
    before = snapshot(model)
    adapt_(model, TTAdapter(rank=2), targets="up", also_train="head")
    randomize_(model)
    other = through(model)  # type: ignore[operator]
    assert torch.equal(other(IDS), model(IDS))
    assert type(other.up) is type(model.up)
    assert not {id(p) for p in other.parameters()} & {id(p) for p in model.parameters()}
    remove_adapters_(other)
    assert same(snapshot(other), before)
    assert isinstance(model.up, Adapted)


def test_hooks_stay_and_a_wrapper_is_seen_through() -> None:
    model = net()
    seen: list[int] = []
    model.up.register_forward_hook(lambda *_: seen.append(1))
    adapt_(model, TTAdapter(rank=2), targets="up")
    model(IDS)
    wrapper = nn.ModuleDict({"model": model})
    remove_adapters_(wrapper)
    model(IDS)
    assert seen == [1, 1]
    assert type(model.up) is nn.Linear


def test_adapters_on_the_meta_device_start_at_zero() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 12))
    adapt_(model, TTAdapter(4, 2), targets="0")
    model.to_empty(device="cpu")
    tt = model[0].adapter.tt
    tt.reset_parameters()
    assert not tt.dense().any()
    assert all(core.any() for core in tt.cores[:-1])


def test_sizes_count_adapters_apart() -> None:
    model = net("tt")
    before = model_size(model)
    adapt_(model, TTAdapter(rank=2), targets=["up", "blocks.*"])
    after = model_size(model)
    count = sum(p.numel() for name, p in model.named_parameters() if ".adapter." in name)
    assert (after.adapters, after.total) == (count, before.total + count)
    assert (after.tensorized, after.dense_total, after.dense_tensorized) == (
        before.tensorized,
        before.dense_total,
        before.dense_tensorized,
    )
    assert str(after).endswith(f"; adapters {count:,}")
    assert "adapters" not in str(before)


# --- merged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_merged_weights_compute_the_same(rank: int) -> None:
    model = net().to(F64)
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    kinds, weight = [type(m) for m in model.modules()], model.up.weight
    adapt_(model, TTAdapter(order=3, rank=rank, scale=0.5), targets=["up", "blocks.*"], also_train="head")
    randomize_(model)
    with torch.no_grad():
        model.head.bias.add_(1)
    adapted = model(IDS)
    assert merge_adapters_(model) is model
    close(model(IDS), adapted)
    assert [type(m) for m in model.modules()] == kinds
    assert model.up.weight is weight
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags


def test_half_precision_is_merged_in_single() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64)).to(torch.bfloat16)
    adapt_(model, TTAdapter(4, 4), targets="0")
    randomize_(model)
    wanted = (
        model[0]._parameters["weight"].float()
        + materialize(model[0].adapter.tt.spec, [core.float() for core in model[0].adapter.tt.effective_cores()]).t()
    )
    merge_adapters_(model)
    assert torch.equal(model[0].weight, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("kind", ["tt", "btt"])
def test_compressed_layers_refuse_a_merge_or_become_dense(kind: str) -> None:
    model = layer_of(kind, 12, 10)
    x = torch.randn(4, 12, dtype=F64)
    adapt_(model, TTAdapter(4, 2, scale=0.5), targets="0")
    randomize_(model)
    adapted = model(x)
    with pytest.raises(ConversionError, match=r"0 is a compressed layer .*apart: .*materialize=True"):
        merge_adapters_(model)
    assert torch.equal(model(x), adapted)
    merge_adapters_(model, materialize=True)
    assert type(model[0]) is nn.Linear
    assert all(p.requires_grad for p in model.parameters())
    close(model(x), adapted)


def test_shared_weights_are_not_merged() -> None:
    table, head = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, head)
    adapt_(model, TTAdapter(4, 2), targets="1")
    with pytest.raises(ConversionError, match="1 shares its weight with another layer"):
        merge_adapters_(model)
    assert isinstance(model[1], Adapted)
    remove_adapters_(model)
    assert model[1].weight is table.weight


def test_an_adapter_that_is_not_finite_is_not_merged() -> None:
    model = net()
    adapt_(model, TTAdapter(), targets="up")
    with torch.no_grad():
        model.up.adapter.tt.cores[0].fill_(float("nan"))
    with pytest.raises(ConversionError, match="up has an adapter with NaN"):
        merge_adapters_(model)


# --- errors: before the first change ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "nothing"}, r"targets: expected a pattern that matches linear layers, got 'nothing', which .*up"),
        ({"targets": ["up", "norm"]}, r"got 'norm', which matches only norm \(LayerNorm\)"),
        ({"targets": "1"}, r"got '1'.*as '\*\.1' would.*blocks\.1"),
        ({"targets": []}, "targets: expected a glob pattern"),
        ({"targets": [3]}, "targets: expected a glob pattern"),
        ({"targets": "up", "also_train": "haed"}, r"also_train: expected a pattern .* 'haed'.*head"),
        ({"targets": ["up", "head"], "also_train": "head"}, "got head in targets and in head of also_train"),
        ({"targets": "blocks.*", "also_train": "blocks"}, "got blocks.0 in targets and in blocks of also_train"),
    ],
)
def test_what_does_not_fit_changes_nothing(options: dict[str, object], message: str) -> None:
    model = net()
    before = snapshot(model)
    with pytest.raises(ConversionError, match=message):
        adapt_(model, TTAdapter(), **options)  # type: ignore[arg-type]
    assert same(snapshot(model), before)


@pytest.mark.parametrize("values", [{"order": 1}, {"rank": -1}, {"rank": True}, {"scale": 0}, {"scale": float("nan")}])
def test_an_adapter_that_cannot_be(values: dict[str, object]) -> None:
    (name,) = values
    with pytest.raises(SpecError, match=f"TTAdapter: {name} must be"):
        TTAdapter(**values)  # type: ignore[arg-type]


def test_layers_that_cannot_be_adapted_say_why() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].forward = model[0].forward  # type: ignore[method-assign]
    report = adapt_(model, TTAdapter(order=2), targets="*")
    assert [(row.name, row.spec is None, row.note) for row in report.rows] == [
        ("0", False, ""),
        ("1", True, "its forward was replaced"),
    ]
    remove_adapters_(model)
    with pytest.raises(ConversionError, match=r"'1' matches no layer that can be adapted: 1 \(Linear\): its forward"):
        adapt_(model, TTAdapter(order=2), targets="1")


def test_calls_that_do_not_fit_the_state_of_the_model() -> None:
    model = net()
    for call in (remove_adapters_, merge_adapters_):
        with pytest.raises(ConversionError, match="expected a model with adapters, got a Net without any"):
            call(model)
    adapt_(model, TTAdapter(), targets="blocks.*")
    with pytest.raises(ConversionError, match=r"adapt_: .*got a Net with 2, the first at blocks\.0: remove_adapters_"):
        adapt_(model, TTAdapter(), targets="up")
    with pytest.raises(ConversionError, match="got a part of it, a ModuleList"):
        remove_adapters_(model.blocks)
    with pytest.raises(ConversionError, match="tensorize_: expected a model without adapters"):
        tensorize_(model, ratio=2)
    with pytest.raises(ConversionError, match=r"materialize_: .*materialize=True"):
        materialize_(model)
    with pytest.raises(ConversionError, match="expected a TTAdapter"):
        adapt_(model, 8, targets="up")  # type: ignore[arg-type]


def test_a_bias_that_is_a_buffer_is_not_lost() -> None:
    layer = nn.Linear(8, 8)
    bias = layer.bias.detach().clone()
    del layer.bias
    layer.register_buffer("bias", bias)
    with pytest.raises(ConversionError, match="its bias is no parameter of its own"):
        adapt_(nn.Sequential(layer), TTAdapter(order=2), targets="0")


@pytest.mark.parametrize(
    "call", [remove_adapters_, merge_adapters_, lambda model: save_adapters(model, "/dev/null/no")]
)
def test_parts_with_adapters_of_their_own_are_given_one_by_one(call: Callable[[nn.Module], object]) -> None:
    parts = {name: nn.Sequential(nn.Linear(8, 8)) for name in ("encoder", "decoder")}
    model = nn.ModuleDict(parts)
    for part in parts.values():
        adapt_(part, TTAdapter(order=2), targets="0")
    with pytest.raises(ConversionError, match=r"a ModuleDict with 2 parts .*, encoder, decoder: give each part"):
        call(model)
    assert all(isinstance(part[0], Adapted) for part in parts.values())
    remove_adapters_(parts["encoder"])
    remove_adapters_(model)  # of one part, which is found
    assert not any(isinstance(module, Adapted) for module in model.modules())


def test_an_adapted_layer_beside_an_adapted_model_is_named() -> None:
    models = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    for model in models:
        adapt_(model, TTAdapter(order=2), targets="0")
    both = nn.ModuleDict({"one": models[0], "other": models[1][0]})
    with pytest.raises(ConversionError, match=r"with 2 parts .*, one, other: give each part"):
        remove_adapters_(both)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(torch.fft.fft(x) * self.weight).real


def test_complex_parameters_of_a_head_are_trained_saved_and_restored(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Spectral())
    before = copy.deepcopy(model.state_dict())
    adapt_(model, TTAdapter(order=2), targets="0", also_train="1")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(3, 8)
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before["1.weight"])
    save_adapters(model, tmp_path)
    fresh = nn.Sequential(nn.Linear(8, 8), Spectral())
    fresh.load_state_dict(before)
    load_adapters_(fresh, tmp_path)
    assert torch.equal(fresh(x), model(x))
    remove_adapters_(model)
    assert torch.equal(model[1].weight, before["1.weight"])


class Noted(nn.Linear):
    def get_extra_state(self) -> object:
        return {"v": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_head_whose_state_is_more_than_tensors_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Noted(8, 2))
    before = snapshot(model)
    wanted = r"expected a state of tensors, got 1\._extra_state, a dict"
    with pytest.raises(ConversionError, match=f"also_train: {wanted}, which .*get_extra_state"):
        adapt_(model, TTAdapter(order=2), targets="0", also_train="1")
    assert same(snapshot(model), before)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    adapt_(plain, TTAdapter(order=2), targets="0", also_train="1")
    save_adapters(plain, tmp_path)
    with pytest.raises(CheckpointError, match=wanted):
        load_adapters_(model, tmp_path)
    assert same(snapshot(model), before)


def test_a_layer_alone_can_be_adapted() -> None:
    layer = TTLinear(TTAdapter(4, 3).spec(12, 10))
    x = torch.randn(2, 12)
    before = layer(x)
    adapt_(layer, TTAdapter(4, 2), targets="*")
    randomize_(layer)
    assert not torch.equal(layer(x), before)
    remove_adapters_(layer)
    assert torch.equal(layer(x), before)


# --- layers with an adapter -------------------------------------------------------------------------------------------


# --- one layer against the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("order", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("rank", [0, 1, 3])
@pytest.mark.parametrize(("features", "outputs"), [(12, 30), (13, 7)])
def test_an_adapted_layer_adds_its_product(kind: str, order: int, rank: int, features: int, outputs: int) -> None:
    model = layer_of(kind, features, outputs)
    weight, bias = model[0].weight.detach().clone(), model[0].bias
    x = torch.randn(5, features, dtype=F64)
    before = model(x)
    adapt_(model, TTAdapter(order, rank, scale=0.7), targets="0")
    assert torch.equal(model(x), before)  # zero at first, exactly
    randomize_(model)
    tt = model[0].adapter.tt
    assert tt.spec.order == order
    delta = materialize(tt.spec, tt.effective_cores())
    close(model(x), F.linear(x, weight + 0.7 * delta.t(), bias))
    close(model[0].weight, weight + 0.7 * delta.t())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3), (0, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_any_batch(kind: str, lead: Sequence[int], bias: bool) -> None:
    model = layer_of(kind, 12, 10, bias=bias)
    adapt_(model, TTAdapter(4, 2, scale=-1.5), targets="*")
    randomize_(model)
    x = torch.randn(*lead, 12, dtype=F64)
    close(model(x), F.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize("kind", FORMATS)
def test_inputs_that_are_not_contiguous(kind: str) -> None:
    model = layer_of(kind, 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="*")
    randomize_(model)
    for x in (torch.randn(12, 5, dtype=F64).t(), torch.randn(5, 24, dtype=F64)[:, ::2], torch.ones(1, dtype=F64)):
        given = x.expand(3, 12) if x.ndim == 1 else x
        close(model(given), model(given.contiguous()))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("order", "rank"), [(2, 2), (4, 1), (5, 3)])
def test_gradients_of_the_input_and_the_adapter(kind: str, order: int, rank: int) -> None:
    model = layer_of(kind, 6, 10)
    adapt_(model, TTAdapter(order, rank, scale=2.0), targets="0")
    randomize_(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(name.startswith("0.adapter.tt.") for name in trained)
    x = torch.randn(3, 6, dtype=F64, requires_grad=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(trained, values, strict=True)), x)

    assert torch.autograd.gradcheck(output, (x, *trained.values()))


def test_the_gradient_that_leaves_zero_is_that_of_the_last_core_alone() -> None:
    model = layer_of("dense", 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="0")
    model(torch.randn(5, 12, dtype=F64)).square().sum().backward()
    moved = [bool(p.grad.any()) for p in model[0].adapter.tt.cores]
    assert moved == [False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_that_of_the_layer(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(16, 16)).to(dtype)
    adapt_(model, TTAdapter(4, 2), targets="0")
    assert {core.dtype for core in model[0].adapter.tt.cores} == {dtype}
    assert model(torch.randn(2, 16, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("kind", FORMATS)
def test_autocast(kind: str) -> None:
    model = layer_of(kind, 32, 16).float()
    adapt_(model, TTAdapter(4, 2), targets="0")
    randomize_(model)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), model(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", FORMATS)
def test_it_compiles_whole(kind: str) -> None:
    model = layer_of(kind, 12, 10)
    adapt_(model, TTAdapter(4, 2, scale=0.5), targets="0")
    randomize_(model)
    x = torch.randn(3, 12, dtype=F64, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    parameters = [x, *(p for p in model.parameters() if p.requires_grad)]
    wanted = torch.autograd.grad(model(x).square().sum(), parameters)
    for found, want in zip(torch.autograd.grad(compiled(x).square().sum(), parameters), wanted, strict=True):
        close(found, want)


def test_layers_that_store_their_weight_transposed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Conv1D(10, 12)).to(F64)
    x = torch.randn(3, 12, dtype=F64)
    before = model(x)
    adapt_(model, TTAdapter(3, 2), targets="0")
    close(model(x), before)
    randomize_(model)
    adapted = model(x)
    assert model[0].weight.shape == (12, 10)
    close(adapted, x @ model[0].weight + model[0].bias)
    merge_adapters_(model)
    assert type(model[0]) is Conv1D
    close(model(x), adapted)


def test_the_head_over_a_table() -> None:
    model = nn.Sequential(TTMProjection(ttm_spec(30, 12, order=2, rank=3), dtype=F64))
    x = torch.randn(4, 12, dtype=F64)
    adapt_(model, TTAdapter(4, 2), targets="0")
    randomize_(model)
    close(model(x), F.linear(x, model[0].weight, model[0].bias))


# --- what others read ------------------------------------------------------------------------------------------------


def test_torch_attention_and_its_fast_path_see_adapters() -> None:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).to(F64).eval()
    x = torch.randn(2, 5, 16, dtype=F64)
    with torch.no_grad():
        before = block(x)
    adapt_(block, TTAdapter(4, 2), targets=["linear*", "self_attn.out_proj"])
    randomize_(block)
    adapted = block(x).detach()
    with torch.no_grad():  # where torch would multiply by the weights itself
        close(block(x), adapted)
    assert (adapted - before).abs().max() > 0.01
    merge_adapters_(block)
    close(block(x), adapted)


def test_a_write_into_the_sum_raises() -> None:
    model = layer_of("dense", 12, 10)
    adapt_(model, TTAdapter(4, 2), targets="0")
    with pytest.raises(WeightError, match="read only"):
        model[0].weight.zero_()
