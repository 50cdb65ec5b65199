"""Models of transformers of which only a part was handed to a conversion, saved and loaded by transformers itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import (
    AutoModel,
    BertConfig,
    CLIPVisionConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.utils.quantization_config import BitsAndBytesConfig

import comera
from comera.errors import ConversionError
from comera.integrations.transformers_formats import note_formats_
from comera.nn.tensor_train import named_trains

from ...helpers.fresh_python import run_fresh

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IDS = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(0))
PICTURE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **SIZES)).eval()


def llava() -> Any:
    torch.manual_seed(0)
    eyes = CLIPVisionConfig(**SIZES, image_size=16, patch_size=8)
    config = LlavaConfig(vision_config=eyes, text_config=LlamaConfig(vocab_size=50, **SIZES), image_token_index=2)
    return LlavaForConditionalGeneration(config).eval()


def bert_to_bert() -> Any:
    torch.manual_seed(0)
    encoder, decoder = (BertConfig(vocab_size=50, **SIZES, max_position_embeddings=64) for _ in range(2))
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return EncoderDecoderModel(config=config).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=50, **SIZES, num_key_value_heads=2, num_local_experts=2)
    return MixtralForCausalLM(config).eval()


def output(model: Any) -> Tensor:
    """Logits of a model, or the hidden states of one without a head."""
    given: dict[str, Tensor] = {"input_ids": IDS}
    if "llava" in model.config.model_type:
        given = {"input_ids": torch.cat([torch.full((2, 4), 2), IDS], 1), "pixel_values": PICTURE}
    if isinstance(model, EncoderDecoderModel):
        given["decoder_input_ids"] = IDS
    with torch.no_grad():
        found: Tensor = model.eval()(**given)[0]
    return found


def saved(model: Any, folder: Path) -> Any:
    """The model, saved and loaded again, after a look that the two compute the same with the same tensor trains."""
    model.save_pretrained(folder)
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-6)
    assert {name: tt.spec for name, tt in named_trains(loaded)} == {name: tt.spec for name, tt in named_trains(model)}
    return loaded


def config_of(folder: Path) -> str:
    return (folder / "config.json").read_text()


def notes_in(text: str) -> int:
    """How many configs in config.json hold formats, nested ones among them."""
    return text.count('"quant_method"')


PARTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "llama: layers": (llama, ["model.layers"]),
    "llama: one layer": (llama, ["model.layers.0"]),
    "llama: base": (llama, ["model"]),
    "mixtral: layers, stored under other names": (mixtral, ["model.layers"]),
    "llava: text": (llava, ["model.language_model"]),
    "llava: layers of the text model": (llava, ["model.language_model.layers"]),
    "llava: vision": (llava, ["model.vision_tower"]),
    "llava: base": (llava, ["model"]),
    "llava: text, then vision": (llava, ["model.language_model", "model.vision_tower"]),
    "llava: whole": (llava, [""]),
    "encoder-decoder: encoder": (bert_to_bert, ["encoder"]),
    "encoder-decoder: decoder": (bert_to_bert, ["decoder"]),
    "encoder-decoder: both": (bert_to_bert, ["encoder", "decoder"]),
    "encoder-decoder: whole": (bert_to_bert, [""]),
}


@pytest.mark.parametrize(("build", "parts"), PARTS.values(), ids=PARTS)
def test_a_part_that_was_compressed_comes_back(build: Callable[[], Any], parts: list[str], tmp_path: Path) -> None:
    model = build()
    for part in parts:
        comera.tensorize_(model.get_submodule(part), ratio=1.2)
    loaded = saved(model, tmp_path / "once")
    assert notes_in(config_of(tmp_path / "once")) == 1
    saved(loaded, tmp_path / "twice")


def test_a_table_of_ngrams_and_then_a_part(tmp_path: Path) -> None:
    model = llama()
    comera.ngrams_(model, order=3, rank=8)
    comera.tensorize_(model.model.layers, ratio=1.5)
    saved(model, tmp_path)


def test_a_table_of_ngrams_in_a_part_alone(tmp_path: Path) -> None:
    model = bert_to_bert()
    comera.ngrams_(model.encoder, order=3, rank=8)
    saved(model, tmp_path)


def test_parts_that_are_saved_by_themselves(tmp_path: Path) -> None:
    model = llava()
    comera.tensorize_(model.model, ratio=1.5)
    text = model.model.language_model
    text.save_pretrained(tmp_path / "text")
    with torch.no_grad():
        loaded = AutoModel.from_pretrained(tmp_path / "text").eval()(IDS)[0]
        torch.testing.assert_close(loaded, text(IDS)[0], rtol=0, atol=1e-6)
    model.model.save_pretrained(tmp_path / "base")
    torch.testing.assert_close(output(AutoModel.from_pretrained(tmp_path / "base")), output(model.model))
    saved(model, tmp_path / "whole")  # whose config is that of its base


def test_layers_in_wrappers_that_state_dicts_leave_out(tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model.model, ratio=1.5)
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, LlamaDecoderLayer))
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-6)


def test_saving_changes_nothing_in_the_model(tmp_path: Path) -> None:
    model = llava()
    comera.tensorize_(model.model.language_model.layers, ratio=1.5)
    notes, keys = model.config.to_dict(), list(model.state_dict())
    model.save_pretrained(tmp_path)
    assert list(model.state_dict()) == keys
    after = model.config.to_dict()
    for name in ("dtype", "architectures"):  # transformers sets these itself
        notes.pop(name)
        after.pop(name)
    assert after == notes
    assert "_weight_conversions" not in vars(model)


@pytest.mark.parametrize("build", [llama, llava, bert_to_bert, mixtral])
def test_what_is_dense_again_leaves_no_entry(build: Callable[[], Any], tmp_path: Path) -> None:
    model = build()
    before = sorted(model.state_dict())
    dense: dict[str, Any] = {"lm_head": None} if hasattr(model, "lm_head") else {}
    comera.tensorize_(model, comera.TensorizeConfig(overrides=dense), ratio=1.25)
    for part in model.children():
        if not isinstance(part, nn.Linear):
            comera.materialize_(part)  # never the model that was compressed
    model.save_pretrained(tmp_path / "again")
    text = config_of(tmp_path / "again")
    assert "fusion_config" not in text
    assert "quantization_config" not in text
    assert sorted(model.state_dict()) == before
    loaded, info = type(model).from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-6)


def test_of_a_whole_model_a_part_is_dense_again(tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model, ratio=1.5)
    comera.materialize_(model.model.layers[0])
    saved(model, tmp_path)
    trains = json.loads(config_of(tmp_path))["quantization_config"]["trains"]
    assert not any("layers.0." in name for train in trains for name in train["names"])


def test_a_dense_model_that_shares_the_config_of_a_compressed_one(tmp_path: Path) -> None:
    dense = llava()
    other = LlavaForConditionalGeneration(dense.config).eval()
    comera.tensorize_(other, ratio=1.5)
    dense.save_pretrained(tmp_path / "dense")
    assert notes_in(config_of(tmp_path / "dense")) == 0
    saved(dense, tmp_path / "dense")
    saved(other, tmp_path / "other")


def test_a_config_that_is_written_by_itself(tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model.model.layers, ratio=1.5)
    note_formats_(model)
    model.config.save_pretrained(tmp_path)
    comera.save_pretrained(model, tmp_path)
    torch.testing.assert_close(output(LlamaForCausalLM.from_pretrained(tmp_path)), output(model), rtol=0, atol=1e-6)


def test_checkpoints_of_a_trainer(tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model.model.layers, ratio=1.5)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    options: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    Trainer(model, TrainingArguments(str(tmp_path), **options), train_dataset=rows).train()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-1")
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_another_quantization_method_is_refused_before_anything_is_written(inside: bool, tmp_path: Path) -> None:
    model = llava()
    comera.tensorize_(model.model.vision_tower.encoder.layers, ratio=1.5)
    holder: Any = model.config.text_config if inside else model.config
    holder.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ConversionError, match=r"'?bitsandbytes.*comera\.save_pretrained"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert holder.quantization_config.load_in_8bit  # still there


SAVE = """

import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize(
    "imports",
    ["import comera\nimport transformers.modeling_utils", "import transformers.quantizers.auto\nimport comera", ""],
)
def test_a_process_that_converts_nothing_saves_like_one_that_does(imports: str, tmp_path: Path) -> None:
    model = llama()
    comera.tensorize_(model.model.layers, ratio=1.5)
    torch.save(model, tmp_path / "model.pt")
    shown = run_fresh(imports + SAVE, str(tmp_path / "model.pt"), str(tmp_path / "out"))
    assert shown.returncode == 0, shown.stderr
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(output(loaded), output(model), rtol=0, atol=1e-6)
