"""A compressed model of transformers, its own `save_pretrained`, and `from_pretrained`."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
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
from comera.errors import CheckpointError, ConversionError
from comera.nn.embedding import TTMEmbedding, TTMProjection
from comera.nn.linear import TTLinear
from comera.nn.tensor_train import named_trains

from ...helpers.compressed_bert import BLOCKS, SMALL, bert, compressed_bert
from ...helpers.fresh_python import run_fresh

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


@pytest.mark.parametrize("dense", ["lm_head", "model.embed_tokens"])
def test_load_pretrained_reads_a_folder_in_which_a_tie_was_cut(dense: str, tmp_path: Path) -> None:
    model = llama(tied=True)
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(rank=4), comera.TTM(rank=4), overrides={dense: None}))
    model.save_pretrained(tmp_path)
    loaded = comera.load_pretrained(llama(tied=True), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.tie_word_embeddings is False


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


# --- folders that are refused -----------------------------------------------------------------------------------------


def test_layers_that_are_offloaded_are_refused(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path / "model")
    device_map = {"bert": "cpu", "cls": "disk"}
    with pytest.raises(CheckpointError, match=r"a device for .*, but device_map offloads it"):
        AutoModelForMaskedLM.from_pretrained(
            tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "disk"
        )


def test_another_class_of_model_than_the_saved_one(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(
        CheckpointError, match=r"expected a layer at bert\.\S+ that TT .* got a Linear: its sizes are 64"
    ):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("load", ["from_pretrained", "load_pretrained"])
@pytest.mark.parametrize("damage", ["sum", "negative", "missing", "shape"])
def test_damaged_ranks_of_blocks_are_refused(damage: str, load: str, tmp_path: Path) -> None:
    compressed_bert(BLOCKS).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("block_ranks"))
    if damage == "sum":
        tensors[name][0, 0] += 1
    elif damage == "negative":
        tensors[name][0, :2] += torch.tensor([-9, 9], dtype=torch.int32)
    elif damage == "shape":
        tensors[name] = tensors[name].flatten()
    else:
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    calls = {
        "from_pretrained": lambda: BertForMaskedLM.from_pretrained(tmp_path),
        "load_pretrained": lambda: comera.load_pretrained(bert(), tmp_path),
    }
    with pytest.raises(CheckpointError, match=r"tt.block_ranks to hold|expected cores and gates of bert.encoder"):
        calls[load]()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda trains: trains[0].pop("spec"), "is damaged"),
        (lambda trains: trains[0]["spec"].update(row_modes=[8, 8]), "is damaged"),
        (lambda trains: trains[0].update(names=[]), "is damaged"),
        (lambda trains: trains[4]["spec"].update(in_modes=[4, 16]), "expected cores and gates of bert.encoder"),
        (lambda trains: trains.append("train"), "is damaged"),
    ],
)
@pytest.mark.parametrize("load", ["from_pretrained", "load_pretrained"])
def test_damage_is_refused(change: Any, said: str, load: str, tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change(config["quantization_config"]["trains"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    calls = {
        "from_pretrained": lambda: BertForMaskedLM.from_pretrained(tmp_path),
        "load_pretrained": lambda: comera.load_pretrained(bert(), tmp_path),
    }
    with pytest.raises(CheckpointError, match=said):
        calls[load]()


def test_missing_files_are_named(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path, max_shard_size="10KB")
    next(iter(sorted(tmp_path.glob("model-*")))).unlink()
    with pytest.raises(CheckpointError, match=r"the shard .*model-00001-of.* is missing"):
        comera.load_pretrained(bert(), tmp_path)


def test_formats_for_a_dense_folder_are_refused(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"call comera\.tensorize_"):
        AutoModel.from_pretrained(tmp_path, quantization_config=compressed_bert().config.quantization_config)


# --- what a program has to import -------------------------------------------------------------------------------------


LOAD = """
import sys
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
print(type(model.bert.embeddings.word_embeddings).__name__)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import comera\nfrom transformers import AutoModelForMaskedLM",
        "from transformers import AutoModelForMaskedLM\nimport comera",
        "from transformers import AutoModelForMaskedLM\nimport transformers.quantizers\nimport comera",
        "from transformers import AutoModelForMaskedLM\nimport comera.integrations.transformers",
    ],
)
def test_importing_comera_is_enough(imports: str, tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    shown = run_fresh(imports + LOAD, str(tmp_path))
    assert shown.stdout.strip() == TTMEmbedding.__name__, shown.stderr


def test_without_comera_the_error_says_what_to_import(tmp_path: Path) -> None:
    compressed_bert().save_pretrained(tmp_path)
    shown = run_fresh("from transformers import AutoModelForMaskedLM" + LOAD, str(tmp_path))
    assert shown.returncode == 1
    assert shown.stderr.splitlines()[-1] == (
        "ValueError: Unknown fusion type: comera (this model is compressed: `import comera` before from_pretrained)"
    )


def test_a_library_that_is_too_old_is_no_obstacle() -> None:
    code = """
import sys, types, warnings
warnings.simplefilter("error")
library = types.ModuleType("transformers.quantizers.auto")
sys.modules |= {"transformers": types.ModuleType("transformers"), library.__name__: library}
sys.modules["transformers.quantizers"] = types.ModuleType("transformers.quantizers")
warnings.simplefilter("always")
import comera
print(comera.__version__)
"""
    shown = run_fresh(code)
    assert shown.returncode == 0
    assert "comera.integrations.transformers_formats cannot be used" in shown.stderr


# --- what others could not read back they do not save -----------------------------------------------------------------


class Net(nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)


def test_a_compressed_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = Net()
    comera.tensorize_(model, ratio=2)
    with pytest.raises(ConversionError, match=r"comera\.save_pretrained.*comera\.load_pretrained\(Net"):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    comera.save_pretrained(model, tmp_path / "ours")
    same = comera.load_pretrained(Net(), tmp_path / "ours")
    assert torch.equal(same.up.weight, model.up.weight)


def test_dense_models_are_saved_as_before_and_so_are_those_that_became_dense_again(tmp_path: Path) -> None:
    model = Net(width=64)
    model.save_pretrained(tmp_path)
    assert torch.equal(Net.from_pretrained(tmp_path).up.weight, model.up.weight)
    comera.tensorize_(model, ratio=2)
    comera.materialize_(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(Net.from_pretrained(tmp_path).up.weight, model.up.weight)


def test_it_holds_whichever_is_imported_first() -> None:
    code = (
        "{0}; import torch; "
        "m = type('M', (torch.nn.Module, PyTorchModelHubMixin), {{}})(); m.l = torch.nn.Linear(64, 64); "
        "comera.tensorize_(m, ratio=1.5)\n"
        "try: m.save_pretrained('unused')\n"
        "except comera.errors.ConversionError: print('refused')"
    )
    imports = ["import comera, comera.errors", "from huggingface_hub import PyTorchModelHubMixin"]
    for order in (imports, imports[::-1]):
        done = run_fresh(code.format("; ".join(order)))
        assert done.stdout == "refused\n", done.stderr
