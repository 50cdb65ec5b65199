"""Checkpoints of several shards: training goes on to the bit, and damaged ones change nothing."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from comera.files import write_sums
from comera.pretrained import stored
from comera.trainer.checkpoint import checkpoints, load_checkpoint
from comera.trainer.trainer_json import Progress

from ...helpers.checkpoints import IDENTITY, assert_equal, assert_refused, cut, make, save, snapshot, train, truncate


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "SHARD", 400)
    monkeypatch.setattr(stored, "MAPPED", 100)


def shards(folder: Path, stem: str) -> list[Path]:
    return sorted(folder.glob(f"{stem}-*.safetensors"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_training_goes_on_to_the_bit_from_shards(tmp_path: Path, kind: type[torch.optim.Optimizer]) -> None:
    state = make(kind=kind)
    train(state, 3)
    cut(state)
    train(state, 2)
    folder = save(tmp_path, state, 5, held_out=1.0)
    assert len(shards(folder, "model")) > 2
    assert len(shards(folder, "optimizer")) > 2
    assert not {path.name for path in folder.iterdir()} & {"model.safetensors", "optimizer.safetensors"}
    expected, numbers = train(state, 4), snapshot(state)
    save(tmp_path, state, 9, held_out=2.0)
    assert len(checkpoints(tmp_path)) == 2  # the best one, and the last one

    resumed = make(seed=1, kind=kind)
    assert load_checkpoint(folder, *resumed, identity=IDENTITY) == Progress(5, held_out_loss=1.0, held_out_step=5)
    assert train(resumed, 4) == expected
    assert_equal(snapshot(resumed), numbers)


def test_files_of_before_are_read_in_small_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    train(state, 3)
    folder = save(tmp_path, state, 3)
    assert not shards(folder, "optimizer")
    monkeypatch.setattr(stored, "MAPPED", 100)
    resumed = make(seed=1)
    load_checkpoint(folder, *resumed, identity=IDENTITY)
    assert_equal(snapshot(resumed), snapshot(state))


DAMAGES: list[tuple[Callable[[Path], object], str, str]] = [
    # message, and that where the checksums of the folder were written anew
    (
        lambda f: shards(f, "optimizer")[1].unlink(),
        "it has no optimizer-00002-of",
        "the shard .*optimizer-00002.* missing",
    ),
    (lambda f: shards(f, "model")[1].unlink(), "it has no model-00002-of", "the shard .*model-00002.* is missing"),
    (
        lambda f: truncate(f, shards(f, "optimizer")[-1].name),
        "optimizer-.* differs from its checksum",
        "the shard .*optimizer-.* is truncated or damaged",
    ),
    (
        lambda f: shards(f, "optimizer")[0].replace(shards(f, "optimizer")[1]),
        "it has no optimizer-00001-of|differs from its",
        "the shard .*optimizer-0000[12].* (is missing|lacks)",
    ),
    (
        lambda f: (f / "optimizer.safetensors.index.json").unlink(),
        "it has no optimizer.safetensors.index.json",
        "expected whole safetensors files, got No such file",
    ),
    (
        lambda f: truncate(f, "optimizer.safetensors.index.json"),
        "index.json differs from its checksum",
        "index.json is truncated or damaged",
    ),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("damage", "message", "without"), DAMAGES)
def test_damaged_shards_change_nothing(
    tmp_path: Path, damage: Callable[[Path], object], message: str, without: str, summed: bool
) -> None:
    def damaged(folder: Path) -> None:
        damage(folder)
        if summed:
            write_sums(folder)

    assert_refused(tmp_path, damaged, without if summed else message)
