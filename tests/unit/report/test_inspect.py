"""`inspect` reads runs, checkpoints and saved models from their headers, and rejects everything else."""

import json
import struct
from pathlib import Path

import pytest
import torch
from torch import nn

from comera.convert import BTT, TT, TTM, TensorizeConfig, tensorize_
from comera.errors import CheckpointError, DataError
from comera.nn.size import model_size
from comera.nn.tensor_train import named_trains
from comera.ops.planner.plan import plan_linear
from comera.pretrained import read_manifest, save_pretrained
from comera.pretrained.folder import file_header
from comera.rank.prune import prune_
from comera.report import inspect
from comera.report.inspect import TOKENS
from comera.tt.spec import TTSpec


class Net(nn.Module):
    """A table tied to the head, two linear layers, a norm, and a buffer of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, 64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(32))
        self.register_buffer("frequencies", torch.ones(16), persistent=False)


def compressed(linear: TT | BTT = TT(order=4, rank=12)) -> Net:  # noqa: B008
    model = Net()
    tensorize_(model, TensorizeConfig(linear=linear, embedding=TTM(order=3, rank=12)))
    return model


def rows(text: str) -> dict[str, list[str]]:
    """Cells of the table's rows by layer."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in lines if cells}


def test_saved_model(tmp_path: Path) -> None:
    model = compressed()
    save_pretrained(model, tmp_path)
    text, size = inspect(tmp_path), model_size(model)
    up = dict(named_trains(model))["up.tt"].spec
    assert isinstance(up, TTSpec)
    table = rows(text)
    assert table["up"][:2] == ["TT 8·8 / 16·16", "8-12-12"]
    assert table["up"][2] == f"{up.numel + up.rank_numel:,}"
    assert table["up"][4:] == [f"{plan_linear(up, TOKENS).flops / TOKENS / 1e3:.1f}", f"{6 * 64 * 256 / 1e3:.1f}"]
    assert table["embed + head"][0].startswith("TTM ")
    assert table["4 vectors (biases, norms)"] == ["dense", "448"]
    assert table["all layers"][:2] == [f"{size.total:,}", f"{size.ratio:.2f}×"]
    assert f"model       {size.total:,} parameters" in text
    assert f"tensorized  {size.tensorized:,} parameters" in text
    assert f"{size.ratio:.2f}× smaller than dense" in text


def test_pruned_away_layer(tmp_path: Path) -> None:
    model = compressed()
    train = dict(named_trains(model))["up.tt"]
    none = train.spec.with_ranks(0)
    train.set_(none, [torch.empty(shape) for shape in none.core_shapes])
    save_pretrained(model, tmp_path)
    assert rows(inspect(tmp_path))["up"][1:4] == ["0-0-0", "0", "∞×"]


def test_dense_model_in_half_precision(tmp_path: Path) -> None:
    model = Net().bfloat16()
    save_pretrained(model, tmp_path)
    text, size = inspect(tmp_path), model_size(model)
    assert rows(text)["embed.weight"] == ["dense 500×64", "32,000"]
    assert text.endswith(f"model       {size.total:,} parameters, {size.bytes / 2**20:.3f} MB, no layer compressed")


def test_run_folder_shows_its_progress_and_last_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: code-lm\nmethod: comera\n")
    at = {"step": 120, "time": 30.0, "tokens": 48_000}
    records = [{"kind": "train", **at, "loss": 5.0, "step_time": 0.2}, {"kind": "eval", **at, "loss": 5.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (60, 120):
        save_pretrained(compressed(), tmp_path / "checkpoints" / f"step-{step:08d}")
    text = inspect(tmp_path)
    assert text.startswith(
        "code-lm, comera: 120 steps in 30.0 s, 48.0 k tokens, held-out loss 5.250\ncheckpoint step-00000120\n\nlayer "
    )
    assert text.endswith(inspect(tmp_path / "checkpoints" / "step-00000120"))


def test_only_the_header_is_read(tmp_path: Path) -> None:
    save_pretrained(nn.Linear(2, 2), tmp_path)
    weight = {"dtype": "F32", "shape": [2**14, 2**15], "data_offsets": [0, 2**31]}
    header = json.dumps({"__metadata__": file_header(read_manifest(tmp_path)), "weight": weight}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 2**31)  # 2 GB of holes
    assert "536,870,912 parameters, 2,048 MB" in inspect(tmp_path)


def test_refuses_what_is_neither(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="found a folder without either"):
        inspect(tmp_path)
    with pytest.raises(CheckpointError, match="found a file"):
        inspect(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match="found nothing"):
        inspect(tmp_path / "nowhere")


def test_refuses_truncated_and_foreign_files(tmp_path: Path) -> None:
    save_pretrained(compressed(), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspect(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspect(tmp_path)


def test_refuses_a_run_without_checkpoints_or_with_broken_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: code-lm\n")
    with pytest.raises(CheckpointError, match="found none"):
        inspect(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("?\n")
    with pytest.raises(DataError, match="line 1 is not JSON"):
        inspect(tmp_path)


def test_a_folder_of_several_runs_names_them(tmp_path: Path) -> None:
    for name in ("late-0.2", "early"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match=r"with several \(early, late-0.2\): give one, such as .*late-0.2"):
        inspect(tmp_path)


def test_blocks(tmp_path: Path) -> None:
    model = compressed(BTT(rank=2))
    up, down = (dict(named_trains(model))[name] for name in ("up.tt", "down.tt"))
    with torch.no_grad():
        up.rank_params[0][:9] = 0
    prune_(model)
    save_pretrained(model, tmp_path)
    table = rows(inspect(tmp_path))
    assert table["up"][:2] == ["BTT 8·8 / 16·16", f"{up.spec.ranks[1] / 128:.3g}"]
    assert table["up"][2] == f"{up.spec.numel + up.spec.rank_numel:,}"
    assert table["down"][4:] == [f"{6 * down.spec.numel / 1e3:.1f}", f"{6 * 64 * 256 / 1e3:.1f}"]
