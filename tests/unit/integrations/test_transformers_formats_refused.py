"""Folders of compressed models that `from_pretrained` and `load_pretrained` refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForMaskedLM, BertForMaskedLM

import comera
from comera.errors import CheckpointError

from ...helpers.compressed_bert import BLOCKS, bert, compressed_bert


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
