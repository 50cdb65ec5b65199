"""Checkpoints: everything comes back exactly, and only whole ones are seen."""

import json
import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from comera.errors import CheckpointError, ConfigError
from comera.files import write_sums
from comera.kernels.select import supports
from comera.pretrained import stored
from comera.trainer import checkpoint as runs
from comera.trainer.checkpoint import checkpoints, clean, find_checkpoint, load_checkpoint, save_checkpoint, take_over
from comera.trainer.random_state import rng_state, set_rng_state
from comera.trainer.trainer_json import Progress

from ...helpers.checkpoints import (
    IDENTITY,
    Kind,
    assert_equal,
    assert_refused,
    cut,
    edit,
    make,
    save,
    snapshot,
    train,
    truncate,
)


def momentum(groups: Any) -> torch.optim.SGD:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, momentum])
def test_training_goes_on_to_the_bit_after_a_prune(tmp_path: Path, kind: Kind) -> None:
    state = make(kind=kind)
    train(state, 3)
    cut(state)
    train(state, 2)
    folder = save(tmp_path, state, 5)
    expected, numbers = train(state, 4), snapshot(state)

    resumed = make(seed=1, kind=kind)
    progress = load_checkpoint(folder, *resumed, identity=IDENTITY)
    assert progress == Progress(step=5)
    assert str(resumed[0]) == str(state[0])  # the same ranks
    assert train(resumed, 4) == expected
    assert_equal(snapshot(resumed), numbers)


def test_parameters_stay_the_optimizers_own(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    cut(state)
    folder = save(tmp_path, state, 1)
    model, optimizer, controller = make(seed=1)
    before = list(model.parameters())
    load_checkpoint(folder, model, optimizer, controller, identity=IDENTITY)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


def test_progress_and_controller_come_back(tmp_path: Path) -> None:
    state = make()
    about: Any = {"examples": 320, "metrics": {"accuracy": 0.3}, "start_from": {"step": 4, "parameters": 99}}
    progress = Progress(10, 1234, 5.678901234567891, 0.1, 10, 0.1, 0.02, 1 << 33, "interrupted", **about)
    folder = save_checkpoint(tmp_path, *state, progress, identity=IDENTITY, rng=[rng_state()])
    resumed = make(seed=1)
    assert resumed[2].state_dict() == state[2].state_dict()  # the same ranks: tell them apart
    resumed[2].load_state_dict({**state[2].state_dict(), "surrogate_0": 1.0})
    assert load_checkpoint(folder, *resumed, identity=IDENTITY) == progress
    assert resumed[2].state_dict() == state[2].state_dict()


def test_random_states_come_back_for_each_process(tmp_path: Path) -> None:
    state = make()
    draws: list[tuple[Any, ...]] = []
    rng = []
    for process in range(2):
        random.seed(process)
        numpy.random.seed(process)
        torch.manual_seed(process)
        random.gauss(0, 1)
        rng.append(rng_state())
        draws.append((random.gauss(0, 1), numpy.random.rand(), torch.rand(3).tolist()))
    folder = save(tmp_path, state, 1, rng=rng)
    for process in (1, 0):
        load_checkpoint(folder, *make(), identity=IDENTITY, process=process)
        assert (random.gauss(0, 1), numpy.random.rand(), torch.rand(3).tolist()) == draws[process]


def numbers() -> tuple[Any, ...]:
    return random.random(), numpy.random.rand(), torch.rand(3).tolist()


def test_other_processes_go_on_with_random_numbers_of_their_own(tmp_path: Path) -> None:
    state, rng, draws = make(), [], []
    for process in range(2):
        torch.manual_seed(process)
        rng.append(rng_state())
        draws.append(numbers())
    by_two = {**IDENTITY, "processes": 2, "accumulation": 3}
    folder = save(tmp_path, state, 1, rng=rng, identity=by_two)
    by_one = {**IDENTITY, "processes": 1, "accumulation": 6}
    with pytest.warns(UserWarning, match="written with processes: 2, now there are 1.* not to the bit"):
        load_checkpoint(folder, *make(), identity=by_one, one_sequence=True)
    assert numbers() == draws[0]

    by_six = {**IDENTITY, "processes": 6, "accumulation": 1}
    drawn = []
    for process in [0, 1, 2, 3, 4, 5, 5]:
        with pytest.warns(UserWarning, match="now there are 6") if process == 0 else nullcontext():
            load_checkpoint(folder, *make(), identity=by_six, one_sequence=True, process=process)
        drawn.append(numbers())
    assert drawn[:2] == draws
    assert drawn[-1] == drawn[-2]
    assert len({str(each) for each in drawn}) == 6


@pytest.mark.parametrize(
    ("now", "one_sequence", "message"),
    [
        (
            {"processes": 1},
            True,
            r"\(processes: expected 2, got 1; .* set train.accumulation to 6, for the 6 batches of a",
        ),
        ({"processes": 4}, True, "take a number of processes that divides the 6 batches of a step"),
        ({"accumulation": 2}, True, "accumulation: expected 3, got 2.* set train.accumulation to 3, for the 6 batches"),
        ({"processes": 1, "accumulation": 6}, False, "accumulation: expected 3, got 6; processes: .* another folder$"),
        ({"processes": 1, "accumulation": 6, "lr": 1.0}, True, r"\(lr: expected 0.001, got 1.0; checkpoint .* folder$"),
    ],
)
def test_a_step_has_as_many_batches_as_before(
    tmp_path: Path, now: dict[str, Any], one_sequence: bool, message: str
) -> None:
    identity = {**IDENTITY, "processes": 2, "accumulation": 3}
    folder = save(tmp_path, make(), 1, identity=identity)
    state = make(seed=1)
    before = snapshot(state)
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(folder, *state, identity=identity | now, one_sequence=one_sequence)
    assert_equal(snapshot(state), before)


def test_rng_state_round_trips_without_a_file() -> None:
    state = rng_state()
    first = torch.rand(4)
    set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_the_folder_holds_the_files_of_the_contract(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    folder = save(tmp_path, state, 120)
    assert folder == tmp_path / "checkpoints" / "step-00000120"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["XXH128SUMS", "comera.json", "model.safetensors", "optimizer.safetensors", "trainer.json"]


def test_last_and_best_are_kept_and_found(tmp_path: Path) -> None:
    state = make()
    for step, loss in [(10, 3.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, None)]:
        save(tmp_path, state, step, loss)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000020", "step-00000050"]
    assert find_checkpoint(tmp_path).name == "step-00000050"
    assert find_checkpoint(tmp_path, "best").name == "step-00000020"


def test_finding_nothing_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected checkpoints in .*found none"):
        find_checkpoint(tmp_path)
    save(tmp_path, make(), 1)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* was evaluated.*take the last one"):
        find_checkpoint(tmp_path, "best")


def test_the_same_step_saved_again_replaces_it(tmp_path: Path) -> None:
    state = make()
    save(tmp_path, state, 5)
    train(state, 1)
    folder = save(tmp_path, state, 5)
    resumed = make(seed=1)
    load_checkpoint(folder, *resumed, identity=IDENTITY)
    assert_equal(snapshot(resumed)[:-1], snapshot(state)[:-1])


class Killed(BaseException):
    """Stands for SIGKILL: nothing in a save catches it. (tests/recipes kills for real.)"""


@pytest.mark.parametrize("moment", ["flush", "_drop", "write_tensors", "save_pretrained"])
def test_a_kill_inside_a_save_leaves_whole_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    state = make()
    save(tmp_path, state, 1)

    def die(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(runs, moment, die)
        with pytest.raises(Killed):
            save(tmp_path, state, 2)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == (["step-00000001", "step-00000002"] if moment == "_drop" else ["step-00000001"])
    for path in checkpoints(tmp_path):
        load_checkpoint(path, *make(), identity=IDENTITY)
    clean(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == names
    save(tmp_path, state, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]


def test_tuples_in_an_identity_are_their_lists(tmp_path: Path) -> None:
    folder = save(tmp_path, make(), 1)
    assert load_checkpoint(folder, *make(), identity={**IDENTITY, "betas": (0.9, 0.999)}).step == 1


def test_all_files_have_the_users_permissions(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    before = os.umask(0o022)
    try:
        folder = save(tmp_path, state, 1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_other_kernels_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = make()
    folder = save(tmp_path, state, 1)
    monkeypatch.setenv("COMERA_KERNELS", "none" if supports("merge", torch.ones(1)) else "all")
    with pytest.warns(UserWarning, match="with other kernels .* goes on, but not to the bit"):
        load_checkpoint(folder, *make(seed=1), identity=IDENTITY)
    take_over(folder, *make(seed=1))  # a new run begins: nothing to be equal to


def test_a_checkpoint_of_before_checksums_loads(tmp_path: Path) -> None:
    state = make()
    train(state, 1)
    folder = save(tmp_path, state, 1)
    (folder / "XXH128SUMS").unlink()
    with pytest.raises(CheckpointError, match="got it has no XXH128SUMS"):
        load_checkpoint(folder, *make(seed=1), identity=IDENTITY)
    trainer = json.loads((folder / "trainer.json").read_text())
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors"}
    del trainer["kernels"], trainer["other_shapes"]
    (folder / "trainer.json").write_text(json.dumps({**trainer, "version": 1, "files": sizes}))
    resumed = make(seed=1)
    load_checkpoint(folder, *resumed, identity=IDENTITY)
    assert_equal(snapshot(resumed), snapshot(state))
    truncate(folder, "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=r"expected optimizer\.safetensors of [\d,]+ bytes, got"):
        load_checkpoint(folder, *make(seed=1), identity=IDENTITY)


# --- what is damaged, or of something else, is refused and changes nothing --------------------------------------------


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


# --- checkpoints of several shards ------------------------------------------------------------------------------------


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


# --- a run that begins where another one stood ------------------------------------------------------------------------


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
