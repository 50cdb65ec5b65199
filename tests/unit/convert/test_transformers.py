"""Hugging Face models: Conv1D, declared ties, tie_weights and save_pretrained after the conversion."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from comera.convert import TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import TensorTrain, named_trains
from comera.pretrained import load_pretrained, save_pretrained

SMALL = TensorizeConfig(linear=TT(order=4, rank=6), embedding=TTM(order=3, rank=8))
BASE = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "use_cache": False}
POSITIONS = {"max_position_embeddings": 32}
IDS = torch.tensor([[5, 6, 7, 1], [8, 511, 2, 0]])


def bert() -> BertForMaskedLM:
    return BertForMaskedLM(BertConfig(**BASE, **POSITIONS, intermediate_size=128, pad_token_id=0))


def roberta() -> RobertaForMaskedLM:
    return RobertaForMaskedLM(RobertaConfig(**BASE, **POSITIONS, intermediate_size=128, pad_token_id=1))


def gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=512, n_positions=32, n_embd=64, n_layer=1, n_head=2, use_cache=False)
    config.bos_token_id = config.eos_token_id = 1
    return GPT2LMHeadModel(config)


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**BASE, **POSITIONS, intermediate_size=128, tie_word_embeddings=True))


def llama_untied() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**BASE, **POSITIONS, intermediate_size=128, tie_word_embeddings=False))


def t5() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=512, d_model=64, d_kv=32, d_ff=128, num_layers=1, num_heads=2, use_cache=False)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config)


TIED = [bert, roberta, gpt2, llama, t5]
MODELS = [*TIED, llama_untied]


def made(make: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = make()
    return model.eval()


def logits(model: PreTrainedModel) -> Tensor:
    extra = {"decoder_input_ids": IDS} if isinstance(model, T5ForConditionalGeneration) else {}
    return model(input_ids=IDS, **extra).logits


def assert_tied(model: PreTrainedModel) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head, TTMProjection)
    assert isinstance(embedding, TTMEmbedding)
    assert head.tt is embedding.tt


@pytest.mark.parametrize("make", MODELS)
def test_forward_backward_and_tie_weights(make: object) -> None:
    model = made(make)
    total = sum(p.numel() for p in model.parameters())
    report = tensorize_(model, SMALL)
    assert report.dense_total == total
    assert report.total < total / 2
    before = logits(model)
    model.tie_weights()
    model.tie_weights(recompute_mapping=False)
    if make is llama_untied:
        assert isinstance(model.get_output_embeddings(), TTLinear)
    else:
        assert_tied(model)
    assert torch.equal(logits(model), before)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for _, tt in named_trains(model) for p in tt.parameters())


@pytest.mark.parametrize("make", MODELS)
def test_materialized_models_compute_the_same_and_are_tied_as_before(make: object) -> None:
    model = made(make)
    ties = model.all_tied_weights_keys
    tensorize_(model, SMALL)
    want = logits(model)
    materialize_(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    assert model.all_tied_weights_keys == ties
    model.tie_weights()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == (make is not llama_untied)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_both_ways_of_saving(make: object, tmp_path: Path) -> None:
    model = made(make)
    tensorize_(model, SMALL)
    model.save_pretrained(tmp_path / "theirs")
    save_pretrained(model, tmp_path / "ours")
    other = made(make)
    load_pretrained(other, tmp_path / "ours")
    assert torch.equal(logits(other), logits(model))
    if make is not llama_untied:
        assert_tied(other)
    other.tie_weights()
    with torch.device("meta"):
        meta: PreTrainedModel = make()
    load_pretrained(meta.eval(), tmp_path / "ours")
    for loaded in (other, meta):
        assert torch.equal(logits(loaded), logits(model))


def test_a_bias_tied_to_another_module_stays_tied() -> None:
    for make, path in ((bert, "cls.predictions"), (roberta, "lm_head")):
        model = made(make)
        tensorize_(model, SMALL)
        model.tie_weights()
        head = model.get_submodule(path)
        assert head.decoder.bias is head.bias
        materialize_(model)
        assert head.decoder.bias is head.bias


@pytest.mark.parametrize("make", TIED)
@pytest.mark.parametrize("tied", ["share", "untie"])
def test_ties_that_were_cut_stay_cut(make: object, tied: str) -> None:
    model = made(make)
    (name,) = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    overrides: dict[str, TT | TTM | None] = {name: None} if tied == "share" else {}
    config = TensorizeConfig(SMALL.linear, SMALL.embedding, overrides, tied=tied)
    tensorize_(model, config)
    head = model.get_output_embeddings()
    model.tie_weights()
    assert model.get_output_embeddings() is head
    assert isinstance(head, nn.Linear if tied == "share" else TTLinear)
    assert isinstance(model.get_input_embeddings(), TTMEmbedding)
    model(input_ids=IDS, labels=IDS).loss.backward()


def test_conv1d_becomes_a_ttlinear_and_comes_back() -> None:
    model = made(gpt2)
    block = model.transformer.h[0]
    names = [name for name, module in model.named_modules() if type(module) is Conv1D]
    assert len(names) == 4
    tensorize_(model, TensorizeConfig(TT(order=2, rank=256), None, {"lm_head": None}, init="decompose", min_ratio=0))
    assert all(isinstance(model.get_submodule(name), TTLinear) for name in names)
    torch.testing.assert_close(logits(model), logits(made(gpt2)), rtol=1e-3, atol=1e-4)
    assert (block.attn.c_attn.in_features, block.attn.c_attn.out_features) == (64, 192)
    materialize_(model)
    assert [name for name, module in model.named_modules() if type(module) is Conv1D] == names
    torch.testing.assert_close(logits(model), logits(made(gpt2)), rtol=1e-3, atol=1e-4)


def test_std_of_conv1d_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = gpt2()
    tensorize_(model, SMALL)
    attention = model.transformer.h[0].attn.c_attn
    assert attention.tt.cores[0].is_meta
    assert attention.tt.init_std == 0.02


@pytest.mark.parametrize("make", MODELS)
def test_a_dense_weight_never_needs_to_exist(make: object) -> None:
    with torch.device("meta"):
        model: PreTrainedModel = make()
    tensorize_(model, TensorizeConfig(SMALL.linear, SMALL.embedding, init_std=0.02))
    if make is not llama_untied:
        assert_tied(model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, TensorTrain):
            module.reset_parameters()
            assert module.dense().std().item() == pytest.approx(0.02, rel=0.2)
