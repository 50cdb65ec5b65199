"""Blocks are fused only where the code that would run is the code that is known: all of it, or not at all."""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AttentionInterface,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormModel,
    XGLMConfig,
    XGLMModel,
)
from transformers.loss import loss_utils
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

import comera
from comera.fusion import MLP, QKV, BlockPattern, PreNorm, fuse_, register_block
from comera.fusion.dropout import Dropout
from comera.nn import TTLinear

from ...helpers.counted import OPERATIONS, counted

IDS = torch.arange(24).view(2, 12)
SIZES: dict[str, Any] = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(config: Any = LlamaConfig, head: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    made = head(config(**SIZES | {"num_key_value_heads": 4, "intermediate_size": 128} | options))
    comera.tensorize_(made, comera.TensorizeConfig(comera.TT(order=4, rank=8), None))
    return made.eval()


def logits(made: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = made(IDS)[0]
    return found


def doubled(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function that somebody puts in the place of another one."""

    def run(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    return run


def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
    """The same as somebody who minds names and signatures writes it."""
    return functools.wraps(own)(doubled(own))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each fused operation ran."""
    return counted(monkeypatch, OPERATIONS)


# --- classes and functions of other libraries -------------------------------------------------------------------------

# what is replaced: where, its name, and the kinds of parts that hold it
PATCHES: dict[str, tuple[Any, str, set[str]]] = {
    "attention": (modeling_llama.LlamaAttention, "forward", {"qkv", "rotary attention"}),
    "MLP": (modeling_llama.LlamaMLP, "forward", {"mlp"}),
    "norm": (modeling_llama.LlamaRMSNorm, "forward", {"norm", "pre-norm"}),
    "layer": (modeling_llama.LlamaDecoderLayer, "forward", {"pre-norm"}),
    "rotary embedding": (modeling_llama, "apply_rotary_pos_emb", {"rotary attention"}),
    "half of it": (modeling_llama, "rotate_half", {"rotary attention"}),
    "activation": (torch.nn.SiLU, "forward", {"mlp"}),
    "linear layers": (TTLinear, "forward", {"qkv"}),
    "attention function": (F, "scaled_dot_product_attention", {"attention"}),
}


@pytest.mark.parametrize("patch", [doubled, wrapped])
@pytest.mark.parametrize("name", PATCHES)
def test_what_somebody_replaced_before_is_left_alone(
    name: str, patch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, attribute, kinds = PATCHES[name]
    stock, made = logits(llama()), llama(hidden_act="swish" if name == "activation" else "silu")
    assert {row.kind for row in fuse_(copy.deepcopy(made)).left_alone} == set()
    monkeypatch.setattr(holder, attribute, patch(getattr(holder, attribute)))
    exact = logits(made)
    assert not torch.allclose(exact, stock, rtol=1e-3, atol=1e-4)
    report = fuse_(made)
    left = [row for row in report.left_alone if row.kind in kinds or row.kind == "activation"]
    assert {row.kind.replace("activation", "mlp") for row in left} == kinds
    assert all(attribute in row.reason or "known" in row.reason or "own" in row.reason for row in left)
    torch.testing.assert_close(logits(made), exact, rtol=1e-5, atol=1e-6)
    monkeypatch.undo()
    assert not fuse_(made).left_alone
    torch.testing.assert_close(logits(made), stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PATCHES)
def test_what_somebody_replaces_later_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, attribute, _ = PATCHES[name]
    made = llama(hidden_act="swish" if name == "activation" else "silu")
    plain = copy.deepcopy(made)
    fuse_(made)
    stock = logits(made)
    monkeypatch.setattr(holder, attribute, doubled(getattr(holder, attribute)))
    torch.testing.assert_close(logits(made), logits(plain), rtol=1e-5, atol=1e-6)
    monkeypatch.undo()
    torch.testing.assert_close(logits(made), stock, rtol=0, atol=0)


def test_code_of_the_library_in_another_place_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    made = llama()
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "eps", 1e-6, raising=False)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "_norm", modeling_gemma3.Gemma3RMSNorm._norm, raising=False)
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", modeling_gemma3.Gemma3RMSNorm.forward)
    exact = logits(made)
    reasons = {row.reason for row in fuse_(made).left_alone if row.kind == "norm"}
    file = "transformers.models.llama.modeling_llama"
    assert reasons == {f"LlamaRMSNorm.forward is not the code that {file} ships"}
    torch.testing.assert_close(logits(made), exact, rtol=1e-5, atol=1e-6)


def test_a_copy_of_known_code_that_somebody_replaced_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    made = llama(MistralConfig, MistralForCausalLM)
    assert len(fuse_(made).fused("mlp")) == 2
    monkeypatch.setattr(modeling_mistral.MistralMLP, "forward", doubled(modeling_mistral.MistralMLP.forward))
    report = fuse_(made)
    assert {row.reason for row in report.left_alone} == {
        "MistralMLP.forward is not the code that transformers.models.mistral.modeling_mistral ships"
    }
    assert not report.unknown


@pytest.mark.parametrize(
    ("holder", "name"), [(nn.LayerNorm, "forward"), (nn.Dropout, "forward"), (F, "dropout"), (F, "layer_norm")]
)
def test_torchs_own_layers_are_known_by_their_code(holder: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drop = 0.1 if "dropout" in (name, getattr(holder, "__name__", "").lower()) else 0.0
    sizes = SIZES | {"hidden_dropout_prob": drop, "attention_probs_dropout_prob": 0.0}
    made = BertModel(BertConfig(**sizes, intermediate_size=96)).train()
    monkeypatch.setattr(holder, name, doubled(getattr(holder, name)))
    torch.manual_seed(1)
    exact = made(IDS)[0]
    report = fuse_(made)
    if drop:
        assert report.dropout == 0
        assert not any(isinstance(module, Dropout) for module in made.modules())
    assert not report.fused("residual norm")
    torch.manual_seed(1)
    torch.testing.assert_close(made(IDS)[0], exact, rtol=1e-5, atol=1e-5)


def test_a_dropout_that_somebody_replaces_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nn.Sequential(nn.Dropout(0.5))
    assert fuse_(made).dropout == 1
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: 7 * x)
    assert torch.equal(made(torch.ones(3)), torch.full((3,), 7.0))


@pytest.mark.parametrize("name", ["ForCausalLMLoss", "fixed_cross_entropy"])
def test_a_loss_that_somebody_replaced_is_computed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss_utils.ForCausalLMLoss)
    monkeypatch.setattr(loss_utils, name, doubled(getattr(loss_utils, name)))
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss_utils.ForCausalLMLoss)
    made = llama().train()
    exact = made(IDS, labels=IDS).loss
    (row,) = [row for row in fuse_(made, keep_logits=False).left_alone if row.kind == "loss"]
    assert name in row.reason or "ForCausalLMLoss" in row.reason
    torch.testing.assert_close(made(IDS, labels=IDS).loss, exact)


def test_logits_that_a_forward_changes_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Capped(LlamaForCausalLM):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            output = self.model(ids)
            output.logits = self.lm_head(output[0]).tanh()
            output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=50)
            return output

    register_block(Capped, comera.fusion.causal_lm.CausalLM())
    made = llama(head=Capped).train()
    exact = made(IDS, labels=IDS)
    assert fuse_(made, keep_logits=False).fused("loss") == ("",)
    found = made(IDS, labels=IDS)
    torch.testing.assert_close((found.loss, found.logits), (exact.loss, exact.logits))


def test_an_attention_of_the_users_own_under_the_name_of_torchs_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = AttentionInterface._global_mapping["sdpa"]
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", doubled(stock))
    made = llama()
    exact = logits(made)
    assert {row.reason for row in fuse_(made).left_alone} == {"its attention 'sdpa' is not transformers' own"}
    torch.testing.assert_close(logits(made), exact, rtol=1e-5, atol=1e-6)


def test_a_dropout_that_does_not_end_its_part_is_drawn_there(monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_gpt2.GPT2Attention.forward
    torch.manual_seed(0)
    made = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, embd_pdrop=0.0, attn_pdrop=0.0)).train()
    made.h[0].attn.resid_dropout.p = 0.999
    made.h[0].mlp.dropout.p = 0.0
    monkeypatch.setattr(
        modeling_gpt2.GPT2Attention, "forward", lambda *a, **k: (own(*a, **k)[0] + 3.0, None, *own(*a, **k)[2:])
    )
    fuse_(made)
    seen: list[Tensor] = []
    made.h[0].ln_2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rows: list[Tensor] = []
    made.h[0].register_forward_pre_hook(lambda _, args: rows.append(args[0]))
    made(IDS)
    added = seen[0] - rows[0]
    assert ((added - 3.0).abs() < 1e-4).float().mean() > 0.9  # 3 is added after dropout, so hardly any is dropped


# --- instances --------------------------------------------------------------------------------------------------------


def test_methods_that_an_instance_replaces_run() -> None:
    norm = modeling_gemma3.Gemma3RMSNorm(8)
    norm._norm = lambda x: 3 * x
    x = torch.randn(4, 8)
    exact = norm(x)
    (row,) = fuse_(norm).left_alone
    assert row.reason == "its _norm was replaced by someone else"
    assert torch.equal(norm(x), exact)
    del norm._norm
    assert fuse_(norm).fused("norm") == ("",)
    norm._norm = lambda x: 3 * x  # after the call
    assert torch.equal(norm(x), exact)


def test_the_function_of_an_activation_may_be_another_one() -> None:
    made = BertModel(BertConfig(**SIZES, intermediate_size=96)).eval()
    made.encoder.layer[0].intermediate.intermediate_act_fn.act = torch.tanh
    exact = made(IDS)[0]
    (row,) = [row for row in fuse_(made).left_alone if row.kind == "mlp"]
    assert row.reason == "the function of intermediate.intermediate_act_fn was replaced by someone else"
    torch.testing.assert_close(made(IDS)[0], exact, rtol=1e-5, atol=1e-5)


# --- hooks of all modules ---------------------------------------------------------------------------------------------


@pytest.fixture
def anywhere() -> Iterator[list[Any]]:
    """Handles of hooks that are removed in the end."""
    handles: list[Any] = []
    yield handles
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("late", [False, True])
def test_hooks_of_all_modules_change_what_they_would(late: bool, anywhere: list[Any], ran: Counter[str]) -> None:
    made = llama()
    plain = copy.deepcopy(made)

    def twice(module: nn.Module, args: Any, out: Any) -> Any:
        return 2 * out if isinstance(module, TTLinear | modeling_llama.LlamaRMSNorm | nn.SiLU) else None

    if late:
        fuse_(made)
    anywhere.append(torch_module.register_module_forward_hook(twice))
    if not late:
        fuse_(made)
    torch.testing.assert_close(logits(made), logits(plain), rtol=0, atol=0)
    assert not ran
    anywhere.pop().remove()
    torch.testing.assert_close(logits(made), logits(plain), rtol=1e-5, atol=1e-6)
    assert ran["mlp"] + ran["gated activation"] == 2


@pytest.mark.filterwarnings(
    "ignore:For backward hooks to be called:UserWarning", "ignore:Full backward hook:UserWarning"
)
def test_every_kind_of_hook_of_all_modules_sees_every_call(anywhere: list[Any]) -> None:
    made = llama()
    plain = copy.deepcopy(made)
    fuse_(made)
    for register in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
        calls: list[str] = []
        see: Callable[..., None] = lambda module, *_, calls=calls: calls.append(type(module).__name__)  # noqa: E731
        anywhere.append(getattr(torch_module, f"register_module_{register}_hook")(see))
        made(IDS)[0].sum().backward()
        seen = Counter(calls)
        calls.clear()
        plain(IDS)[0].sum().backward()
        assert seen == Counter(calls)
        assert seen["TTLinear"] == 15
        anywhere.pop().remove()


def test_the_counter_of_flops_counts_what_runs(ran: Counter[str]) -> None:
    made = llama()
    fuse_(made)
    with FlopCounterMode(display=False):
        logits(made)
    assert ran["qkv"] == 2


def test_who_takes_over_all_calls_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made, seen = llama(), []
    fuse_(made)
    own = nn.Module.__call__
    monkeypatch.setattr(nn.Module, "__call__", lambda m, *a, **k: seen.append(type(m)) or own(m, *a, **k))
    logits(made)
    assert seen.count(TTLinear) == 15


# --- models that look like others -------------------------------------------------------------------------------------


@pytest.mark.parametrize("crossed", [False, True])
def test_xglm_has_mbarts_code_without_its_cross_attention(crossed: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 64, "num_layers": 1, "attention_heads": 4, "ffn_dim": 128}
    made = XGLMModel(XGLMConfig(**sizes, add_cross_attention=crossed)).eval()
    comera.tensorize_(made, comera.TensorizeConfig(comera.TT(order=4, rank=8), None))
    given = {"input_ids": IDS}
    if crossed:
        given["encoder_hidden_states"] = torch.randn(2, 5, 64)
    exact = made(**given)[0]
    assert len(fuse_(made).fused("pre-norm")) == 1
    torch.testing.assert_close(made(**given)[0], exact, rtol=1e-5, atol=1e-5)


def test_roberta_prelayernorm_keeps_the_norm_in_its_mlp() -> None:
    torch.manual_seed(0)
    made = RobertaPreLayerNormModel(RobertaPreLayerNormConfig(**SIZES, intermediate_size=128)).eval()
    comera.tensorize_(made, comera.TensorizeConfig(comera.TT(order=4, rank=8), None))
    exact = made(IDS + 3)[0]
    report = fuse_(made)
    assert {row.reason for row in report.left_alone} == {
        "intermediate is a RobertaPreLayerNormIntermediate, whose code is not known"
    }
    assert len(report.fused("qkv")) == 2
    torch.testing.assert_close(made(IDS + 3)[0], exact, rtol=1e-5, atol=1e-5)


def test_a_module_without_the_parts_of_its_code_is_left_alone() -> None:
    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    register_block(Late, MLP("forward", ups=("up",), activation="act", down="down"))
    (row,) = fuse_(Late()).left_alone
    assert row.reason == "it has not all parts of such a block ('Late' object has no attribute 'act')"


# --- keywords ---------------------------------------------------------------------------------------------------------


class Asked(nn.Module):
    """A block whose forward has keywords with all names that something of ours could have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.next = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.mix = (nn.Linear(16, 16) for _ in range(3))
        self.up, self.act, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(
        self, x: Tensor, *, cache: Any, module: Any, method: Any, parts: Any, norms: Any, given: Any, args: Any
    ) -> Tensor:
        y = x + self.mix(self.q(self.norm(x)) * self.k(self.norm(x)))
        return y + self.down(self.act(self.up(self.next(y)))) + cache * module * method * parts * norms * given * args


PATTERNS: dict[str, BlockPattern] = {
    "qkv": QKV(("q", "k")),
    "mlp": MLP("forward", ups=("up",), activation="act", down="down"),
    "pre-norm": PreNorm("norm", ("mix",), "next"),
}


@pytest.mark.parametrize("kind", PATTERNS)
def test_keywords_of_others_do_not_collide_with_ours(kind: str) -> None:
    register_block(Asked, PATTERNS[kind])
    torch.manual_seed(0)
    made = nn.ModuleList([Asked()])
    comera.tensorize_(made, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
    keywords = dict.fromkeys(("cache", "module", "method", "parts", "norms", "given", "args"), 2.0)
    x = torch.randn(40, 16)
    exact = made[0](x, **keywords)
    assert fuse_(made).fused(kind) == ("0",)
    torch.testing.assert_close(made[0](x, **keywords), exact, rtol=1e-5, atol=1e-5)
