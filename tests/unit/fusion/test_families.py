"""Families of transformers beyond BERT's and Llama's: what is fused in each, and that nothing else changes."""

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from comera.fusion import qkv
from comera.fusion.fuse import fuse_
from comera.memory.recompute import recompute_

from ...helpers.counted import OPERATIONS, counted
from ...helpers.families import BARTS, CAUSAL, FORMATS, MBARTS, MODELS, SEQ2SEQ, inputs, model, trained
from ...helpers.live import assert_same
from ...helpers.near import assert_near

# name -> modules with a fused part; "up" is the MLP whole, "gate" an MLP that has a gate. In tensor trains these are
# "mlp"; otherwise "activation" and "gated activation". Projections of dense layers are left alone.
PARTS: dict[str, dict[str, int]] = {
    "electra": {"embedding norm": 1, "qkv": 2, "up": 2, "residual norm": 4},
    "distilbert": {"embedding norm": 1, "qkv": 2, "up": 2, "residual norm": 2},
    "albert": {"embedding norm": 1, "qkv": 1, "up": 1, "residual norm": 2},  # all layers are one
    "modernbert": {"rotary attention": 2, "gate": 2, "pre-norm": 2},
    "vit": {"qkv": 2, "up": 2, "pre-norm": 2},
    "gpt2": {"up": 2, "pre-norm": 2},
    "opt": {"qkv": 2, "up": 2, "pre-norm": 2},
    "opt, post-norm": {"qkv": 2, "up": 2, "residual norm": 2},
    "t5": {"qkv": 6, "up": 4, "norm": 12},
    "t5, gated": {"qkv": 6, "gate": 4, "norm": 12},
    "dinov2": {"qkv": 2, "up": 2, "pre-norm": 2},
    "dinov2, gated": {"qkv": 2, "gate": 2, "pre-norm": 2},
    "clip": {"qkv": 2, "up": 2, "pre-norm": 2},
    "siglip": {"qkv": 2, "up": 2, "pre-norm": 2},
    "wav2vec2": {"qkv": 2, "up": 2, "residual norm": 2},
    "wav2vec2, pre-norm": {"qkv": 2, "up": 2, "pre-norm": 2},
    "hubert": {"qkv": 2, "up": 2, "residual norm": 2},
    **{name: {"qkv": 6, "up": 4, "residual norm": 4} for name in BARTS},
    **{name: {"qkv": 6, "up": 4, "pre-norm": 4} for name in MBARTS},
}
# name -> operations that run in a forward, likewise
RUN: dict[str, dict[str, int]] = PARTS | {
    "distilbert": {"embedding norm": 1, "qkv": 2, "up": 2, "residual norm": 4},
    "albert": {"embedding norm": 1, "qkv": 2, "up": 2, "residual norm": 4},
    "modernbert": {"rotary attention": 2, "gate": 2, "residual norm": 2},
    "vit": {"qkv": 2, "up": 2, "residual norm": 2},
    "gpt2": {"up": 2, "residual norm": 2},
    "opt": {"qkv": 2, "up": 2, "residual norm": 2},
    "opt, post-norm": {"qkv": 2, "up": 2, "residual norm": 4},
    "dinov2": {"qkv": 2, "up": 2, "residual norm": 2},
    "dinov2, gated": {"qkv": 2, "gate": 2, "residual norm": 2},
    "clip": {"qkv": 2, "up": 2, "residual norm": 2},
    "siglip": {"qkv": 2, "up": 2, "residual norm": 2},
    "wav2vec2": {"qkv": 2, "up": 2, "residual norm": 4},
    "wav2vec2, pre-norm": {"qkv": 2, "up": 2, "residual norm": 2},
    "hubert": {"qkv": 2, "up": 2, "residual norm": 4},
    **{name: {"qkv": 6, "up": 4, "residual norm": 10} for name in BARTS},
    **{name: {"qkv": 6, "up": 4, "residual norm": 6} for name in MBARTS},
}


def fused(counts: dict[str, int], form: str) -> dict[str, int]:
    """The parts of a table that are fused in this format."""
    names = dict.fromkeys(("up", "gate"), "mlp") if form == "tt" else {"up": "activation", "gate": "gated activation"}
    return {names.get(kind, kind): count for kind, count in counts.items() if kind != "qkv" or form != "dense"}


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation ran."""
    return counted(monkeypatch, OPERATIONS)


@pytest.mark.parametrize("setting", ["", "none"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_is_the_plain_one(
    name: str, form: str, setting: str, ran: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_KERNELS", setting)
    made = model(name, form)
    keys = list(made.state_dict())
    options: list[dict[str, Any]] = [{}]
    if "input_ids" in inputs(name):
        options.append({"attention_mask": inputs(name, padded=True)["attention_mask"]})
    before = [trained(made, name, **each) for each in options]
    assert not ran
    report = fuse_(made)
    found = Counter(row.kind for row in report.rows if not row.reason)
    assert found.pop("attention") == sum(isinstance(m, PreTrainedModel) for m in made.modules())
    assert found == fused(PARTS[name], form)
    assert {row.kind for row in report.left_alone} <= {"qkv"}
    for exact, each in zip(before, options, strict=True):
        ran.clear()
        assert_near(trained(made, name, **each), exact)
        expected = fused(RUN[name], form)
        if name == "modernbert" and form != "dense":
            expected["qkv"] = expected["rotary attention"]
        assert ran == expected
    assert list(made.state_dict()) == keys
    fuse_(made, enabled=False)
    assert_same(trained(made, name), before[0])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", [*CAUSAL, *SEQ2SEQ])
def test_generation_gives_the_same_tokens(name: str, form: str) -> None:
    made = model(name, form).eval()
    given = inputs(name, padded=True)
    del given["labels"]
    if name in CAUSAL:  # padding on the left
        given["attention_mask"] = given["attention_mask"].flip(1)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"eos_token_id": None, "pad_token_id": 1, "decoder_start_token_id": 0 if name not in CAUSAL else None}
    expected = made.generate(**given, use_cache=True, **options)
    fuse_(made)
    for cached in (True, False):
        found = made.generate(**given, use_cache=cached, **options)
        assert torch.equal(found.sequences, expected.sequences)
        for one, other in zip(found.logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["tt", "btt"])
def test_keys_and_values_of_the_encoder_are_one_product(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, counts = model("t5", form), []
    run, runs = qkv.low_rank, qkv.btt_linears
    monkeypatch.setattr(qkv, "low_rank", lambda x, *factors: counts.append(len(factors)) or run(x, *factors))
    monkeypatch.setattr(qkv, "btt_linears", lambda x, layers: counts.append(len(layers)) or runs(x, layers))
    fuse_(made)
    trained(made, "t5")
    assert counts == [3, 3, 3, 2, 3, 2]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_of_all_kinds_stay(name: str) -> None:
    made = model(name)
    plain = copy.deepcopy(made)
    fuse_(made)
    given = inputs(name)
    for options in ({"output_hidden_states": True}, {"output_attentions": False}, {"return_dict": False}):
        found, exact = made(**given, **options), plain(**given, **options)
        if isinstance(found, dict):
            assert found.keys() == exact.keys()
            assert (found.get("hidden_states") is None) == ("output_hidden_states" not in options) or name in SEQ2SEQ
        assert_near(leaves(found), leaves(exact))


def leaves(out: Any) -> dict[str, Tensor]:
    """All tensors of an output, by their number."""
    tensors = [t.detach() for t in tree_leaves(out) if isinstance(t, Tensor)]
    assert len(tensors) > 1
    return {str(k): t for k, t in enumerate(tensors)}


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_pickles_run_on_their_own_weights(name: str) -> None:
    made = model(name)
    fuse_(made)
    before = trained(made, name)
    copies = [copy.deepcopy(made)]
    if MODELS[name][1] != "AudioClassification":  # torch's weight norm, in all of those, knows no pickles
        copies.append(pickle.loads(pickle.dumps(made)))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    for each in copies:
        assert_same(trained(each, name), before)


# name -> modules of which a fused forward makes no calls
SKIPPED = {
    "electra": ("intermediate.dense", "output.LayerNorm", "output.dropout"),
    "distilbert": ("lin1", "lin2", "sa_layer_norm", "ffn"),
    "albert": ("ffn", "ffn_output", "LayerNorm", "output_dropout", "full_layer_layer_norm"),
    "modernbert": ("Wqkv", "Wi", "Wo", "drop", "act", "mlp_norm"),
    "vit": ("fc1", "activation_fn", "fc2", "dropout", "layernorm_after"),
    "gpt2": ("attn", "resid_dropout", "ln_2", "c_fc", "act"),
    "opt": ("fc1", "activation_fn", "fc2", "q_proj", "self_attn_layer_norm", "final_layer_norm"),
    "opt, post-norm": ("self_attn_layer_norm", "final_layer_norm"),
    "t5": ("wi", "act", "dropout", "wo", "k"),
    "t5, gated": ("wi_0", "act", "dropout", "wo", "v"),
    "dinov2": ("q_proj", "fc1", "activation_fn", "fc2", "drop_path", "norm2"),
    "clip": ("k_proj", "fc1", "activation_fn", "fc2", "self_attn", "layer_norm2"),
    "wav2vec2": ("v_proj", "intermediate_dense", "intermediate_dropout", "dropout", "layer_norm", "final_layer_norm"),
    "wav2vec2, pre-norm": ("intermediate_act_fn", "output_dense", "output_dropout", "layer_norm", "final_layer_norm"),
    "bart": ("fc1", "activation_fn", "fc2", "k_proj", "self_attn_layer_norm", "encoder_attn_layer_norm"),
    "mbart": ("fc1", "activation_fn", "fc2", "q_proj", "final_layer_norm", "encoder_attn_layer_norm"),
}


@pytest.mark.parametrize("name", SKIPPED)
def test_hooks_of_a_later_day_see_every_call(name: str) -> None:
    plain = model(name)
    exact, calls = trained(plain, name), []
    made = copy.deepcopy(plain)
    fuse_(made)
    seen: list[list[str]] = []
    for each in (plain, made):
        calls = []
        for path, module in each.named_modules():
            if path.endswith(tuple(f".{end}" for end in SKIPPED[name])):
                module.register_forward_hook(lambda *_, path=path, calls=calls: calls.append(path))
        assert_near(trained(each, name), exact)
        seen.append(calls)
    assert Counter(seen[0]) == Counter(seen[1])
    assert {path.rsplit(".", 1)[-1] for path in seen[0]} >= {end.rsplit(".", 1)[-1] for end in SKIPPED[name]}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_recomputation_and_checkpoints_repeat_it(name: str) -> None:
    made = model(name)
    fuse_(made)
    before = trained(made, name)
    recompute_(made)
    assert_near(trained(made, name), before, 1e-5)
    recompute_(made, enabled=False)
    if made.supports_gradient_checkpointing:
        made.gradient_checkpointing_enable()
        attention = next(m for m in made.modules() if type(m).__name__.endswith(("SelfAttention", "Attention")))
        calls: list[object] = []
        attention.register_forward_hook(lambda *_: calls.append(0))
        assert_near(trained(made, name), before, 1e-4)
        assert len(calls) == 2  # the second time in the backward


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_and_autocast_keep_the_signal(name: str, form: str) -> None:
    exact = model(name, form)
    expected = trained(exact, name)["logits"].double()
    given = inputs(name)
    for made, autocast in ((copy.deepcopy(exact).bfloat16(), False), (copy.deepcopy(exact), True)):
        if not autocast:
            given = {key: t.bfloat16() if t.is_floating_point() else t for key, t in given.items()}
        noises = []
        for on in (False, True):
            fuse_(made, enabled=on)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = made(**given)
            out.loss.backward()
            noises.append((out.logits.detach().double() - expected).square().sum() / expected.square().sum())
        assert noises[1] < 1.5 * noises[0] + 1e-4
        given = inputs(name)


@pytest.mark.parametrize("form", ["dense", "tt"])
@pytest.mark.parametrize("name", ["t5", "t5, gated"])
def test_a_layer_kept_in_float32_is_given_float32(name: str, form: str) -> None:
    made = model(name, form).bfloat16()
    for path, module in made.named_modules():
        if path.endswith(".wo"):
            module.float()
    before = trained(made, name)
    fuse_(made)
    after = trained(made, name)
    assert {key: t.dtype for key, t in after.items()} == {key: t.dtype for key, t in before.items()}
    assert_near({"logits": after["logits"]}, {"logits": before["logits"]}, 0.05)


@pytest.mark.parametrize("name", ["distilbert", "albert"])
def test_chunks_of_the_mlp_stay(name: str, ran: Counter[str]) -> None:
    made = model(name, chunk_size_feed_forward=5)
    before = trained(made, name)
    report = fuse_(made)
    if name == "albert":
        assert "it computes its MLP in chunks" in {row.reason for row in report.left_alone}
    assert_near(trained(made, name), before)
    assert ran["mlp"] == 8  # of both layers in four chunks


def test_what_is_left_alone_is_said_with_the_reason() -> None:
    made = model("albert")
    layer = made.albert.encoder.albert_layer_groups[0].albert_layers[0]
    layer.attention.output_dropout = nn.Dropout(0.0, inplace=True)
    layer.full_layer_layer_norm = nn.RMSNorm(48)
    layer.ff_chunk = lambda x: layer.ffn_output(layer.activation(layer.ffn(x)))
    before = trained(made, "albert")
    report = fuse_(made)
    assert {row.kind + ": " + row.reason for row in report.left_alone} == {
        "mlp: its ff_chunk was replaced by someone else",
        "residual norm: its dropout works in place",
        "residual norm: its norm is a RMSNorm, not an nn.LayerNorm",
    }
    assert len(report.fused("qkv")) == 1
    assert_near(trained(made, "albert"), before)


@pytest.mark.parametrize("form", FORMATS)
def test_without_logits_loss_and_gradients_of_opt_stay(form: str) -> None:
    made = model("opt", form)
    plain = copy.deepcopy(made)
    assert fuse_(made, keep_logits=False).fused("loss") == ("",)
    found, exact = made(**inputs("opt")), plain(**inputs("opt"))
    assert found.logits is None
    for out in (found, exact):
        out.loss.backward()
    results = (
        {"loss": out.loss.detach(), **{name: p.grad for name, p in each.named_parameters()}}
        for out, each in ((found, made), (exact, plain))
    )
    assert_near(*results)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch.compile
@pytest.mark.parametrize(
    ("name", "layers"),
    [("distilbert", "n_layers"), ("albert", "num_hidden_layers"), ("opt", "num_hidden_layers"), ("gpt2", "n_layer"),
     ("vit", "num_hidden_layers")],
)  # fmt: skip
def test_a_compiled_model_runs_as_before(name: str, layers: str, ran: Counter[str]) -> None:
    made = model(name, **{layers: 1})
    before = trained(made, name)
    fuse_(made)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="aot_eager")
    found = {key.removeprefix("_orig_mod."): t for key, t in trained(compiled, name).items()}
    assert_near(found, before)
    assert not ran


# --- dropout: drawn where it is, whatever is fused --------------------------------------------------------------------


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
