"""Adapters in a folder: what is written, onto what it loads, and what does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.small_net import IDS, SMALL, Net
from torch import nn

from comera.adapters import TTAdapter, adapt_, load_adapters_, remove_adapters_, save_adapters
from comera.convert import TT, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, ConversionError
from comera.nn.adapted import Adapted
from comera.pretrained import save_pretrained
from comera.rank import round_


def net(*, compressed: bool = False) -> Net:
    torch.manual_seed(0)
    model = Net()
    if compressed:
        tensorize_(model, SMALL)
    return model.eval()


def trained(*, compressed: bool = False, rank: int = 3) -> Net:
    model = net(compressed=compressed)
    adapt_(model, TTAdapter(order=4, rank=rank, scale=0.5), targets=["up", "blocks.*"], also_train=["head", "norm"])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_folder_gives_the_adapters_back(compressed: bool, rank: int, tmp_path: Path) -> None:
    model = trained(compressed=compressed, rank=rank)
    save_adapters(model, tmp_path)
    fresh = net(compressed=compressed)
    before = {name: p.clone() for name, p in fresh.named_parameters()}
    report = load_adapters_(fresh, tmp_path)
    assert [row.name for row in report.rows] == ["up", "blocks.0", "blocks.1"]
    assert torch.equal(fresh(IDS), model(IDS))
    assert [(name, p.requires_grad) for name, p in fresh.named_parameters()] == [
        (name, p.requires_grad) for name, p in model.named_parameters()
    ]
    remove_adapters_(fresh)
    assert all(torch.equal(p, before[name]) for name, p in fresh.named_parameters())


def test_what_is_written(tmp_path: Path) -> None:
    model = trained()
    save_adapters(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    keys = {f"base_model.model.{name.replace('.adapter.', '.')}": p for name, p in wanted.items()}
    assert set(stored) == set(keys)
    assert all(torch.equal(stored[key], p) for key, p in keys.items())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["up", "blocks.0", "blocks.1"]
    assert config["modules_to_save"] == ["norm", "head"]
    assert config["adapter"] == {"order": 4, "rank": 3, "scale": 0.5}


def test_ranks_that_have_fallen_are_those_that_load(tmp_path: Path) -> None:
    model = trained()
    round_(model, 0.6)
    save_adapters(model, tmp_path)
    fresh = net()
    load_adapters_(fresh, tmp_path)
    assert [m.adapter.tt.spec for m in fresh.modules() if isinstance(m, Adapted)] == [
        m.adapter.tt.spec for m in model.modules() if isinstance(m, Adapted)
    ]
    assert torch.equal(fresh(IDS), model(IDS))


def test_a_compressed_head_loads_with_its_ranks(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        tensorize_(model, TensorizeConfig(TT(order=4, rank=4)))
        return model

    model, x = build(), torch.randn(3, 64)
    adapt_(model, TTAdapter(), targets="0", also_train="2")
    round_(model, 0.5)
    save_adapters(model, tmp_path)
    fresh = build()
    load_adapters_(fresh, tmp_path)
    assert torch.equal(fresh(x), model(x))


def test_adapters_trained_beside_compressed_layers_fit_dense_ones_of_their_size(tmp_path: Path) -> None:
    model = net(compressed=True)
    adapt_(model, TTAdapter(), targets="up")
    save_adapters(model, tmp_path)
    fresh = net()
    load_adapters_(fresh, tmp_path)
    assert isinstance(fresh.up, Adapted)


def net_with(path: str, module: nn.Module | None) -> nn.Module:
    """A net with another module there, or without any."""
    model = net()
    if module is not None:
        model.set_submodule(path, module)
    else:
        parent, _, leaf = path.rpartition(".")
        delattr(model.get_submodule(parent), leaf)
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: net_with("up", nn.Linear(32, 60)), "up: expected a linear layer 32 -> 64, got 32 -> 60"),
        (lambda: net_with("blocks.1", None), r"blocks\.1: expected a linear layer 64 -> 48, got a model without it"),
        (lambda: net_with("up", nn.Identity()), "up: expected a linear layer 32 -> 64, got a Identity"),
        (lambda: net_with("head", nn.Linear(48, 5)), r"head\.bias: expected \(5,\), got \(2,\) in the file"),
        (lambda: net_with("head", None), "head: expected a module to be trained besides, got a model without it"),
        (lambda: net().to("meta"), "got one on the meta device"),
        (trained, "load_adapters_: expected a model without adapters"),
    ],
)
def test_adapters_of_another_model_change_nothing(build: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    save_adapters(trained(), tmp_path)
    model = build()

    def parts() -> Any:
        return [(n, type(m)) for n, m in model.named_modules()], [p.requires_grad for p in model.parameters()]

    before = parts()
    with pytest.raises(CheckpointError, match=message):
        load_adapters_(model, tmp_path)
    assert parts() == before


def test_files_that_are_not_adapters(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected saved adapters in .*no adapter_model\.safetensors"):
        load_adapters_(net(), tmp_path)
    save_pretrained(net(), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="its manifest is damaged"):
        load_adapters_(net(), tmp_path)
    save_file({"lora_A.weight": torch.ones(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"not written by save_adapters .*loaded by PEFT"):
        load_adapters_(net(), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="truncated"):
        load_adapters_(net(), tmp_path)


def test_damaged_tensors_are_noticed(tmp_path: Path) -> None:
    save_adapters(trained(), tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x55
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match="damaged"):
        load_adapters_(net(), tmp_path)


def test_only_models_with_adapters_and_data_are_saved(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="save_adapters: expected a model with adapters"):
        save_adapters(net(), tmp_path / "out")
    with pytest.raises(CheckpointError, match="on the meta device"):
        save_adapters(trained().to("meta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="found a file at"):
        save_adapters(trained(), tmp_path / "file")


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize("also_train", ["3", ["3", "4"]])
def test_running_statistics_that_training_moves_are_saved_and_given_back(
    also_train: str | list[str], tmp_path: Path
) -> None:
    model, x = normed(), torch.randn(32, 8)
    adapt_(model, TTAdapter(order=2, rank=2), targets="0", also_train=also_train)
    for _ in range(3):
        model(3 * x + 2)
    save_adapters(model, tmp_path)
    fresh = normed()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    load_adapters_(fresh, tmp_path)
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    for each in (model, fresh):
        remove_adapters_(each)
        assert all(torch.equal(value, before[name]) for name, value in each.state_dict().items())
    other = normed()
    other[1] = nn.BatchNorm1d(16, track_running_stats=False)
    with pytest.raises(CheckpointError, match=r"1.running_mean: expected no buffer, got \(16,\) in the file"):
        load_adapters_(other, tmp_path)
