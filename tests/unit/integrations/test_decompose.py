"""Trained dense weights in a folder become a compressed model there, layer by layer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
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
from comera.cli import main as command_line
from comera.convert.tensorize import Plan
from comera.errors import CheckpointError, ConversionError, SpecError
from comera.integrations import decompose
from comera.integrations.decompose import convert_folder

from ...helpers.live import Live, assert_same

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
EXPERTS = comera.TensorizeConfig(comera.TT(order=2), comera.TTM(order=2), experts=comera.BTT())


def llama(tied: bool = False, **sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config: dict[str, Any] = {"vocab_size": 301, **SIZES, **sizes}
    return LlamaForCausalLM(LlamaConfig(**config, tie_word_embeddings=tied))


def t5() -> T5ForConditionalGeneration:
    sizes: dict[str, Any] = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=301, **sizes))


def mixtral() -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(vocab_size=301, num_local_experts=4, num_key_value_heads=2, **SIZES))


MODELS = {
    "llama": llama,
    "a tied head": lambda: llama(tied=True),
    "half precision": lambda: llama().bfloat16(),
    "layers (in, out)": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=301, n_embd=64, n_layer=2, n_head=4)),
    "names of a first release": lambda: BertForMaskedLM(BertConfig(vocab_size=301, **SIZES)),
    "configs of parts": t5,
    "experts that files hold one by one": mixtral,
}


class Folders(NamedTuple):
    dense: Path
    out: Path

    @property
    def partial(self) -> Path:
        return self.out.with_name("out.partial")

    def shards(self) -> list[Path]:
        return sorted(self.dense.glob("*.safetensors"))

    def assert_refused(self, error: type[Exception], message: str, ratio: float = 2) -> None:
        """With nothing written."""
        with pytest.raises(error, match=message):
            convert_folder(self.dense, self.out, ratio=ratio)
        assert [path.name for path in self.dense.parent.iterdir()] == ["dense"]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    llama().save_pretrained(tmp_path / "dense", max_shard_size="60KB")
    return Folders(tmp_path / "dense", tmp_path / "out")


@pytest.mark.filterwarnings("ignore:.*token_id must be")
@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_that_of_the_loaded_model_to_the_bit(name: str, tmp_path: Path) -> None:
    model: Any = MODELS[name]()
    model.save_pretrained(tmp_path / "dense", max_shard_size="60KB")
    config = EXPERTS if "experts" in name else None
    report = convert_folder(tmp_path / "dense", tmp_path / "out", config, ratio=2)

    dense = type(model).from_pretrained(tmp_path / "dense", dtype="auto")
    expected = comera.tensorize_(dense, config, ratio=2, init="decompose")
    loaded, about = type(model).from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert_same(loaded.state_dict(), dense.state_dict())
    assert report.to_dict() == expected.to_dict()
    assert not any(about.values())
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("dense", "out")] == []


def test_a_head_that_is_stored_beside_its_table_stays_tied_to_it(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    assert convert_folder(tmp_path / "dense", tmp_path / "out", ratio=2).dense_total == sum(
        p.numel() for p in model.parameters()
    )
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.tt is loaded.model.embed_tokens.tt


def test_memory_holds_the_result_and_one_dense_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(hidden_size=256, intermediate_size=512, num_hidden_layers=16)
    dense, largest = (pick(p.nbytes for p in model.parameters()) for pick in (sum, max))
    model.save_pretrained(tmp_path / "dense", max_shard_size="2MB")
    del model
    live, peak = Live(torch.nn.Module()), 0
    make = decompose._Decomposer._make

    def made(self: Any, k: int, weight: torch.Tensor) -> None:
        nonlocal peak
        peak = max(peak, live.nbytes)  # the weight is read, those before it are gone
        make(self, k, weight)

    monkeypatch.setattr(decompose._Decomposer, "_make", made)
    with live:
        report = convert_folder(tmp_path / "dense", tmp_path / "out", ratio=8)
    result = 4 * report.total
    assert result + largest < 0.3 * dense
    assert 0.9 * result < peak < 1.1 * (result + largest)


def test_a_conversion_that_was_killed_goes_on(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        assert not folders.out.exists()
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_folder(folders.dense, folders.out, ratio=2, progress=stop)
    assert len(list(folders.partial.glob("*.safetensors"))) == 5
    assert not folders.out.exists()

    decomposed: list[str] = []
    as_before = Plan.decompose

    def count(self: Any, group: Any, weight: torch.Tensor) -> Any:
        decomposed.append(group.leader.name)
        return as_before(self, group, weight)

    monkeypatch.setattr(Plan, "decompose", count)
    steps: list[tuple[int, int]] = []
    report = convert_folder(folders.dense, folders.out, ratio=2, progress=lambda *step: steps.append(step))
    assert (len(decomposed), steps) == (11, [(k, 16) for k in range(17)])
    assert not folders.partial.exists()
    dense = LlamaForCausalLM.from_pretrained(folders.dense)
    assert report.to_dict() == comera.tensorize_(dense, ratio=2, init="decompose").to_dict()
    assert_same(LlamaForCausalLM.from_pretrained(folders.out).state_dict(), dense.state_dict())


def test_layers_of_another_conversion_are_refused(folders: Folders) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_folder(folders.dense, folders.out, ratio=2, progress=stop)
    with pytest.raises(ConversionError, match=r"out.partial to hold the layers of this conversion, .* delete"):
        convert_folder(folders.dense, folders.out, ratio=3)


# --- refused before anything is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (Path.unlink, "is missing: take another copy"),
        (lambda shard: shard.write_bytes(shard.read_bytes()[:-100]), "is truncated or damaged"),
        (lambda shard: save_file({"a": torch.zeros(1)}, shard), "lacks model"),
    ],
    ids=["missing", "truncated", "of another model"],
)
def test_a_shard_that_is_none_of_the_model_is_named(
    folders: Folders, damage: Callable[[Path], object], said: str
) -> None:
    shard = folders.shards()[2]
    damage(shard)
    folders.assert_refused(CheckpointError, f"{shard.name} {said}")


def test_parts_without_weights_are_named(folders: Folders) -> None:
    index = folders.dense / "model.safetensors.index.json"
    about = json.loads(index.read_text())
    del about["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps(about))
    for shard in folders.shards():
        kept = {key: value for key, value in load_file(shard).items() if "layers.1.mlp.up_proj" not in key}
        save_file(kept, shard)
    folders.assert_refused(CheckpointError, r"has none for model.layers.1.mlp.up_proj.weight: load it")


def test_weights_that_are_no_numbers_are_named(folders: Folders) -> None:
    shard = folders.shards()[0]
    save_file({key: value * float("nan") for key, value in load_file(shard).items()}, shard, {"format": "pt"})
    with pytest.raises(SpecError, match=r"embed_tokens .* holds NaN or infinity"):
        convert_folder(folders.dense, folders.out, ratio=2)
    assert not folders.out.exists()


def test_an_out_that_exists_is_refused(folders: Folders) -> None:
    folders.out.mkdir()
    with pytest.raises(ConversionError, match="out, which exists: give another"):
        convert_folder(folders.dense, folders.out, ratio=2)


def test_a_ratio_out_of_reach_says_what_is_reachable(folders: Folders) -> None:
    folders.assert_refused(ConversionError, r"can become [\d.]+ times smaller at most", ratio=1e6)


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_too_little_room_is_said_first(folders: Folders, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    if what == "disk":
        usage = type(shutil.disk_usage("/"))
        monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**6, 0, 300_000))
    else:
        monkeypatch.setattr(decompose, "free_memory", lambda device: 300_000)
    folders.assert_refused(ConversionError, rf"needs 0\.\d+ GB .*{what}.*, 0\.\d+ are free .*: make room")


def test_other_folders_are_refused(folders: Folders, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"got .*nowhere without a config.json"):
        convert_folder(tmp_path / "nowhere", folders.out, ratio=2)
    convert_folder(folders.dense, folders.out, ratio=2)
    with pytest.raises(ConversionError, match="is compressed already"):
        convert_folder(folders.out, tmp_path / "again", ratio=2)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_converts(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    (folders.dense / "tokenizer.json").write_text("{}")
    arguments = ["convert", str(folders.dense), "--ratio", "2", "--out", str(folders.out)]
    assert command_line.main(arguments) == 0
    assert "16 of 16 layers compressed" in capsys.readouterr().out
    assert (folders.out / "tokenizer.json").exists()
    assert len({file.stat().st_mode for file in folders.out.iterdir()}) == 1
    assert command_line.main(arguments) == 2
    assert "which exists: give another" in capsys.readouterr().err
