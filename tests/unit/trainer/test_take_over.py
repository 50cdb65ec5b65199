"""A run that begins where another one stood."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from comera.errors import CheckpointError
from comera.trainer.checkpoint import take_over

from ...helpers.checkpoints import assert_equal, cut, edit, make, save, snapshot, train, truncate


@pytest.mark.parametrize("at", ["run", "checkpoint"])
def test_another_run_begins_where_one_stood(tmp_path: Path, at: str) -> None:
    state = make()
    train(state, 3)
    cut(state)
    train(state, 1)
    folder = save(tmp_path, state, 4, rng=[])
    other = make(seed=1)
    drawn = torch.get_rng_state()
    progress = take_over(tmp_path if at == "run" else folder, *other)
    assert progress.step == 4
    assert torch.equal(torch.get_rng_state(), drawn)  # it draws on as it would have
    assert other[2].state_dict() == state[2].state_dict()
    assert_equal(snapshot(other)[:-1], snapshot(state)[:-1])
    assert train(other, 3) == train(state, 3)


def test_a_run_keeps_its_own_learning_rates_when_it_takes_another_over(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    save(tmp_path, state, 1)
    other = make(seed=1)
    for group in other[1].param_groups:
        group["lr"] = 0.5
    take_over(tmp_path, *other)
    assert {group["lr"] for group in other[1].param_groups} == {0.5}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: truncate(f, "model.safetensors"), "got model.safetensors differs from its checksum"),
        (lambda f: edit(f, parameters=["2.weight"]), r"expected this optimizer's parameters, got others: 0\.bias"),
        (lambda f: edit(f, controller={"pages": 3}), "expected a rank controller's state, got .*pages"),
    ],
)
def test_what_cannot_be_taken_over_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    state = make()
    train(state, 1)
    folder = save(tmp_path, state, 1)
    damage(folder)
    other = make(seed=1)
    train(other, 1)
    before, adaptation = snapshot(other), other[2].state_dict()
    with pytest.raises(CheckpointError, match=message):
        take_over(tmp_path, *other)
    assert_equal(snapshot(other), before)
    assert other[2].state_dict() == adaptation


def test_a_model_of_other_shapes_is_not_taken_over(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    save(tmp_path, state, 1)
    other = make(hidden=16)
    before, adaptation = snapshot(other), other[2].state_dict()
    with pytest.raises(CheckpointError, match="does not fit"):
        take_over(tmp_path, *other)
    assert_equal(snapshot(other), before)
    assert other[2].state_dict() == adaptation != state[2].state_dict()


def test_a_folder_without_a_run_cannot_be_taken_over(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected checkpoints in"):
        take_over(tmp_path / "nowhere", *make())
