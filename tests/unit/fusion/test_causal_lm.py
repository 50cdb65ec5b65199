"""fuse_(keep_logits=False): the loss of causal language models without their logits."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import comera
from comera.fusion import accumulating
from comera.nn import TTMProjection
from comera.ops import projection
from comera.ops.planner.plan import plan_projection

FORMATS = {"dense": None, "TT": comera.TT(order=4, rank=8), "BTT": comera.BTT(rank=2), "TTM": comera.TTM(rank=5)}


def model(name: str, family: str = "llama", tie: bool = False) -> PreTrainedModel:
    """TTM: the head is tied to the token embedding, and both are one TT-matrix."""
    torch.manual_seed(0)
    tie = tie or name == "TTM"
    ids = {"vocab_size": 259, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": tie}
    made: PreTrainedModel
    if family == "llama":
        shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        made = LlamaForCausalLM(LlamaConfig(**shape, **ids))
    else:
        made = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, n_positions=64, resid_pdrop=0.0, **ids))
        made.transformer.drop.p = 0.0
        made.config._attn_implementation = "eager"
        made.transformer.h[0].attn.attn_dropout.p = 0.0
    if isinstance(found := FORMATS[name], comera.TTM):
        comera.tensorize_(made, comera.TensorizeConfig(comera.BTT(rank=2), found, tied="share"))
        assert type(made.lm_head) is TTMProjection
    elif found is not None:
        comera.tensorize_(made, comera.TensorizeConfig(linear=found, embedding=None))
    return made.train()


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 259, (3, 21))
    labels = ids.clone()
    labels[0, :5] = -100
    return ids, labels


def results(model: PreTrainedModel, **kwargs: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients."""
    model.zero_grad()
    ids, labels = batch()
    with accumulating(model):
        loss = model(input_ids=ids, labels=labels, **kwargs).loss
        loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("given", [{}, {"num_items_in_batch": 7}, {"shift_labels": batch()[1]}], ids=str)
def test_loss_and_gradients_are_those_of_the_model(name: str, family: str, given: dict[str, object]) -> None:
    plain = model(name, family)
    fused = copy.deepcopy(plain)
    assert comera.fuse_(fused, keep_logits=False).fused("loss") == ("",)
    expected, wanted = results(plain, **given)
    loss, grads = results(fused, **given)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == wanted.keys()
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted[parameter], rtol=1e-3, atol=1e-5, msg=parameter)


def test_a_tied_head_adds_its_gradient_to_the_table() -> None:
    plain = model("dense", tie=True)
    fused = copy.deepcopy(plain)
    comera.fuse_(fused, keep_logits=False)
    (_, wanted), (_, grads) = results(plain), results(fused)
    torch.testing.assert_close(grads["model.embed_tokens.weight"], wanted["model.embed_tokens.weight"])


@pytest.mark.parametrize("strategy", ["dense", "two_parts"])
@pytest.mark.parametrize("padding_idx", [None, 5])
def test_a_tied_tt_matrix_by_every_strategy(
    strategy: str, padding_idx: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model("TTM")
    plain.lm_head.padding_idx = plain.model.embed_tokens.padding_idx = padding_idx
    fused = copy.deepcopy(plain)
    comera.fuse_(fused, keep_logits=False)
    (expected, wanted) = results(plain)
    option = next(each for each in plan_projection(plain.lm_head.spec, 63).options if each.strategy == strategy)
    monkeypatch.setattr(projection, "choose", lambda *_, **__: (option.strategy, option.groups))
    loss, grads = results(fused)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for parameter, grad in grads.items():
        torch.testing.assert_close(grad, wanted[parameter], rtol=1e-3, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("name", ["BTT", "TTM"])
def test_under_autocast_the_loss_is_float32(name: str) -> None:
    fused = model(name)
    comera.fuse_(fused, keep_logits=False)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = results(fused)
    expected, _ = results(fused)
    assert loss.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    torch.testing.assert_close(loss, expected, rtol=0, atol=2e-2)


def test_logits_are_there_where_somebody_may_read_them() -> None:
    fused, (ids, labels) = model("BTT"), batch()
    comera.fuse_(fused)
    assert fused(input_ids=ids, labels=labels).logits is not None  # by default
    comera.fuse_(fused, keep_logits=False)
    assert fused(input_ids=ids, labels=labels).logits is None
    assert fused(input_ids=ids).logits is not None
    assert fused(input_ids=ids, labels=labels, return_dict=False)[1].shape == (3, 21, 259)
    with torch.no_grad():
        assert fused(input_ids=ids, labels=labels).logits is not None
    assert fused.eval()(input_ids=ids, labels=labels).logits is not None
    comera.fuse_(fused.train(), enabled=False)
    assert fused(input_ids=ids, labels=labels).logits is not None


def test_a_head_of_another_kind_is_left_alone_with_the_reason() -> None:
    class Scaled(torch.nn.Linear):
        pass

    other = model("dense")
    other.lm_head.__class__ = Scaled
    (row,) = [row for row in comera.fuse_(other, keep_logits=False).left_alone if row.kind == "loss"]
    assert row.reason == "lm_head is a Scaled, not an nn.Linear, TTLinear, BTTLinear or TTMProjection"
    assert other(input_ids=batch()[0], labels=batch()[1]).logits is not None


def test_a_loss_of_the_users_own_stays() -> None:
    fused, (ids, labels) = model("BTT"), batch()
    comera.fuse_(fused, keep_logits=False)
    fused.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + 7
    assert fused(input_ids=ids, labels=labels).loss.item() == 7
    (row,) = [row for row in comera.fuse_(fused, keep_logits=False).left_alone if row.kind == "loss"]
    assert row.reason == "its loss is <lambda>, not ForCausalLMLoss"


def test_a_forward_that_somebody_else_replaced_stays() -> None:
    replaced = model("BTT")
    replaced.forward = lambda **_: "mine"
    report = comera.fuse_(replaced, keep_logits=False)
    assert "its forward was replaced by someone else" in {row.reason for row in report.left_alone}
    assert replaced() == "mine"
