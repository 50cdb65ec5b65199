"""A compressed model of transformers, its own `save_pretrained`, and `from_pretrained`."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import comera
from comera.nn.embedding import TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains

from ...helpers.compressed_bert import BLOCKS, SMALL, bert, compressed_bert

pytestmark = pytest.mark.filterwarnings("ignore:the late stage :UserWarning")  # short ones, in these tests

IDS = torch.arange(2, 18).reshape(2, 8)


def llama(tied: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes, tie_word_embeddings=tied))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=1, n_head=4, n_positions=32))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=512, **sizes, decoder_start_token_id=0))


def logits(model: nn.Module) -> torch.Tensor:
    inputs = {"input_ids": IDS} | ({"labels": IDS} if isinstance(model, T5ForConditionalGeneration) else {})
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**inputs).logits
    return found


@pytest.mark.parametrize(
    ("model", "auto"),
    [
        (bert(), AutoModelForMaskedLM),
        (llama(tied=True), AutoModelForCausalLM),
        (llama(tied=False), AutoModelForCausalLM),
        (gpt2(), AutoModelForCausalLM),
        (t5(), AutoModelForSeq2SeqLM),
    ],
    ids=["bert", "llama-tied", "llama", "gpt2", "t5"],
)
@pytest.mark.parametrize("config", [SMALL, BLOCKS], ids=["tt", "btt"])
def test_from_pretrained_gives_back_what_was_saved(model: Any, auto: Any, config: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(model)
    comera.tensorize_(model, config)
    model.save_pretrained(tmp_path)
    loaded, info = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded), logits(model))
    assert [tt.spec for _, tt in named_trains(loaded)] == [tt.spec for _, tt in named_trains(model)]
    assert {name: p.shape for name, p in loaded.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


@pytest.mark.parametrize("config", [SMALL, BLOCKS], ids=["tt", "btt"])
def test_the_ranks_are_those_of_the_stored_tensors(config: Any, tmp_path: Path) -> None:
    model = compressed_bert(config)
    model.save_pretrained(tmp_path)
    trains = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["trains"]
    assert not any({"ranks", "block_ranks"} & train["spec"].keys() for train in trains)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert [tt.spec for _, tt in named_trains(loaded)] == [tt.spec for _, tt in named_trains(model)]
    assert torch.equal(logits(loaded), logits(model))


def test_ties_are_kept(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert loaded.cls.predictions.decoder.tt is loaded.bert.embeddings.word_embeddings.tt
    assert loaded.cls.predictions.decoder.bias is loaded.cls.predictions.bias


@pytest.mark.parametrize("load", ["from_pretrained", "load_pretrained"])
def test_shards(load: str, tmp_path: Path) -> None:
    model = compressed_bert()
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    if load == "from_pretrained":
        loaded = AutoModelForMaskedLM.from_pretrained(tmp_path)
    else:
        loaded = comera.load_pretrained(bert(), tmp_path)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, {"bert": "cpu", "cls": "cpu"}])
def test_device_maps(device_map: Any, tmp_path: Path) -> None:
    model = compressed_bert()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, torch.bfloat16), ("auto", torch.float32)])
def test_dtypes(dtype: Any, expected: torch.dtype, tmp_path: Path) -> None:
    model = compressed_bert()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=dtype)
    cores = {name: core for name, core in loaded.named_parameters() if ".cores." in name}
    assert {core.dtype for core in cores.values()} == {expected}
    for name, core in model.named_parameters():
        if ".cores." in name:
            assert torch.equal(cores[name], core.to(expected))
    assert logits(loaded).isfinite().all()


def test_the_base_of_a_saved_model(tmp_path: Path) -> None:
    model = compressed_bert()
    model.save_pretrained(tmp_path)
    base = BertModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert torch.equal(base(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)


def test_a_model_around_a_saved_base(tmp_path: Path) -> None:
    model = compressed_bert()
    model.bert.save_pretrained(tmp_path)
    whole = BertForMaskedLM.from_pretrained(tmp_path)
    assert isinstance(whole.cls.predictions.decoder, TTMProjection)  # tied to a table that is compressed
    assert whole.cls.predictions.decoder.tt is whole.bert.embeddings.word_embeddings.tt
    assert torch.equal(whole.bert(IDS).last_hidden_state, model.bert(IDS).last_hidden_state)


def test_a_loaded_model_is_like_a_converted_one(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path / "a")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "a")
    assert not getattr(loaded, "is_quantized", False)  # or Trainer would refuse it
    assert getattr(loaded, "hf_quantizer", None) is None
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    loaded.train()(IDS, labels=IDS).loss.backward()
    assert all(tt.cores[0].grad is not None for _, tt in named_trains(loaded))
    copied = copy.deepcopy(loaded).eval().to(torch.float64)
    copied.save_pretrained(tmp_path / "b")
    assert torch.equal(logits(AutoModelForMaskedLM.from_pretrained(tmp_path / "b", dtype="float64")), logits(copied))


def test_load_pretrained_reads_the_folder(tmp_path: Path) -> None:
    model = compressed_bert()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(comera.load_pretrained(bert(), tmp_path)), logits(model))
    other = bert()
    comera.tensorize_(other, SMALL)
    assert torch.equal(logits(comera.load_pretrained(other, tmp_path)), logits(model))


def test_a_model_that_transformers_stores_under_other_names(tmp_path: Path) -> None:
    def build() -> MixtralForCausalLM:
        sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = MixtralConfig(vocab_size=512, intermediate_size=32, num_local_experts=2, **sizes)
        return MixtralForCausalLM(config).eval()

    model = build()
    comera.tensorize_(model, SMALL)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(MixtralForCausalLM.from_pretrained(tmp_path)), logits(model))
    assert torch.equal(logits(comera.load_pretrained(build(), tmp_path)), logits(model))


def test_the_weights_of_save_pretrained_beside_a_config(tmp_path: Path) -> None:
    model = compressed_bert()
    model.config.save_pretrained(tmp_path)
    comera.save_pretrained(model, tmp_path)
    assert torch.equal(logits(comera.load_pretrained(bert(), tmp_path)), logits(model))
    assert torch.equal(logits(BertForMaskedLM.from_pretrained(tmp_path)), logits(model))


def test_a_model_of_which_only_a_part_was_converted(tmp_path: Path) -> None:
    model = bert()
    comera.tensorize_(model.bert.encoder, SMALL)
    from comera.integrations.transformers_formats import note_formats_

    note_formats_(model)
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert isinstance(loaded.bert.encoder.layer[0].output.dense, TTLinear)
    assert isinstance(loaded.bert.embeddings.word_embeddings, nn.Embedding)


def test_a_late_stage_is_not_begun_twice(tmp_path: Path) -> None:
    model = compressed_bert()
    optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-3))
    ranks = comera.RankController(model, late=comera.LateStage(target_size=0.5)).attach(optimizer)
    loss = model.train()(IDS, labels=IDS).loss
    loss.backward()
    ranks.observe(loss)
    optimizer.step()
    ranks.meet_target_()
    model.save_pretrained(tmp_path)
    loaded = BertForMaskedLM.from_pretrained(tmp_path)
    again = comera.RankController(loaded, late=comera.LateStage(target_size=0.5))
    with pytest.warns(UserWarning, match="no"):
        assert not again.meet_target_().changed
    assert again.target_size == ranks.target_size


def test_a_materialized_model_is_saved_dense(tmp_path: Path) -> None:
    model = compressed_bert()
    comera.materialize_(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config.get("fusion_config") is None
    assert torch.equal(logits(BertForMaskedLM.from_pretrained(tmp_path)), logits(model))


def test_a_dense_model_with_the_config_of_a_compressed_one(tmp_path: Path) -> None:
    dense = bert()
    comera.tensorize_(BertForMaskedLM(dense.config), SMALL)  # writes into the config that both share
    dense.save_pretrained(tmp_path / "a")
    assert torch.equal(logits(BertForMaskedLM.from_pretrained(tmp_path / "a")), logits(dense))
    compressed_bert().save_pretrained(tmp_path / "b")
    again = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path / "b"))
    assert isinstance(again.bert.embeddings.word_embeddings, nn.Embedding)
    again.save_pretrained(tmp_path / "c")
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path / "c")
    assert isinstance(loaded.bert.embeddings.word_embeddings, nn.Embedding)
    assert torch.equal(logits(loaded), logits(again))


def test_other_fusions_of_a_config_stay(tmp_path: Path) -> None:
    model = bert(fusion_config={"patch_embeddings": False})
    comera.tensorize_(model, SMALL)
    model.save_pretrained(tmp_path)
    assert BertForMaskedLM.from_pretrained(tmp_path).config.fusion_config["patch_embeddings"] is False
    comera.materialize_(model)
    assert model.config.fusion_config == {"patch_embeddings": False}
