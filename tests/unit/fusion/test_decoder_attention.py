"""Attention of decoders, fused: values, gradients and generation of all registered families stay transformers' own."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

import comera
from comera.fusion import decoder_attention
from comera.fusion.fuse import fuse_
from comera.kernels import select
from comera.kernels.cpp import attention as kernels
from comera.memory.recompute import recompute_
from comera.ops.attention import attention
from comera.ops.rotary import rotary

from ...helpers.families import cache_keyword

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # torch.compile
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*"),  # torch's own table of forward derivatives
]

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50,
    "intermediate_size": 64, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# type of configuration -> what its attention has that Llama's has not
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"attention_multiplier": 0.4},
    "phi": {"partial_rotary_factor": 0.5, "qk_layernorm": True},
}
FORMATS = {"dense": None, "tt": comera.TT(order=4, rank=6), "btt": comera.BTT(rank=1)}


def model(family="llama", form="dense", dtype=torch.float64, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    made = AutoModelForCausalLM.from_config(config).to(dtype)
    if FORMATS[form] is not None:
        comera.tensorize_(made, comera.TensorizeConfig(linear=FORMATS[form], embedding=None))
    return made


def ids(batch=3, length=21):
    return torch.arange(batch * length).view(batch, length) * 7 % 50


def results(made, given=None, seed=3, **kwargs):
    torch.manual_seed(seed)
    made.zero_grad()
    out = made(input_ids=ids() if given is None else given, **kwargs).logits
    out.square().mean().backward()
    return [out.detach(), *(p.grad for p in made.parameters() if p.grad is not None)]


def close(found, expected, **tolerance):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 1e-8, "atol": 1e-10}))


@pytest.fixture
def turned(monkeypatch):
    """Counts the calls of the rotary operation."""
    calls = []
    monkeypatch.setattr(decoder_attention, "rotary", lambda *args: calls.append(args) or rotary(*args))
    return calls


@pytest.fixture
def attended(monkeypatch):
    """Records whether calls of our attention are causal."""
    calls = []
    monkeypatch.setattr(
        decoder_attention,
        "attention",
        lambda *args, is_causal, **kwargs: calls.append(is_causal) or attention(*args, is_causal=is_causal, **kwargs),
    )
    return calls


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_stay(family, form, turned):
    plain = model(family, form)
    fused = copy.deepcopy(plain)
    report = fuse_(fused)
    assert len(report.fused("rotary attention")) == 2
    assert len(report.fused("qkv")) == (0 if form == "dense" else 2)
    close(results(fused), results(plain))
    assert len(turned) == 2
    padding = torch.ones(3, 21, dtype=torch.long)
    padding[1, :4] = padding[2, 17:] = 0
    close(results(fused, attention_mask=padding), results(plain, attention_mask=padding))
    close(results(fused, ids(1, 1)), results(plain, ids(1, 1)))
    assert fuse_(fused, enabled=False).fused("rotary attention")
    close(results(fused), results(plain), rtol=0, atol=0)
    assert len(turned) == 6


@pytest.mark.parametrize("form", ["dense", "tt"])
@pytest.mark.parametrize("setting", ["all", "none"])
def test_in_float32(form, setting, attended, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    kernel_calls, whole = [], kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args: kernel_calls.append(args[-1]) or whole(*args))
    exact = model("qwen3", form)
    fused = copy.deepcopy(exact).float()
    fuse_(fused)
    given = ids(3, 131)
    found = [t.double() for t in results(fused, given)]
    assert attended == [True, True]
    assert kernel_calls == ([True, True] if setting == "all" and select.unavailable_reason() is None else [])
    close(found, results(exact, given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_cache_has_the_logits_of_one_pass(family):
    made = model(family).eval()
    prompt = ids(2, 9).clamp(min=3)
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"eos_token_id": None, "attention_mask": torch.ones_like(prompt)}
    expected = made.generate(prompt, use_cache=False, **options)
    fuse_(made)
    for cached in (True, False):
        found = made.generate(prompt, use_cache=cached, **options)
        assert torch.equal(found.sequences, expected.sequences)
        close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        close(
            [made(expected.sequences).logits[:, 8:-1].float()], [torch.stack(expected.logits, 1)], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_a_prompt_in_parts_fills_the_cache_as_before(family, attended):
    plain = model(family).eval()
    fused = copy.deepcopy(plain)
    fuse_(fused)
    for make in (DynamicCache, lambda config: StaticCache(config, max_cache_len=30)):
        caches = [make(config=made.config) for made in (plain, fused)]
        for part in ids(2, 18).split((5, 12, 1), dim=1):
            with torch.no_grad():
                one, other = (
                    made(part, use_cache=True, **{cache_keyword(made): past}).logits
                    for made, past in zip((plain, fused), caches, strict=True)
                )
            close([other], [one])
    assert True in attended  # the first part, into the empty cache
    assert False in attended  # what follows


def test_what_attention_does_not_define_stays_with_transformers(attended):
    made = model()
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    k = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    module = made.model.layers[0].self_attn
    fuse_(made)
    o, _ = decoder_attention.attend(module, q, k, k, None)  # keys beyond the queries, as a static cache has them
    close([o], [decoder_attention.attend(module, q, k[:, :, :5], k[:, :, :5], None)[0]])
    assert attended == [True]
    bias = torch.zeros(1, 4, 5, 5, dtype=torch.float64)
    decoder_attention.attend(module, q, k[:, :, :5], k[:, :, :5], None, position_bias=bias)
    with pytest.raises(ValueError, match="softcap"):
        decoder_attention.attend(module, q, k, k, None, softcap=30.0)
    decoder_attention.attend(module, q[:, :, :1], k, k, None)
    assert attended == [True, False]  # one query sees all keys


def test_dropout_of_attention_is_drawn_once(turned):
    made = model(attention_dropout=0.5, dtype=torch.float32)
    fuse_(made)
    first, again, other = results(made), results(made), results(made, seed=4)
    close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], other[0])
    still = made.eval()(ids()).logits
    close([made(ids()).logits], [still], rtol=0, atol=0)
    assert len(turned) == 10


def test_what_it_does_not_know_runs_as_before(turned, monkeypatch):
    made = model("llama", "tt")
    expected = results(made)
    reasons = {row.name: row.reason for row in fuse_(made).left_alone}
    assert not reasons
    layer = made.model.layers[0].self_attn
    layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    report = fuse_(made)
    assert [(row.name, row.kind) for row in report.left_alone] == [
        ("model.layers.0.self_attn", "qkv"),
        ("model.layers.0.self_attn", "rotary attention"),
    ]
    assert {row.reason for row in report.left_alone} == {"its forward was replaced by someone else"}
    close(results(made), expected)
    assert len(turned) == 1
    turned.clear()
    del layer.forward
    made.set_attn_implementation("eager")
    report = fuse_(made)
    assert {row.name: row.reason for row in report.left_alone} == dict.fromkeys(
        ("", "model"), "it uses the attention 'eager', not 'sdpa'"
    )
    assert len(report.fused("qkv")) == 2
    near = {"rtol": 1e-4, "atol": 1e-6}  # its softmax is one in float32
    close(results(made), expected, **near)
    made.set_attn_implementation("sdpa")
    fuse_(made)
    made.set_attn_implementation("eager")  # after the call
    close(results(made), expected, **near)
    assert made(ids(), output_attentions=True).attentions[0].shape == (3, 4, 21, 21)
    assert len(turned) == 6  # rotary embedding is the same for every attention


def test_hooks_of_the_parts_see_their_calls():
    made, seen = model("qwen3", "tt"), []
    fuse_(made)
    layer = made.model.layers[1].self_attn
    for part in (layer, layer.q_proj, layer.k_norm, layer.o_proj):
        part.register_forward_hook(lambda *args: seen.append(args[0]))
    results(made)
    assert seen == [layer.q_proj, layer.k_norm, layer.o_proj, layer]


def test_other_layers_in_their_place_are_called():
    plain = model("llama", "tt")
    plain.model.layers[0].self_attn.v_proj = nn.Sequential(nn.Linear(32, 16), nn.Tanh()).double()
    fused = copy.deepcopy(plain)
    report = fuse_(fused)
    assert report.fused("qkv") == ("model.layers.1.self_attn",)
    assert len(report.fused("rotary attention")) == 2
    close(results(fused), results(plain))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast_keep_the_signal(half):
    exact = model("llama", "tt")
    expected = exact(ids()).logits.detach()
    for made, autocast in ((copy.deepcopy(exact).to(half), False), (copy.deepcopy(exact).float(), True)):
        noises = []
        for fused in (False, True):
            fuse_(made, enabled=fused)
            with torch.autocast("cpu", dtype=half, enabled=autocast):
                out = made(ids()).logits
            assert out.dtype == half
            out.float().square().mean().backward()
            noises.append((out.detach().double() - expected).square().sum() / expected.square().sum())
        assert noises[1] < 1.5 * noises[0]


def test_a_replay_gives_the_same_gradients():
    made = model("qwen3", "tt", dtype=torch.float32, attention_dropout=0.2)
    fuse_(made)
    found = []
    for enabled in (False, True):
        recompute_(made, enabled=enabled)
        found.append(results(made.train(), ids(3, 130), use_cache=False))
    close(*found, rtol=1e-5, atol=1e-6)


def test_compiled_models_trace_transformers_own_forward(turned):
    made = model(dtype=torch.float32, num_hidden_layers=1)
    expected = results(made, use_cache=False)
    fuse_(made)
    torch._dynamo.reset()
    close(results(torch.compile(made, backend="aot_eager"), use_cache=False), expected, rtol=1e-4, atol=1e-5)
    assert not turned


def test_transforms_of_torch_func_go_through():
    made = model("llama", "tt")
    parameters = {name: p.detach() for name, p in made.named_parameters()}
    given = ids(2, 9).clamp(min=1)  # the row of padding has no gradient

    def loss(parameters):
        return torch.func.functional_call(made, parameters, (given,), {"use_cache": False}).logits.square().mean()

    expected = torch.func.grad(loss)(parameters)
    fuse_(made)
    close(list(torch.func.grad(loss)(parameters).values()), list(expected.values()))
    tangents = {name: torch.ones_like(p) for name, p in parameters.items()}
    _, slope = torch.func.jvp(loss, (parameters,), (tangents,))
    along = sum((expected[name] * tangents[name]).sum() for name in expected)
    close([slope], [along], rtol=1e-6, atol=1e-8)  # norms are computed in float32
