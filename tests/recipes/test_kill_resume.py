"""`comera train` killed at any moment: what is left loads, and the resumed run goes on as if nothing had happened.

Starting Python with its libraries takes seconds, so one server process imports them once and forks the runs.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from comera.cli.main import main
from comera.files import SUMS, damage
from comera.trainer.checkpoint import checkpoints

from ..helpers.forked import context
from ..helpers.run_folders import history
from ..helpers.tiny_run import TINY

KILLS = 20
STEPS = 60
OPTIONS = {
    **TINY,
    "data.vocab_size": 300,
    "data.block_size": 16,
    "model.dropout": 0.1,  # draws from the random state that a checkpoint has to bring back
    "compress.order": 2,
    "compress.rank": 6,
    "train.steps": STEPS,
    "train.batch_size": 2,
    "train.rank_lr": 0.05,
    "train.early.size_weight": 0.3,  # with the line above so strong that ranks are cut on the way
    "train.prune_every": 20,
    "train.eval_every": 10,
    "train.save_every": 1,
    "train.device": "cpu",
    "train.threads": 1,
}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Starts, or resumes, the run in a folder; returns its process."""
    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options.append(f"--data.cache={tmp_path_factory.mktemp('cache')}")
    forked = context()
    process = forked.Process(target=int)  # waits until the server has its imports
    process.start()
    process.join()

    def start(run: Path) -> Any:
        argv = ["train", "code-lm", *options, "--out", str(run), "--resume"]
        process = forked.Process(target=_exit_with, args=(argv,))
        process.start()
        return process

    return start


def _exit_with(argv: list[str]) -> None:
    sys.exit(main(argv))


@pytest.fixture(scope="module")
def straight(start: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """A run that is never stopped: its folder, its seconds until training begins, and its seconds a step."""
    run = tmp_path_factory.mktemp("straight") / "run"
    began = time.time()
    process = start(run)
    process.join()
    assert process.exitcode == 0
    training = (run / "config.yaml").stat().st_mtime
    return run, training - began, ((run / "summary.json").stat().st_mtime - training) / STEPS


def last_step(run: Path) -> int:
    """Step of the last checkpoint, 0 if there is none; every one that can be seen must be whole."""
    found = checkpoints(run)
    for folder in found:
        trainer = json.loads((folder / "trainer.json").read_text())
        assert f"step-{trainer['progress']['step']:08d}" == folder.name
        assert damage(folder, {path.name for path in folder.iterdir()} - {SUMS}) is None
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118
    return int(found[-1].name.removeprefix("step-")) if found else 0


def test_twenty_kills_leave_no_trace(
    start: Callable[[Path], Any], straight: tuple[Path, float, float], tmp_path: Path
) -> None:
    reference, begin, step_time = straight
    expected = history(reference)
    assert any(row["kind"] == "prune" for row in expected)
    weights = load_file(checkpoints(reference)[-1] / "model.safetensors")
    rng = random.Random(0)
    reach = begin + STEPS / 4 * step_time  # latest moment of a kill, in seconds after the start
    kills = inside = 0  # inside: those that hit a run after its first new checkpoint
    runs = [tmp_path / "run-0"]
    while True:
        killing = kills < KILLS or inside < 3
        before = last_step(runs[-1])
        process = start(runs[-1])
        process.join(rng.uniform(0, reach) if killing else None)
        if process.exitcode is None:
            process.kill()
            process.join()
            kills += 1
            after = last_step(runs[-1])
            assert after >= before
            inside += after > before
            reach *= 1 if after > before else 1.03  # the machine may have become slower
            continue
        assert process.exitcode == 0
        assert history(runs[-1]) == expected
        came = load_file(checkpoints(runs[-1])[-1] / "model.safetensors")
        assert came.keys() == weights.keys()
        assert all(torch.equal(came[name], weights[name]) for name in weights)
        if not killing:
            return
        runs.append(tmp_path / f"run-{len(runs)}")  # it ended before all kills were done: once more from the start
