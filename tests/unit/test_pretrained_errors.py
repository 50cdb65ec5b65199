"""Saved models that are damaged, foreign or of another shape, and saves that fail: one clear error, nothing changed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.convert.ngrams import ngrams_
from comera.errors import CheckpointError
from comera.pretrained import load_pretrained, read_manifest, save_pretrained, stored
from comera.pretrained.folder import file_header
from comera.pretrained.stored import checksum

from ..helpers.saved_models import SMALL, Net, assert_refused, assert_same_state, net, state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a compressed model."""
    save_pretrained(net(), tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and manifest of a saved model, and its checksums with them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["comera"])
    change(tensors, manifest)
    save_file(tensors, path, file_header({**manifest, "checksum": checksum(tensors)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t.pop("up.bias"), r"up.bias \(64,\) is in the model only"),
        (lambda t, m: t.update(extra=torch.zeros(2)), r"extra \(2,\) is in the file only"),
        (lambda t, m: t.update({"up.bias": torch.zeros(3)}), r"up.bias: expected \(64,\), got \(3,\) in the file"),
        (lambda t, m: t.pop("up.tt.cores.1"), r"up.tt.cores.1: expected \(.*\) as the manifest says, got nothing"),
        (lambda t, m: t.update({"up.tt.cores.1": torch.zeros(1)}), r"up.tt.cores.1: expected .* got \(1,\)"),
        (lambda t, m: m["trains"][1].update(names={"over.tt": "TTLinear"}), r"over \(TTLinear\) is in the file only"),
        (lambda t, m: m["trains"][1].update(names={"norm.tt": "TTLinear"}), "norm: expected a layer that holds or can"),
        (
            lambda t, m: m["trains"][0].update(names={"up.tt": "TTMEmbedding"}),
            "up: expected a tensor train for a .*Linear",
        ),
        (lambda t, m: m["trains"][0]["names"].update({"embed.tt": "TTLinear"}), "embed: expected a tensor train for a"),
        (lambda t, m: m["trains"][0]["spec"].update(row_modes=[1]), "manifest is damaged"),
        (lambda t, m: m.pop("trains"), "manifest is damaged"),
        (lambda t, m: m["trains"][0].update(names={}), "manifest is damaged"),
        (lambda t, m: m["trains"][0].update(names=[["up.tt", 3]]), "manifest is damaged"),
        (lambda t, m: m["trains"][0].update(threshold=-1.0), "manifest is damaged"),
        (lambda t, m: m["trains"][0].update(init_std=10**400), "manifest is damaged"),
        (lambda t, m: m.update(tied={"x": "y"}), "manifest is damaged"),
        (lambda t, m: m.update(transient=["x"]), "manifest is damaged"),
        (lambda t, m: m.update(format=2), r"expected manifest format 1, got 2 \(written by version .*update"),
    ],
)
@pytest.mark.parametrize("into", [None, SMALL])
def test_files_that_do_not_fit_are_refused(
    saved: Path,
    change: Callable[[dict[str, Tensor], dict[str, Any]], object],
    message: str,
    into: TensorizeConfig | None,
) -> None:
    rewrite(saved, change)
    assert_refused(net(into, seed=2), saved, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: t["up.tt.block_ranks"].add_(1), "up.tt.block_ranks"),
        (lambda t, m: t["up.tt.block_ranks"][0, :2].copy_(torch.tensor([-1, 3])), "up.tt.block_ranks"),
        (lambda t, m: t["up.tt.block_ranks"][0, :2].copy_(torch.tensor([0, 2])), "up.tt.block_ranks"),
        (lambda t, m: t.pop("up.tt.block_ranks"), r"up.tt.block_ranks: expected \(4, 8\) as the manifest says"),
        (lambda t, m: m["trains"][1]["spec"].update(block_ranks=2), "up.tt.cores.0: expected .* as the manifest says"),
        (lambda t, m: m["trains"][1]["spec"].update(block_ranks=[[1] * 8] * 3), "manifest is damaged"),
        (lambda t, m: m["trains"][1]["spec"].update(block_ranks=99), "manifest is damaged"),
        (lambda t, m: m["trains"][1].update(names={"up.tt": "TTLinear"}), "up: expected a tensor train for a .*Linear"),
    ],
)
@pytest.mark.parametrize("into", [None, TensorizeConfig(BTT(1), SMALL.embedding)])
def test_ranks_of_blocks_that_do_not_fit_are_refused(
    tmp_path: Path,
    change: Callable[[dict[str, Tensor], dict[str, Any]], object],
    message: str,
    into: TensorizeConfig | None,
) -> None:
    save_pretrained(net(TensorizeConfig(BTT(1), SMALL.embedding)), tmp_path)
    rewrite(tmp_path, change)
    assert_refused(net(into, seed=2), tmp_path, message)


def sparse() -> Net:
    model = net(None)
    model.embed.sparse = True
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2)), r"embed \(TTMEmbedding\) is in the file only"),
        (lambda: net(None, width=48), "up: expected a tensor train for a Linear 32 -> 48, got TTLinear with TT"),
        (lambda: net(SMALL, width=48), "up: expected a tensor train for a TTLinear 32 x 48, got TTLinear with TT"),
        (
            lambda: net(TensorizeConfig(BTT(1), SMALL.embedding)),
            "up: expected a tensor train for a BTTLinear 32 x 64, got TTLinear with TT",
        ),
        (sparse, "embed: expected a layer that can be converted .*sparse"),
        (
            lambda: net(TensorizeConfig(SMALL.linear, SMALL.embedding, tied="untie")),
            "head: expected a tensor train for a TTLin",
        ),
        (
            lambda: net(TensorizeConfig(SMALL.linear, SMALL.embedding, {"head": None})),
            "expected to share one tensor train",
        ),
    ],
)
def test_models_of_another_architecture_are_refused(saved: Path, model: Callable[[], nn.Module], message: str) -> None:
    assert_refused(model(), saved, message)


def test_a_dense_file_does_not_fit_a_compressed_model(tmp_path: Path) -> None:
    save_pretrained(net(None), tmp_path)
    assert_refused(
        net(seed=2), tmp_path, r"up \(TTLinear\) is compressed in the model only.*up.weight .* is in the file only"
    )


def test_weights_that_are_tied_in_the_model_only_must_be_equal(tmp_path: Path) -> None:
    save_pretrained(net(None, tied=False), tmp_path)
    assert_refused(net(None, seed=2), tmp_path, "head.weight and embed.weight are tied in the model, but differ")
    assert_same_state(load_pretrained(net(None, 2, tied=False), tmp_path), state(net(None, tied=False)))


def test_trains_that_are_tied_in_the_file_only_are_refused(tmp_path: Path) -> None:
    save_pretrained(net(), tmp_path)
    apart = TensorizeConfig(SMALL.linear, SMALL.embedding)
    model = net(None, tied=False)
    model.head = nn.Embedding(60, 32)
    tensorize_(model, apart)
    rewrite(tmp_path, lambda t, m: m["trains"][0]["names"].update({"head.tt": "TTMEmbedding"}))
    assert_refused(model, tmp_path, "embed.tt, head.tt: expected to share one tensor train in the model as in the file")


def test_a_table_of_ngrams_comes_with_a_load_that_fits_only(tmp_path: Path) -> None:
    def shared(classes: int) -> Any:
        table = nn.Embedding(50, 16)
        return nn.ModuleDict({"encoder": table, "decoder": table, "head": nn.Linear(16, classes)})

    ngrams_(model := shared(4), order=3, rank=8)
    save_pretrained(model, tmp_path)
    assert_refused(other := shared(5), tmp_path, r"head.weight: expected \(5, 16\), got \(4, 16\) in the file")
    assert type(other["encoder"]) is nn.Embedding
    assert_same_state(load_pretrained(shared(4), tmp_path), state(model))


def test_values_that_no_file_holds_are_refused(saved: Path) -> None:
    with torch.device("meta"):
        model = Net()
        model.register_buffer("positions", torch.arange(5), persistent=False)
    with pytest.raises(CheckpointError, match=r"buffer positions is on the meta device and its values are not in the"):
        load_pretrained(model, saved)
    with torch.device("meta"):
        model = Net()
        model.more = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"more.weight is on the meta device and not in the file"):
        load_pretrained(model, saved, strict=False)
    with torch.device("meta"):
        model = net()
        model.more = nn.Sequential(nn.Linear(64, 64))
    tensorize_(model, SMALL)
    with pytest.raises(CheckpointError, match=r"more.0.tt is on the meta device and not in the file"):
        load_pretrained(model, saved, strict=False)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(saved: Path, share: float) -> None:
    path = saved / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert_refused(net(seed=2), saved, "truncated or no safetensors file")
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        read_manifest(saved)


def test_foreign_and_missing_files_are_refused(tmp_path: Path) -> None:
    model = net(None)
    assert_refused(model, tmp_path, "expected a saved model in .*, but it has no model.safetensors")
    assert_refused(model, tmp_path / "nowhere", "has no model.safetensors")
    (tmp_path / "model.safetensors").write_text("not tensors")
    assert_refused(model, tmp_path, "truncated or no safetensors file")
    save_file(state(net(None, tied=False)), tmp_path / "model.safetensors")
    assert_refused(model, tmp_path, "was not written by save_pretrained .* init='decompose'")


def test_without_strict_what_fits_is_loaded_and_the_rest_named(saved: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(60, 32, padding_idx=0)
            self.up = nn.Linear(32, 64)
            self.classes = nn.Linear(64, 3)

    torch.manual_seed(3)
    model = Classifier()
    classes = model.classes.weight.clone()
    assert_refused(model, saved, "strict=False loads what fits")
    only = r"head \(TTMProjection\) is in the file only; down \(TTLinear\) .* only; classes.weight .*norm.weight"
    with pytest.warns(UserWarning, match=only):
        load_pretrained(model, saved, strict=False)
    source = net()
    assert torch.equal(model.embed.weight, source.embed.weight)
    assert torch.equal(model.up.weight, source.up.weight)
    assert torch.equal(model.up.bias, source.up.bias)
    assert torch.equal(model.classes.weight, classes)


def test_without_strict_other_shapes_and_other_models_are_still_refused(saved: Path) -> None:
    assert_refused(net(None, width=48), saved, "up: expected a tensor train", strict=False)
    assert_refused(nn.Sequential(nn.Linear(2, 2)), saved, "it has no tensor of that name", strict=False)


# -- saves that fail --


def test_a_save_that_fails_leaves_the_old_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def torn(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.write_bytes(b"torn")
        raise OSError("no space left on device")

    monkeypatch.setattr(stored, "save_file", torn)
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(net(seed=5), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_kill_between_the_two_files_leaves_a_whole_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replaced: list[Path] = []

    def once(source: Path, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", once)
    model = net(TensorizeConfig(TT(order=3, rank=3), TTM(order=3, rank=3)), seed=5)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(model, saved)
    assert sorted(path.name for path in saved.iterdir()) == ["comera.json", "model.safetensors"]
    assert_same_state(load_pretrained(net(None), saved), state(model))


class WithState(nn.Linear):
    def get_extra_state(self) -> str:
        return "text"

    def set_extra_state(self, value: str) -> None:
        pass


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with torch.device("meta"):
        meta = Net()
    for model, message in (
        (meta, "embed.weight of this Net is on the meta device"),
        (WithState(2, 2), "_extra_state of this WithState is a str, no tensor"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_pretrained(model, folder)
    for metadata in ({"a": object()}, {"a": float("nan")}):
        with pytest.raises(CheckpointError, match="must be JSON-ready"):
            save_pretrained(net(), folder, metadata=metadata)
    assert not folder.exists()
    folder.write_text("a file")
    with pytest.raises(CheckpointError, match="expected a folder to save in, found a file"):
        save_pretrained(net(), folder)
