"""Saved models of several shards: they come back, replace one another whole, and are refused when damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from comera.convert import BTT, TTM, TensorizeConfig
from comera.export.write import export_compressed
from comera.pretrained import load_pretrained, read_manifest, save_pretrained, stored, tensor_headers

from ..helpers.saved_models import SMALL, Net, assert_refused, assert_same_state, net, state

SHARD = 1500  # bytes; some tensors are larger


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SHARD", SHARD)
    monkeypatch.setattr(stored, "MAPPED", 500)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("config", [None, SMALL, TensorizeConfig(linear=BTT(1), embedding=TTM(order=2, rank=4))])
def test_a_model_comes_back_from_its_shards(tmp_path: Path, config: TensorizeConfig | None, device: str) -> None:
    model = net(config)
    save_pretrained(model, tmp_path, metadata={"step": 3})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    names = [path.name for path in shards(tmp_path)]
    assert len(names) > 2
    assert names == [f"model-{k:05}-of-{len(names):05}.safetensors" for k in range(1, len(names) + 1)]
    assert {path.name for path in tmp_path.iterdir()} == {*names, "comera.json", "model.safetensors.index.json"}
    for path in shards(tmp_path):
        held = load_file(path)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= SHARD
        assert {name for name, file in index["weight_map"].items() if file == path.name} == held.keys()
    assert index["metadata"]["total_size"] == sum(
        value.nbytes for value in {*model.state_dict(keep_vars=True).values()}
    )

    assert read_manifest(tmp_path)["metadata"] == {"step": 3}
    assert tensor_headers(tmp_path)["down.bias"] == ((32,), "F32")
    with torch.device(device):
        fresh = Net()
    assert_same_state(load_pretrained(fresh, tmp_path), state(model))
    assert fresh.head.weight is fresh.embed.weight or config is not None


def test_every_save_replaces_the_last_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [net(SMALL), net(None, 2), net(SMALL, 3), net(SMALL, 4), net(None, 5)]
    for model, size in zip(models, (SHARD, SHARD, 1 << 30, 2 * SHARD, SHARD), strict=True):
        monkeypatch.setattr(stored, "SHARD", size)
        save_pretrained(model, tmp_path)
        assert_same_state(load_pretrained(net(None, 9), tmp_path), state(model))
        one = size > 4 * SHARD
        assert (tmp_path / "model.safetensors").exists() == one
        assert (tmp_path / "model.safetensors.index.json").exists() != one
        index = {} if one else json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert {path.name for path in shards(tmp_path)} == {*index.values()}


def test_shards_of_others_are_not_deleted(tmp_path: Path) -> None:
    theirs = tmp_path / "model-00001-of-00001.safetensors"
    save_file({"x": torch.ones(3)}, theirs)
    index = {"metadata": {"total_size": 12}, "weight_map": {"x": theirs.name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_pretrained(net(SMALL), tmp_path)
    assert load_file(theirs)["x"].tolist() == [1, 1, 1]
    assert_same_state(load_pretrained(net(None, 2), tmp_path), state(net(SMALL)))


def swapped(folder: Path) -> None:
    """A shard of another model of the same shapes, under the same name."""
    shard = shards(folder)[1]
    with safe_open(shard, framework="pt") as file:
        about = file.metadata()
    save_file({name: value + 1 for name, value in load_file(shard).items()}, shard, about)


def renamed(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"up.bias"', '"over.bias"'))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: shards(f)[1].unlink(), r"the shard .*model-00002-of-\d+.safetensors is missing"),
    (lambda f: shards(f)[1].write_bytes(shards(f)[1].read_bytes()[:-7]), "model-00002.* is truncated or damaged"),
    (lambda f: shards(f)[1].write_bytes(b""), "model-00002.* is truncated or damaged"),
    (lambda f: shards(f)[0].rename(shards(f)[1]), "model-0000[12].* (lacks|is missing)"),
    (swapped, "damaged: its tensors differ from their checksum"),
    (renamed, "the shard .* lacks over.bias"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{"), "index.json is truncated or damaged"),
    (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 3}'), "index.json is truncated or"),
    (lambda f: (f / "model.safetensors.index.json").unlink(), "it has no model.safetensors"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_shards_are_refused_and_nothing_changes(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    save_pretrained(net(SMALL), tmp_path)
    damage(tmp_path)
    assert_refused(net(None, 2), tmp_path, message)


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_save_that_fails_leaves_the_old_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    save_pretrained(net(SMALL), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def full(*arguments: Any, **about: Any) -> None:
        calls.append(arguments)
        if len(calls) == failing:
            raise OSError("no space left on device")
        save_file(*arguments, **about)

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(net(SMALL, 5), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert len(calls) == failing


def test_transformers_reads_the_shards_of_a_dense_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    save_pretrained(model, tmp_path)
    assert len(shards(tmp_path)) > 2
    model.config.save_pretrained(tmp_path)
    assert_same_state(LlamaForCausalLM.from_pretrained(tmp_path), state(model))


def test_an_export_may_have_shards(tmp_path: Path) -> None:
    model = net(SMALL).eval()
    ids = torch.tensor([1, 2, 59])
    written = export_compressed(model, [ids], tmp_path / "small", lambda _: Net())
    assert len(shards(written.path)) > 2
    values = {id(t): t for t in model.state_dict(keep_vars=True).values() if t.is_floating_point()}
    assert written.parameters == sum(t.numel() for t in values.values())
    again = export_compressed(net(SMALL, 2).eval(), [ids], tmp_path / "small", lambda _: Net(), overwrite=True)
    assert again.parameters == written.parameters
