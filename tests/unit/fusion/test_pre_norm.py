"""Pre-norm decoders, dense and compressed: norms, residual sums and gated activations fused, with the same results."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import comera
from comera.fusion import norm
from comera.fusion.fuse import fuse_
from comera.kernels import select
from comera.memory.recompute import recompute_

from ...helpers.families import cache_keyword
from ...helpers.live import assert_same
from ...helpers.near import assert_near

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "vocab_size": 50,
    "hidden_size": 33,
    "intermediate_size": 70,
    "pad_token_id": 0,
}
LAYERS = 2
# whether the sums of a layer are fused with its norms; norms of a layer that run alone
FAMILIES = {
    "Llama": (True, 0),
    "Mistral": (True, 0),
    "Qwen2": (True, 0),
    "Qwen3": (True, 2),  # of queries and keys
    "SmolLM3": (True, 0),
    "Gemma": (True, 0),
    "Granite": (False, 2),
    "Gemma2": (False, 4),
    "Gemma3": (False, 6),
}
CONFIG = comera.TensorizeConfig(linear=comera.TT(order=4, rank=6), embedding=None)


def model(family: str = "Llama", *, compressed: bool = False, **sizes: Any) -> Any:
    torch.manual_seed(0)
    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    made = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in made.parameters():  # norms away from 1, biases away from 0
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    if compressed:
        comera.tensorize_(made, CONFIG)
    return made.train()


def trained(made: Any) -> dict[str, Tensor]:
    """The loss and all gradients."""
    torch.manual_seed(1)
    made.zero_grad()
    ids = torch.arange(80).view(4, 20) * 7 % 49 + 1
    out = made(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), **grads}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each RMSNorm that ran as one operation, whether there was a sum before it."""
    calls: list[bool] = []
    run = norm.residual_rms_norm
    monkeypatch.setattr(norm, "residual_rms_norm", lambda z, *given: calls.append(z is not None) or run(z, *given))
    return calls


@pytest.mark.parametrize("setting", ["", "none"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_is_the_plain_one(
    family: str, compressed: bool, setting: str, sums: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_KERNELS", setting)
    made = model(family, compressed=compressed)
    before = trained(made)
    report = fuse_(made)
    whole, alone = FAMILIES[family]
    assert len(report.fused("pre-norm")) == (LAYERS if whole else 0)
    assert len(report.fused("norm")) == (alone + 2 * whole) * LAYERS + 1
    assert len(report.fused("mlp" if compressed else "gated activation")) == LAYERS
    assert f"{LAYERS} {'mlp' if compressed else 'gated activation'}" in str(report)
    others = {"attention"} if compressed else {"attention", "qkv"}
    assert {row.kind for row in report.left_alone} <= others
    assert_near(trained(made), before)
    assert sums.count(True) == LAYERS * whole
    assert sums.count(False) == LAYERS * (alone + whole) + 1
    fuse_(made, enabled=False)
    assert_same(trained(made), before)


@pytest.mark.parametrize("family", ["Qwen3", "SmolLM3", "Gemma"])
def test_without_logits_loss_and_gradients_stay(family: str) -> None:
    made = model(family)
    before = trained(made)
    assert fuse_(made, keep_logits=False).fused("loss") == ("",)
    assert_near(trained(made), before)


def test_attention_sees_hooks_and_the_rest_of_its_arguments() -> None:
    made, seen = model(), []
    fuse_(made)
    layer = made.model.layers[0]
    layer.self_attn.register_forward_hook(lambda m, args, kwargs, out: seen.append(set(kwargs)), with_kwargs=True)
    layer.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    trained(made)
    assert seen[0] >= {"hidden_states", "attention_mask", "position_embeddings", cache_keyword(made)}
    assert seen[1] == "mlp"
    made.eval()
    ids = torch.arange(5)[None]
    plain = copy.deepcopy(made)
    fuse_(plain, enabled=False)
    for options in ({"use_cache": True}, {"output_hidden_states": True}, {"output_attentions": False}):
        found, exact = made(ids, **options), plain(ids, **options)
        assert found.keys() == exact.keys()
        torch.testing.assert_close(found.logits, exact.logits, rtol=1e-4, atol=1e-4)
        for one, other in zip(found.hidden_states or (), exact.hidden_states or (), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(*(each.generate(ids, max_new_tokens=5, do_sample=False) for each in (made, plain)))


def test_hooks_of_a_later_day_see_their_norm(sums: list[bool]) -> None:
    made, seen = model(), []
    before = trained(made)
    fuse_(made)
    first, second = made.model.layers
    first.input_layernorm.register_forward_hook(lambda *_: seen.append("first"))
    second.post_attention_layernorm.register_forward_hook(lambda *_: seen.append("second"))
    second.mlp.act_fn.register_forward_hook(lambda *_: seen.append("activation"))
    assert_near(trained(made), before)
    assert seen == ["first", "second", "activation"]
    assert sums.count(True) == 1  # the other norm was called by itself, after a sum of torch


def test_what_is_left_alone_is_said_with_the_reason() -> None:
    made = model(num_hidden_layers=3)
    first, second, third = made.model.layers
    first.post_attention_layernorm = nn.RMSNorm(33)
    first.mlp.act_fn = nn.Tanh()
    second.post_attention_layernorm.register_forward_hook(lambda *_: None)
    second.mlp.act_fn.register_forward_hook(lambda *_: None)
    made.model.norm.forward = lambda x: x
    third.post_attention_layernorm.variance_epsilon = None
    report = fuse_(made)
    found = {(row.name.removeprefix("model."), row.kind): row.reason for row in report.left_alone if row.kind != "qkv"}
    assert found == {
        ("layers.0", "pre-norm"): "its norm is a RMSNorm, not an nn.LayerNorm",
        ("layers.0.mlp", "mlp"): "no kernel for the activation Tanh",
        ("layers.1", "pre-norm"): "post_attention_layernorm: it has hooks",
        ("layers.1.mlp", "mlp"): "act_fn has hooks",
        ("layers.2", "pre-norm"): "post_attention_layernorm: its variance_epsilon is a NoneType, not a float",
        ("layers.2.post_attention_layernorm", "norm"): "its variance_epsilon is a NoneType, not a float",
        ("norm", "norm"): "its forward was replaced by someone else",
    }


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x.bfloat16()], ids=["float64", "bfloat16"])
def test_norms_of_another_dtype_than_their_weight_keep_their_own(change: Callable[[Tensor], Tensor]) -> None:
    made, x = LlamaRMSNorm(6), change(torch.randn(4, 6))
    expected = made(x)
    assert fuse_(made).fused("norm") == ("",)
    assert torch.equal(made(x), expected)


def test_models_in_half_precision_keep_their_dtype(sums: list[bool]) -> None:
    for family in ("Llama", "Gemma"):
        made = model(family).bfloat16()
        before = trained(made)
        fuse_(made)
        after = trained(made)
        assert all(after[name].dtype == one.dtype for name, one in before.items())
        assert_near(after, before, 0.1)
    assert sums.count(True) == 2 * LAYERS


def test_models_in_float64_keep_the_rounding_of_their_norms(sums: list[bool]) -> None:
    made = model().double()
    before = trained(made)
    fuse_(made)
    assert_near(trained(made), before, 1e-10)
    assert sums == []


def test_under_autocast_no_dtype_changes(sums: list[bool]) -> None:
    made, kinds = model(), []
    for module in made.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, out: kinds.append((args[0].dtype, out.dtype)))
    results = []
    for fused in (False, True):
        fuse_(made, enabled=fused)
        kinds.append(fused)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(trained(made))
    middle = kinds.index(True)
    assert kinds[1:middle] == kinds[middle + 1 :]
    assert_near(results[1], results[0], 0.05)
    assert sums == [False, True] * LAYERS + [False]  # though what attention gives is in bfloat16


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_recomputation_and_checkpoints_repeat_it(sums: list[bool]) -> None:
    made = model(compressed=True)
    fuse_(made)
    before = trained(made)
    recompute_(made)
    assert_same(trained(made), before)
    recompute_(made, enabled=False)
    sums.clear()
    made.gradient_checkpointing_enable()
    assert_near(trained(made), before, 1e-5)
    assert sums.count(True) == 0  # the layer's own code checkpoints
    assert sums.count(False) == 2 * 2 * LAYERS + 1  # twice in each layer


def test_copies_and_pickles_run_on_their_own_weights() -> None:
    made = model()
    fuse_(made)
    before = trained(made)
    second, other = copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    assert_same(trained(second), before)
    assert_same(trained(other), before)
    assert len(fuse_(other).fused("pre-norm")) == LAYERS


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_a_compiled_model_runs_as_before() -> None:
    made = model(num_hidden_layers=1)
    before = trained(made)
    fuse_(made)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert_near(trained(compiled), {f"_orig_mod.{n}" if "." in n else n: t for n, t in before.items()})


def test_an_empty_batch() -> None:
    made = model()
    fuse_(made)
    x = torch.randn(0, 3, 33, requires_grad=True)
    for layer in (made.model.norm, made.model.layers[0].mlp):
        (dx,) = torch.autograd.grad(layer(x).sum(), x)
        assert dx.shape == x.shape
