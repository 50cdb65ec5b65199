"""A run folder has one writer at a time, and a comparison leaves no run behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from tests.helpers.tiny_run import TINY, words
from tests.unit.trainer.test_loop import CONFIG, Tiny

from comera.errors import ConfigError
from comera.recipes import base as stages
from comera.recipes.dlrm import recipe as dlrm
from comera.trainer.checkpoint import checkpoints
from comera.trainer.config import TrainConfig
from comera.trainer.lock import hold
from comera.trainer.loop import fit

HOLD = """
import sys, time
from pathlib import Path
from accelerate import Accelerator
from comera.trainer.lock import hold
with hold(Path(sys.argv[1]), Accelerator(cpu=True)):
    print("held", flush=True)
    time.sleep(600)
"""


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_run_in_a_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(Tiny(), replace(CONFIG, steps=4), run)
    (run / "summary.json").unlink()
    message = "no other run writes to, got .*run, in use by process {} on"
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        before = files(run)
        for resume in (True, False):
            with pytest.raises(ConfigError, match=message.format(other.pid)):
                fit(Tiny(), replace(CONFIG, steps=4), run, resume=resume)
        assert files(run) == before
        other.kill()  # its lock ends with it
        other.wait()
    assert fit(Tiny(), replace(CONFIG, steps=4), run, resume=True).steps == 4
    assert not (run / ".lock").exists()


def test_a_run_refuses_another_one_while_it_trains(tmp_path: Path) -> None:
    class Twice(Tiny):
        def train_batch(self, step: int, micro: int, rank: int, world: int) -> Any:
            if step == 2:
                with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
                    fit(Tiny(), CONFIG, tmp_path / "run", resume=True)
            return super().train_batch(step, micro, rank, world)

    fit(Twice(), CONFIG, tmp_path / "run")
    assert checkpoints(tmp_path / "run")


def test_stages_hold_the_folder_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = TrainConfig(epochs=1, device="cpu", progress=False)
    config = dlrm.DLRMTaskConfig(out=str(tmp_path / "all"), train=train)
    task = Tiny()
    monkeypatch.setattr(stages, "fit", lambda *_, **__: pytest.fail("a run began"))
    with hold(tmp_path / "all", Accelerator(cpu=True)), pytest.raises(ConfigError, match="in use by process"):
        stages.fit_stages(config, lambda first: task, resume=True)
    assert not (tmp_path / "all").exists()  # nothing was written, and the empty folder went with its holder


def test_a_killed_comparison_takes_its_run_down(tmp_path: Path) -> None:
    options = words({**TINY, "data.cache": tmp_path / "cache", "train.steps": 100_000, "train.device": "cpu"})
    run = tmp_path / "both" / "comera"
    command = [sys.executable, "-m", "comera", "compare", "code-lm", "--methods", "comera", "--out", str(run.parent)]
    with subprocess.Popen([*command, *options], start_new_session=True) as process:
        try:
            while process.poll() is None and not (run / "metrics.jsonl").exists():
                time.sleep(0.05)
            while process.poll() is None and '"train"' not in (run / "metrics.jsonl").read_text():
                time.sleep(0.05)
            process.kill()
            process.wait()
            deadline = time.monotonic() + 60
            while not (run / "summary.json").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert json.loads((run / "summary.json").read_text())["stopped"] == "interrupted"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whoever is left
