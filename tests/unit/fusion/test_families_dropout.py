"""Dropout in families of transformers: drawn where it is, whatever is fused."""

from collections import Counter

import pytest
import torch
from torch import nn

from comera.fusion.fuse import fuse_

from ...helpers.counted import OPERATIONS, counted
from ...helpers.families import BARTS, FORMATS, MBARTS, MODELS, inputs, model, trained
from ...helpers.live import assert_same
from ...helpers.near import assert_near


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation ran."""
    return counted(monkeypatch, OPERATIONS)


WITH_FUNCTIONS = ("opt", "clip", "siglip", "dinov2", *BARTS, *MBARTS)  # whose dropout is no module


@pytest.mark.parametrize("name", MODELS)
def test_with_dropout_training_is_finite(name: str) -> None:
    made = model(name, drop=0.3)
    exact = made.eval()(**inputs(name)).logits.detach()
    report = fuse_(made.train())
    assert report.dropout or name.startswith(WITH_FUNCTIONS)
    found, again = trained(made, name), trained(made, name)
    assert all(t.isfinite().all() for t in found.values())
    assert_same(found, again)  # one seed, the same masks
    assert not torch.allclose(found["logits"], exact, rtol=1e-3, atol=1e-3)
    assert_near({"logits": made.eval()(**inputs(name)).logits.detach()}, {"logits": exact})


def test_dropout_inside_the_mlp_is_the_reason_to_call_its_layers() -> None:
    for name in ("t5", "t5, gated", "modernbert", "wav2vec2", "bart", "mbart"):
        made = model(name)
        assert fuse_(made).fused("mlp")
        made = model(name, drop=0.1)
        if name == "modernbert":
            made.config.mlp_dropout = 0.1
        report = fuse_(made)
        assert not report.fused("mlp")
        assert report.fused("gated activation" if name in ("t5, gated", "modernbert") else "activation")


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_dropout_of_the_activation_without_a_module_is_the_plain_one(name: str, form: str, ran: Counter[str]) -> None:
    made = model(name, form)
    without = trained(made, name)
    layers = [module for module in made.modules() if hasattr(module, "activation_dropout")]
    for layer in layers:
        layer.activation_dropout = 0.5
    exact = trained(made, name)
    assert not torch.allclose(exact["logits"], without["logits"], rtol=1e-3, atol=1e-3)
    fuse_(made)
    assert_near(trained(made, name), exact)  # from one seed the same mask, of the same elements
    assert ran["activation"] == len(layers) == 4
    assert not ran["mlp"]
    ran.clear()
    assert_near(trained(made.eval(), name), without)
    assert ran["mlp" if form == "tt" else "activation"] == 4


@pytest.mark.parametrize("name", ["bart", "mbart", "wav2vec2"])
def test_layers_that_training_leaves_out_stay_left_out(name: str) -> None:
    made = model(name)
    whole = trained(made, name)["logits"]
    made.config.layerdrop = 0.5
    for module in made.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.5
    exact = trained(made, name)
    assert not torch.allclose(exact["logits"], whole, rtol=1e-3, atol=1e-3)
    fuse_(made)
    assert_near(trained(made, name), exact)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("t5", "DenseReluDense.dropout"), ("t5, gated", "DenseReluDense.dropout"), ("modernbert", "mlp.drop"),
     ("modernbert", "attn.out_drop"), ("albert", "attention.output_dropout"), ("gpt2", "attn.resid_dropout"),
     ("vit", "dropout"), ("wav2vec2", "feed_forward.intermediate_dropout"),
     ("wav2vec2", "feed_forward.output_dropout"), ("wav2vec2, pre-norm", "dropout")],
)  # fmt: skip
def test_dropout_that_begins_on_a_later_day_is_drawn(name: str, dropout: str, ran: Counter[str]) -> None:
    made = model(name)
    fuse_(made)
    before = trained(made, name)
    for path, _ in list(made.named_modules()):
        if path.endswith(f".{dropout}"):
            made.set_submodule(path, nn.Dropout(0.5))
    ran.clear()
    assert not torch.allclose(trained(made, name)["logits"], before["logits"], rtol=1e-3, atol=1e-3)
    assert bool(ran["mlp"]) == (not dropout.endswith(("Dense.dropout", "mlp.drop", "intermediate_dropout")))
