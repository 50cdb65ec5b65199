"""LoRA beside compressed layers."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from comera.convert import BTT, TT, TTM, TensorizeConfig, materialize_, tensorize_
from comera.errors import ConversionError
from comera.fusion import fuse_
from comera.integrations.peft import with_compressed

from ...helpers.small_net import TiedNet

CONFIG = TensorizeConfig(TT(order=4, rank=6), TTM(order=2, rank=6))
BLOCKS = replace(CONFIG, linear=BTT(1))
IDS = torch.arange(60).view(6, 10)


def build(config: TensorizeConfig = CONFIG) -> TiedNet:
    torch.manual_seed(0)
    model = TiedNet(padding_idx=0)
    tensorize_(model, config)
    return model


def tuned(*targets: str, steps: int = 5, config: TensorizeConfig = CONFIG) -> PeftModel:
    model = get_peft_model(build(config), with_compressed(LoraConfig(r=4, target_modules=list(targets))))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(IDS).view(-1, 60), IDS.view(-1)).backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("targets", [("up", "down"), ("table",), ("head",), ("table", "up")])
@pytest.mark.parametrize("formats", [CONFIG, BLOCKS], ids=["tt", "btt"])
def test_adapters_train_beside_compressed_layers_and_load_again(
    targets: tuple[str, ...], formats: TensorizeConfig, tmp_path: Path
) -> None:
    base = build(formats)(IDS)
    torch.testing.assert_close(tuned(*targets, steps=0, config=formats)(IDS), base)
    model = tuned(*targets, config=formats)
    out = model(IDS)
    assert (out - base).abs().max() > 0.01
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS), base)
    model.save_pretrained(tmp_path)
    config = with_compressed(LoraConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(PeftModel.from_pretrained(build(formats), tmp_path, config=config)(IDS), out)


def test_an_adapter_is_merged_into_the_dense_weight_or_not_at_all() -> None:
    model = tuned("up", "down")  # not the table: its tied head would take part
    out = model(IDS)
    for merge in (model.merge_adapter, model.merge_and_unload, lambda: model.merge_and_unload(safe_merge=True)):
        with pytest.raises(ConversionError, match=r"cannot be merged into a tensor train: .*materialize_"):
            merge()
    assert torch.equal(model(IDS), out)
    materialize_(model)
    torch.testing.assert_close(model(IDS), out)
    merged = model.merge_and_unload()
    assert type(merged.up) is nn.Linear
    torch.testing.assert_close(merged(IDS), out)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("fuse_first", [False, True])
def test_fused_blocks_see_adapters(fuse_first: bool) -> None:
    def bert() -> BertModel:
        torch.manual_seed(0)
        small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 60}
        model = BertModel(BertConfig(num_hidden_layers=2, **small))  # type: ignore[arg-type]
        tensorize_(model, CONFIG)
        return model.eval()

    def out(*, fused: bool) -> Tensor:
        model = bert()
        if fused and fuse_first:
            fuse_(model)
        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["query", "value", "dense"], init_lora_weights=False)
        model = get_peft_model(model, with_compressed(config)).eval()
        if fused and not fuse_first:
            fuse_(model)
        return model(IDS).last_hidden_state

    assert (out(fused=False) - bert()(IDS).last_hidden_state).abs().max() > 0.01
    torch.testing.assert_close(out(fused=True), out(fused=False))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("start", ["RANDOM", "SAMPLE_VOCAB"])
def test_prompts_before_a_compressed_table(start: str) -> None:
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    tensorize_(model, CONFIG)
    dense = materialize_(copy.deepcopy(model))
    found = []
    for each in (model, dense):
        torch.manual_seed(1)
        prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, prompt_tuning_init=start)
        tuned = get_peft_model(each, prompts)
        found.append(tuned(input_ids=IDS).logits)
        assert [name for name, p in tuned.named_parameters() if p.requires_grad] == [
            "prompt_encoder.default.embedding.weight"
        ]
    assert found[0].shape == (6, 12, 60)
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_of_a_transposed_weight_is_merged_transposed(dora: bool) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    base = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    tensorize_(base, TensorizeConfig(TT(order=2, rank=4), None))
    lora = LoraConfig(r=4, target_modules=["attn.c_proj"], init_lora_weights=False, use_dora=dora)
    model = get_peft_model(base, with_compressed(lora)).eval()
    out = model(IDS).logits
    materialize_(model)
    torch.testing.assert_close(model(IDS).logits, out)
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, out)


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
# PEFT warns of adapters and copies of tied layers
TIED = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning", "ignore:.* is deprecated:FutureWarning")


@TIED
@pytest.mark.parametrize(
    "wrapped",
    [
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["embed_tokens"]},
    ],
    ids=["head_saved", "table_saved", "table_adapted"],
)
def test_a_tie_that_peft_has_wrapped_is_made_dense_and_declared_as_before(wrapped: dict[str, list[str]]) -> None:
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=60, **SIZES, tie_word_embeddings=True)).eval()
    declared = base._tied_weights_keys
    tensorize_(base, CONFIG)
    model = get_peft_model(base, with_compressed(LoraConfig(r=3, **wrapped))).eval()
    out = model(IDS).logits
    materialize_(model)
    torch.testing.assert_close(model(IDS).logits, out)
    assert base._tied_weights_keys == declared
    assert base.config.tie_word_embeddings
    torch.testing.assert_close(model.merge_and_unload()(IDS).logits, out)


@TIED
def test_a_tied_table_with_an_adapter_is_compressed_and_stays_tied() -> None:
    torch.manual_seed(0)
    base = BertForMaskedLM(BertConfig(vocab_size=60, **SIZES))
    model = get_peft_model(base, LoraConfig(r=3, target_modules=["word_embeddings"]))
    tensorize_(model, CONFIG)
    table = base.bert.embeddings.word_embeddings.base_layer
    assert base.cls.predictions.decoder.tt is table.tt
    materialize_(model)
    merged = model.merge_and_unload()
    assert merged.get_expanded_tied_weights_keys() == {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
