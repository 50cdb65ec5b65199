"""Processes that a launcher starts on CPUs train as one run, or say why they do not; one of them writes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file
from tests.helpers.forked import context
from tests.helpers.launched import start
from tests.helpers.run_folders import records
from tests.helpers.tiny_run import TINY, words
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from comera.cli.main import main
from comera.recipes.lm.recipe import LMTask
from comera.trainer.checkpoint import find_checkpoint

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="device auto takes this machine's accelerator")


def options(out: Path, **changes: object) -> list[str]:
    return words({"out": out, **TINY, "data.cache": out.parent / "cache", **changes})


def losses(run: Path) -> list[tuple[str, int, float]]:
    return [(row["kind"], row["step"], row["loss"]) for row in records(run, "train", "eval")]


@cpu_only
def test_torchrun_on_a_cpu_trains_one_run_in_several_processes(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "0"]
    command = [*launch, "--standalone", "-m", "comera", "train", "code-lm", *options(tmp_path / "two")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("report: ") == 1

    one_by_one = {"train.accumulation": 2}  # the batches of both processes
    assert main(["train", "code-lm", *options(tmp_path / "one", **one_by_one)]) == 0
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [row[:2] for row in two] == [row[:2] for row in one]
    assert [row[2] for row in two] == pytest.approx([row[2] for row in one], rel=1e-5)
    trainer = json.loads((tmp_path / "two" / "checkpoints" / "step-00000003" / "trainer.json").read_text())
    assert (trainer["identity"]["processes"], len(trainer["rng"])) == (2, 2)
    assert {p.name for p in (tmp_path / "two").iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}


def killed_at(last: int, argv: list[str]) -> None:
    """In a process of torchrun."""
    whole = LMTask.train_batch

    def killed(task: LMTask, step: int, *place: int) -> object:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(task, step, *place)

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    LMTask.train_batch = killed  # type: ignore[method-assign, assignment]
    sys.exit(main(argv))


LM = {
    **TINY,
    "data.vocab_size": 300,
    "model.hidden": 64,
    "model.heads": 4,
    "compress.format": "tt",
    "compress.order": 4,
    "compress.rank": 6,
    "train.optimizer": "adamw",
    "train.steps": 16,
    "train.save_every": 4,
    "train.eval_every": 8,
    "train.late.target_size": 0.5,
    "train.late.start_step": 2,
    "train.late.steps": 12,
    "train.prune_every": 2,
    "train.threads": 1,
}


def course(run: Path) -> list[tuple[int, int, float]]:
    """Step, size and loss of every step of training; the last of those that were trained twice."""
    return [(row["step"], row["size"], row["loss"]) for row in records(run, "train")]


@cpu_only
def test_a_run_that_was_killed_under_torchrun_resumes_on_one_process_and_on_two_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = words({"out": run, **LM, "data.cache": tmp_path / "cache"})

    def torchrun(last: int, *more: str) -> str:
        """What torchrun does, but with processes that are forked; returns what these printed."""
        context()
        logs = tmp_path / f"logs-{last}"
        logs.mkdir()
        options: dict[str, Any] = {"logs_specs": DefaultLogsSpecs(str(logs), Std.ALL), "run_id": str(last)}
        options |= {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        options |= {"start_method": "forkserver", "max_restarts": 0}
        options |= {"signals_to_handle": "SIGUSR1"}  # which nobody sends
        elastic_launch(LaunchConfig(1, 1, 2, **options), killed_at)(last, ["train", "lm", *settings, *more])
        return "".join(file.read_text() for file in logs.rglob("stderr.log"))

    def saved() -> tuple[str, int, int, int]:
        """The last checkpoint, and how many processes, micro-batches and random states it was written with."""
        last = find_checkpoint(run)
        trainer = json.loads((last / "trainer.json").read_text())
        return last.name, trainer["identity"]["processes"], trainer["identity"]["accumulation"], len(trainer["rng"])

    with pytest.raises(ChildFailedError, match=r"Signal 9 \(SIGKILL\)"):
        torchrun(6)
    assert saved() == ("step-00000004", 2, 1, 2)

    capsys.readouterr()
    assert main(["train", "lm", *settings, "--resume"]) == 2
    assert "set train.accumulation to 2, for the 2 batches of a step" in capsys.readouterr().err
    whole = LMTask.train_batch

    def interrupted(task: LMTask, step: int, micro: int, *place: int) -> object:
        if (step, micro) == (9, 0):
            signal.raise_signal(signal.SIGINT)
        return whole(task, step, micro, *place)

    with monkeypatch.context() as patch:
        patch.setattr(LMTask, "train_batch", interrupted)
        with pytest.warns(
            UserWarning, match="written with processes: 2, now there are 1. The run goes on with the same"
        ):
            main(["train", "lm", *settings, "--resume", "--train.accumulation", "2"])
    assert saved() == ("step-00000010", 1, 2, 1)

    ended = torchrun(99, "--resume", "--train.accumulation", "1")
    assert ended.count("written with processes: 1, now there are 2.") == 1
    assert saved() == ("step-00000016", 2, 1, 2)

    assert main(["train", "lm", *settings, "--out", str(tmp_path / "one"), "--train.accumulation", "2"]) == 0
    expected, came = course(tmp_path / "one"), course(run)
    assert [row[:2] for row in came] == [row[:2] for row in expected]
    assert [row[2] for row in came] == pytest.approx([row[2] for row in expected], rel=1e-4)
    sizes = [size for _, size, _ in came]
    assert sizes[3] > sizes[5] > sizes[9] > sizes[-1]  # ranks fell on two processes and on one
    weights, others = (load_file(find_checkpoint(each) / "model.safetensors") for each in (run, tmp_path / "one"))
    assert {name: value.shape for name, value in weights.items()} == {name: v.shape for name, v in others.items()}


@pytest.mark.parametrize(
    ("environment", "came"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without a RANK"),
        (
            {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "one process, all that `accelerate launch --cpu` starts",
        ),
    ],
)
def test_a_process_that_would_train_alone_says_so(
    environment: dict[str, str],
    came: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert main(["train", "code-lm", *options(tmp_path / "run")]) == 2
    shown = capsys.readouterr().err
    assert f"expected all processes that were started to train together, got {came}" in shown
    assert "torchrun --nproc_per_node" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "run").exists()
    assert time.monotonic() - began < 60  # it waits for nobody


def connected_alone(errors: Path, argv: list[str]) -> None:
    PartialState(cpu=True)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
    with errors.open("w") as file, redirect_stderr(file):
        sys.exit(main(argv))


def test_a_world_size_that_differs_from_what_is_used_is_an_error(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    process = start(connected_alone, errors, ["train", "code-lm", *options(tmp_path / "run")])
    process.join(120)
    assert process.exitcode == 2
    assert "got WORLD_SIZE=2, but 1 that are connected" in errors.read_text()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["compare", "estimate", "inspect", "export", "score"])
def test_commands_other_than_train_run_in_one_process(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([command, "code-lm"]) == 2
    assert f"expected one process for `comera {command}`, got 2" in capsys.readouterr().err
