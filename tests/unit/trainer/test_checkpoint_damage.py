"""Checkpoints that are damaged, or of something else, are refused and change nothing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from comera.errors import CheckpointError, ConfigError
from comera.files import write_sums
from comera.trainer.checkpoint import checkpoints, find_checkpoint, load_checkpoint

from ...helpers.checkpoints import (
    IDENTITY,
    assert_equal,
    assert_refused,
    edit,
    make,
    save,
    snapshot,
    train,
    truncate,
)


def foreign(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps({"format": "something else"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: truncate(f, "model.safetensors"), "got model.safetensors differs from its checksum"),
        (lambda f: truncate(f, "optimizer.safetensors"), "got optimizer.safetensors differs from its"),
        (lambda f: truncate(f, "trainer.json"), "expected a readable trainer.json"),
        (lambda f: foreign(f, "trainer.json"), "expected trainer.json with .*comera-trainer"),
        (lambda f: (f / "trainer.json").unlink(), "expected a readable trainer.json"),
        (lambda f: (f / "comera.json").unlink(), "got it has no comera.json"),
        (lambda f: edit(f, version=99), "expected trainer.json with"),
        (lambda f: edit(f, progress={"pages": 3}), "expected the progress of a run"),
        (lambda f: edit(f, controller={}), "expected a rank controller's state"),
        (lambda f: edit(f, controller={"pages": 3}), "expected a rank controller's state, got .*pages"),
        (lambda f: edit(f, parameters=["2.weight"]), r"expected this optimizer's parameters, got others: 0\.bias"),
        (lambda f: edit(f, rng=[]), "expected the random state of process 0, got that of 0 processes"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_nothing_changes(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    assert_refused(tmp_path, damage, message)


def test_a_safetensors_file_of_the_right_size_and_wrong_content_is_refused(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    folder = save(tmp_path, state, 1)
    path = folder / "optimizer.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    write_sums(folder)
    before = snapshot(state)
    with pytest.raises(CheckpointError, match="expected whole safetensors files"):
        load_checkpoint(folder, *state, identity=IDENTITY)
    assert_equal(snapshot(state), before)


def test_a_model_of_other_shapes_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    folder = save(tmp_path, state, 1)
    other = make(hidden=16)
    before = snapshot(other)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(folder, *other, identity=IDENTITY)
    assert_equal(snapshot(other), before)


def test_another_identity_is_a_config_error_that_names_the_change(tmp_path: Path) -> None:
    folder = save(tmp_path, make(), 1)
    with pytest.raises(ConfigError, match=r"lr: expected 0\.001, got 0\.01; seed: expected None, got 3"):
        load_checkpoint(folder, *make(), identity={**IDENTITY, "lr": 1e-2, "seed": 3})


def test_an_unreadable_neighbour_is_neither_best_nor_dropped(tmp_path: Path) -> None:
    stranger = tmp_path / "checkpoints" / "step-00000001"
    stranger.mkdir(parents=True)
    save(tmp_path, make(), 2, 1.0)
    save(tmp_path, make(), 3, 2.0)
    assert find_checkpoint(tmp_path, "best").name == "step-00000002"
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000002", "step-00000003"]
