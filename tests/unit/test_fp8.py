"""fp8_: which layers of a model compute in FP8, the report, and what it composes with."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

import comera
from comera.errors import ConversionError
from comera.export import serving_copy
from comera.fusion import accumulating
from comera.nn import TTLinear
from comera.ops.fp8 import fp8_low_rank
from comera.tt import tt_spec

from ..helpers.oracle import signal_to_noise

RECIPES = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "hybrid"])
CONFIG = comera.TensorizeConfig(linear=comera.TT(order=4, rank=16), embedding=None)
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64, "hidden_size": 64}


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def layer(features=64, outputs=64, rank=16):
    return TTLinear(tt_spec(features, outputs, order=4, rank=rank))


def bert():
    torch.manual_seed(0)
    made = BertForSequenceClassification(BertConfig(**SIZES, **NO_DROPOUT, intermediate_size=128))
    comera.tensorize_(made, CONFIG)
    return made.train()


def llama():
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=128, num_key_value_heads=4))
    comera.tensorize_(made, CONFIG)
    return made.train()


def results(model):
    """Loss and gradients of a model of transformers."""
    ids = torch.arange(24).reshape(2, 12) % 64
    labels = torch.tensor([0, 1]) if isinstance(model, BertForSequenceClassification) else ids
    loss = model(input_ids=ids, labels=labels).loss
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
    return loss, {name: grad for (name, _), grad in zip(named, grads, strict=True) if grad is not None}


@pytest.fixture
def fp8_products(monkeypatch):
    """Counts the products in FP8."""
    calls = []
    monkeypatch.setattr(
        "comera.ops.linear.fp8_low_rank", lambda *operands: calls.append(operands[2]) or fp8_low_rank(*operands)
    )
    return calls


# --- which layers, and the report ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.good, self.small = layer(), layer(64, 48, rank=5)
        self.odd, self.both = layer(40, 64), layer(9, 100)
        self.blocks, self.table = nn.Linear(64, 64), nn.Embedding(500, 64)
        self.dense = nn.Linear(64, 2)
        comera.tensorize_(
            self, comera.TensorizeConfig(linear=comera.BTT(rank=2), embedding=comera.TTM(order=2, rank=4))
        )


@RECIPES
def test_every_layer_has_a_row(recipe):
    model = Mixed()
    report = comera.fp8_(model, recipe)
    rows = {row.name: row for row in report.rows}
    assert {name: row.reason for name, row in rows.items()} == {
        "good": "",
        "small": "",
        "odd": "in_features 40 is no multiple of 16 (nearest: 48)",
        "both": "in_features 9 is no multiple of 16 (nearest: 16), out_features 100 is no multiple of 16 (nearest: 96)",
        "blocks": "block tensor trains have no FP8 product, tensor trains have",
        "table": "TT-matrices have no FP8 product",
        "dense": "dense layers stay as they are",
    }
    assert rows["small"].note == "a device pads rank 5 to 16"
    assert (rows["small"].in_features, rows["small"].out_features, rows["small"].rank) == (64, 48, 5)
    assert rows["good"].note == ""
    assert [row.name for row in report.left_alone] == ["odd", "both", "blocks", "table", "dense"]
    assert {name: model.get_submodule(name).fp8 for name in ("good", "small", "odd", "both")} == {
        "good": recipe,
        "small": recipe,
        "odd": None,
        "both": None,
    }
    assert report.headline == (
        f"2 of 7 layers compute in FP8 ({recipe}), emulated on this device: slower, for checking quality only "
        "(scaled products need a CUDA device, got cpu)"
    )
    lines = report.markdown().splitlines()
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == [
        *("odd", "TTLinear", "40", "64", "16", "as before", "in_features 40 is no multiple of 16 (nearest: 48)")
    ]
    assert report.records()[1]["products"] == "FP8"
    assert "fp8=" in repr(model.good)
    assert "fp8=" not in repr(model.odd)


def test_layers_with_an_activation_and_with_an_adapter():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    forms = {"0": comera.TT(order=2, rank=4, activation="silu")}
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=2, rank=4), overrides=forms))
    comera.adapters.adapt_(model, comera.adapters.TTAdapter(order=2, rank=2), targets="1")
    report = comera.fp8_(model)
    assert {row.name: row.reason for row in report.rows} == {
        "0": "silu between its factors has no FP8 product",
        "1": "",
        "1.adapter": "",
    }
    assert model(torch.randn(3, 64)).isfinite().all()


def test_a_device_with_scaled_products(monkeypatch):
    monkeypatch.setattr("comera.fp8.unavailable_reason", lambda device: None)
    report = comera.fp8_(nn.Sequential(layer()))
    assert report.emulated is None
    assert report.headline == "1 of 1 layers compute in FP8 (tensorwise)"


def test_taken_back_and_repeated():
    model = nn.Sequential(layer(), layer(48, 40))
    x = torch.randn(5, 64)
    plain = model[0](x)
    assert comera.fp8_(model, "rowwise").rows == comera.fp8_(model, "rowwise").rows
    assert not torch.equal(model[0](x), plain)
    assert comera.fp8_(model).recipe == model[0].fp8 == "tensorwise"
    report = comera.fp8_(model, None)
    assert report.headline == "FP8 taken back"
    assert [each["products"] for each in report.records()] == ["as before", "as before"]
    assert model[0].fp8 is None
    assert torch.equal(model[0](x), plain)
    assert comera.fp8_(nn.Linear(3, 3), None).recipe is None  # nothing to take back


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        (layer, "blockwise", "expected a recipe out of tensorwise, rowwise, hybrid or None, got 'blockwise'"),
        (
            lambda: nn.Sequential(nn.Linear(16, 16), layer(16, 40)),
            "rowwise",
            r"multiples of 16, got a Sequential without one \(0 \(Linear\): dense layers stay as they are; 1 "
            r"\(TTLinear\): out_features 40 is no multiple of 16 \(nearest: 48\)\): compress it first",
        ),
        (lambda: nn.Linear(16, 16), "rowwise", r"without one \(the model \(Linear\): dense layers"),
        (nn.Tanh, "rowwise", r"got a Tanh without one \(no linear layer\)"),
    ],
)
def test_what_cannot_be_done_is_refused(model, recipe, message):
    model = model()
    with pytest.raises(ConversionError, match=message):
        comera.fp8_(model, recipe)
    assert all(each.fp8 is None for each in model.modules() if isinstance(each, TTLinear))


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(layer())
    assert "got meta" in comera.fp8_(model).headline
    assert model(torch.empty(5, 64, device="meta")).shape == (5, 64)


def test_ranks_may_change_afterwards():
    model = nn.Sequential(layer(rank=16))
    comera.fp8_(model)
    with torch.no_grad():
        model[0].tt.rank_params[1][3:] = 0
    comera.rank.prune_(model)
    assert model[0].spec.ranks[2] == 3
    x = torch.randn(40, 64)
    assert signal_to_noise(model(x), F.linear(x, model[0].weight, model[0].bias)) >= 20
    assert [row.note for row in comera.fp8_(model).rows] == ["a device pads rank 3 to 16"]


# --- composition -----------------------------------------------------------------------------------------------------


@RECIPES
@pytest.mark.parametrize("first", ["fp8", "fuse"])
@pytest.mark.parametrize("make", [bert, llama])
def test_fused_models_compute_in_fp8(make, first, recipe, fp8_products):
    plain, fused = make(), make()
    plain.load_state_dict(fused.state_dict())
    comera.fp8_(plain, recipe)
    expected, grads = results(plain)
    count = len(fp8_products)
    assert count == sum(isinstance(each, TTLinear) for each in plain.modules())
    if first == "fuse":
        comera.fuse_(fused, keep_logits=False)
    comera.fp8_(fused, recipe)
    if first == "fp8":
        report = comera.fuse_(fused, keep_logits=False)
        reasons = {row.kind: row.reason for row in report.left_alone if "FP8" in row.reason}
        assert report.fused("qkv") == report.fused("mlp") == report.fused("loss") == ()
        if make is bert:
            assert reasons == {"qkv": "query computes in FP8"}
            assert report.fused("activation")
        else:
            assert reasons["loss"] == "lm_head computes in FP8"
    loss, found = results(fused)
    assert len(fp8_products) == 2 * count  # no product was skipped
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    both = (torch.cat([each[name].flatten() for name in grads]) for each in (found, grads))
    assert signal_to_noise(*both) > 15  # rounding of another order changes some roundings to float8


def test_fusion_without_fp8_is_as_before(fp8_products):
    model = bert()
    comera.fp8_(model)
    comera.fp8_(model, None)
    assert comera.fuse_(model).fused("qkv")
    results(model)
    assert not fp8_products


@RECIPES
def test_recomputing_blocks_give_the_same_gradients_to_the_bit(recipe, fp8_products):
    model = bert()
    comera.fp8_(model, recipe)
    expected, grads = results(model)
    comera.recompute_(model)
    loss, found = results(model)
    assert torch.equal(loss, expected)
    assert all(torch.equal(found[name], grad) for name, grad in grads.items())
    assert len(fp8_products) > 2 * sum(isinstance(each, TTLinear) for each in model.modules())  # again in the replay


def test_accumulated_gradients():
    model = nn.Sequential(layer(), nn.GELU(), layer())
    comera.fp8_(model)
    batches = torch.randn(3, 8, 64)
    for batch in batches:
        model(batch).square().mean().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    comera.fuse_(model)
    with accumulating(model):
        for batch in batches:
            model(batch).square().mean().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-6)


@RECIPES
def test_autocast(recipe):
    model = nn.Sequential(layer(), nn.GELU(), layer())
    comera.fp8_(model, recipe)
    x = torch.randn(20, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert signal_to_noise(y, model(x)) > 20


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@RECIPES
def test_torch_compile(recipe):
    model = nn.Sequential(layer(), nn.GELU(), layer())
    comera.fp8_(model, recipe)
    x = torch.randn(20, 64)
    torch._dynamo.reset()
    y = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert signal_to_noise(y, model(x)) > 30
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_it_is_no_state(tmp_path):
    model = nn.Sequential(layer(), nn.Linear(64, 8))
    keys = set(model.state_dict())
    comera.fp8_(model, "rowwise")
    assert set(model.state_dict()) == keys
    comera.save_pretrained(model, tmp_path / "saved")
    fresh = nn.Sequential(layer(), nn.Linear(64, 8))
    comera.load_pretrained(fresh, tmp_path / "saved")
    assert fresh[0].fp8 is None
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True))
    # into a model that computes in FP8, which it keeps
    comera.load_pretrained(model, tmp_path / "saved")
    assert model[0].fp8 == "rowwise"
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_it(duplicate):
    model = nn.Sequential(layer())
    comera.fp8_(model, "rowwise")
    copied = duplicate(model)
    assert copied[0].fp8 == "rowwise"
    x = torch.randn(5, 64)
    assert torch.equal(copied(x), model(x))
    comera.fp8_(copied, None)
    assert model[0].fp8 == "rowwise"


def test_other_conversions():
    model = nn.Sequential(layer(), nn.Linear(64, 64))
    comera.fp8_(model)
    comera.tensorize_(model, CONFIG)  # a new layer starts without
    assert [each.fp8 for each in model] == ["tensorwise", None]
    x = torch.randn(40, 64)
    exact = model[1](F.linear(x, model[0].weight, model[0].bias))
    served = serving_copy(model)  # in the precision of the weights
    torch.testing.assert_close(served(x), exact, rtol=1e-4, atol=1e-5)
    assert model[0].fp8 == "tensorwise"
    comera.materialize_(model)
    torch.testing.assert_close(model(x), exact, rtol=1e-4, atol=1e-5)


# --- training --------------------------------------------------------------------------------------------------------


def trained_loss(recipe):
    """Mean loss of the last steps of a small classifier whose labels are partly random."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(layer(64, 128, 16), nn.GELU(), layer(128, 128, 16), nn.GELU(), nn.Linear(128, 4))
    if recipe:
        comera.fp8_(model, recipe)
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
    teacher, losses = torch.randn(64, 4, generator=generator), []
    for _ in range(240):
        x = torch.randn(128, 64, generator=generator)
        labels = (x @ teacher + 3 * torch.randn(128, 4, generator=generator)).argmax(1)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-80:]) < 0.8 * sum(losses[:80])
    return sum(losses[-80:]) / 80


@RECIPES
def test_training_reaches_the_loss_of_float32(recipe):
    assert trained_loss(recipe) == pytest.approx(trained_loss(None), rel=5e-3)
