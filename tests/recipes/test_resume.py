"""A run that is killed, at whatever moment, resumes to the bit; several processes train as one."""

import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import nn

from comera.pretrained import load_pretrained
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.checkpoint import checkpoints
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.metrics import Summary

from ..helpers.launched import launch, start
from ..helpers.recipe_runs import assert_same_end
from ..helpers.run_folders import history
from ..helpers.toy_task import BATCH, LENGTH, Scored

CONFIG = TrainConfig(
    steps=24,
    batch_size=BATCH,
    accumulation=2,
    lr=1e-2,
    rank_lr=0.04,
    schedule="constant",
    early=EarlyStage(size_weight=0.2),
    prune_every=2,
    eval_every=6,
    save_every=3,
    log_every=1,
    progress=False,
    threads=1,
)
# Through both stages, with each way to shrink: ranks fall by and by in the late one, and rounding does the rest.
_LATE = replace(CONFIG, early=EarlyStage(size_weight=0.0), rank_lr=0.03)
STAGES = {
    "surrogate": replace(_LATE, late=LateStage(target_size=0.15, start_step=6, shrink="surrogate")),
    "sensitivity": replace(_LATE, steps=54, late=LateStage(target_size=0.15, start_step=6, steps=90)),
}


class Tiny(Scored):
    """Stopped in the middle of a step, between its two micro-batches."""

    held_out = (BATCH, 1, 2)
    lowest_gate = 0.2
    stop_micro = 1

    def __init__(self, dropout: float = 0.2, stop: int | None = None) -> None:
        super().__init__(dropout=dropout, stop=stop)

    def size(self, step: int) -> tuple[int, int]:
        return 2 * BATCH, LENGTH


def steps_of(run: Path, kind: str) -> list[int]:
    return [line["step"] for line in history(run, kind)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing stopped."""
    run = tmp_path_factory.mktemp("whole")
    fit(Tiny(), CONFIG, run)
    prunes = steps_of(run, "prune")
    assert prunes[0] < 19 < 21 < prunes[-1]  # so that ranks shrink before and after a stop
    return run


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs through both stages that nothing stopped."""
    runs = {shrink: tmp_path_factory.mktemp(shrink) for shrink in STAGES}
    for shrink, run in runs.items():
        fit(Tiny(), STAGES[shrink], run)
        assert steps_of(run, "stage") == [6]
        assert 6 < steps_of(run, "prune")[0] < steps_of(run, "prune")[1]
        assert steps_of(run, "round") == [STAGES[shrink].steps]
    return runs


def assert_same(run: Path, whole: Path) -> None:
    assert history(run) == history(whole)
    assert_same_end(run, whole)


def test_a_run_stopped_again_and_again_is_the_whole_run_to_the_bit(tmp_path: Path, whole: Path) -> None:
    for step in (4, 5, 18, 20):  # twice in a row, and between prunes
        assert fit(Tiny(stop=step), CONFIG, tmp_path, resume=True).stopped == "interrupted"
        assert checkpoints(tmp_path)[-1].name == f"step-{step + 1:08d}"
    assert fit(Tiny(), CONFIG, tmp_path, resume=True).stopped == "steps"
    assert_same(tmp_path, whole)


@pytest.mark.parametrize("shrink", STAGES)
def test_a_late_run_stopped_after_two_cuts_is_the_whole_run_to_the_bit(
    tmp_path: Path, staged: dict[str, Path], shrink: str
) -> None:
    first, second = steps_of(staged[shrink], "prune")[:2]
    for step in (5, 6, first, second + 1):  # on both sides of the switch, and after each cut
        assert fit(Tiny(stop=step), STAGES[shrink], tmp_path, resume=True).stopped == "interrupted"
    assert fit(Tiny(), STAGES[shrink], tmp_path, resume=True).stopped == "steps"
    assert_same(tmp_path, staged[shrink])


@pytest.mark.parametrize("shrink", STAGES)
@pytest.mark.parametrize("part", [random.Random(k).random() for k in range(2)])
def test_a_late_run_stopped_anywhere_is_the_whole_run_to_the_bit(
    tmp_path: Path, staged: dict[str, Path], shrink: str, part: float
) -> None:
    config = STAGES[shrink]
    assert config.steps is not None
    assert fit(Tiny(stop=int(part * (config.steps - 1))), config, tmp_path).stopped == "interrupted"
    fit(Tiny(), config, tmp_path, resume=True)
    assert_same(tmp_path, staged[shrink])


def test_a_run_that_a_plateau_turned_late_resumes_to_the_bit(tmp_path: Path) -> None:
    config = replace(_LATE, late=LateStage(target_size=0.3, plateau=1), lr=0.1, eval_every=3)
    fit(Tiny(), config, tmp_path / "whole")
    (switch,) = steps_of(tmp_path / "whole", "stage")
    assert switch < 20
    for step in (switch - 2, switch - 1, switch, 21):
        assert fit(Tiny(stop=step), config, tmp_path / "run", resume=True).stopped == "interrupted"
    fit(Tiny(), config, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_began_with_another_one_resumes_to_the_bit(tmp_path: Path) -> None:
    fit(Tiny(), _LATE, tmp_path / "early")
    config = replace(_LATE, late=LateStage(target_size=0.4, shrink="surrogate"))
    fit(Tiny(), config, tmp_path / "whole", start_from=tmp_path / "early")
    assert len(steps_of(tmp_path / "whole", "prune")) >= 2
    for step in (0, 9, 17):
        stopped = fit(Tiny(stop=step), config, tmp_path / "run", resume=True, start_from=tmp_path / "early")
        assert stopped.stopped == "interrupted"
    fit(Tiny(), config, tmp_path / "run", resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")


def run_and_die(config: TrainConfig, run: str, moment: int) -> None:
    """Train in this process and kill it at its `moment`-th operation on files (open, rename, remove, ...)."""
    left = [moment]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
            left[0] -= str(run) in str(args[0])
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    fit(Tiny(), config, run, resume=True)


@pytest.mark.parametrize("shrink", [None, "surrogate"])
def test_a_run_killed_at_its_file_operations_is_the_whole_run_to_the_bit(
    tmp_path: Path, whole: Path, staged: dict[str, Path], shrink: str | None
) -> None:
    """The moments that matter most, hit exactly: each leaves checkpoints that load, once one was saved."""
    config, whole = (STAGES[shrink], staged[shrink]) if shrink else (CONFIG, whole)
    moments = random.Random(0)
    run, kills = tmp_path / "run", 0
    while kills < (5 if shrink else 10):
        process = start(run_and_die, config, str(run), moments.randrange(1, 120))
        process.join()
        if process.exitcode == 0:
            assert_same(run, whole)
            run = tmp_path / f"run-{kills}"  # it got to its end: begin another
            continue
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        for folder in checkpoints(run):
            load_pretrained(Tiny().model, folder)
            assert load_file(folder / "optimizer.safetensors")
    fit(Tiny(), config, run, resume=True)
    assert_same(run, whole)


def train_as(rank: int, world: int, config: TrainConfig, run: str, dropout: float, stop: int | None) -> None:
    task = Tiny(dropout, stop if rank == world - 1 else None)  # one process alone hears of it
    if rank:
        for parameter in task.model.parameters():  # every process must start from the first one's model
            nn.init.zeros_(parameter)
    fit(task, replace(config, device="cpu"), run, resume=True)


def by_two(run: Path, config: TrainConfig = CONFIG, dropout: float = 0.2, stop: int | None = None) -> None:
    launch(train_as, config, str(run), dropout, stop)


def numbers(value: Any) -> list[float]:
    """Every number inside a record, in order."""
    if isinstance(value, dict | list):
        return [n for item in (value.values() if isinstance(value, dict) else value) for n in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@pytest.mark.parametrize("config", [CONFIG, *STAGES.values()], ids=["early", *STAGES])
def test_two_processes_train_as_one_with_the_joint_batch_through_prunes(tmp_path: Path, config: TrainConfig) -> None:
    fit(Tiny(dropout=0.0), config, tmp_path / "one")
    by_two(tmp_path / "two", config=config, dropout=0.0)
    one, two = history(tmp_path / "one"), history(tmp_path / "two")
    assert steps_of(tmp_path / "one", "prune")
    assert [(line["kind"], line["step"]) for line in two] == [(line["kind"], line["step"]) for line in one]
    for a, b in zip(one, two, strict=True):
        assert numbers(b) == pytest.approx(numbers(a), rel=1e-5)


@pytest.mark.parametrize("batches", [0, 1])
def test_two_processes_evaluate_as_one_even_when_one_has_no_batch(tmp_path: Path, batches: int) -> None:
    config = replace(CONFIG, steps=2, eval_batches=batches)
    one = fit(Tiny(dropout=0.0), config, tmp_path / "one")
    by_two(tmp_path / "two", config=config, dropout=0.0)
    two = Summary.read(tmp_path / "two" / "summary.json")
    assert two is not None
    assert (two.held_out_loss, two.metrics) == (pytest.approx(one.held_out_loss), pytest.approx(one.metrics))
    assert two.examples == one.examples == 2 * 2 * 2 * BATCH


def test_two_processes_stop_together_and_resume_to_the_bit(tmp_path: Path) -> None:
    by_two(tmp_path / "whole")
    by_two(tmp_path / "stopped", stop=18)
    assert checkpoints(tmp_path / "stopped")[-1].name == "step-00000019"
    assert len(history(tmp_path / "stopped")) < len(history(tmp_path / "whole"))
    by_two(tmp_path / "stopped")
    assert_same(tmp_path / "stopped", tmp_path / "whole")
