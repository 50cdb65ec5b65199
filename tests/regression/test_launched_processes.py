"""Processes that a launcher starts on CPUs train as one run, or say why they do not; one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.helpers.tiny_run import TINY, words

from comera.cli.main import main

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="device auto takes this machine's accelerator")


def options(out: Path, **changes: object) -> list[str]:
    return words({"out": out, **TINY, "data.cache": out.parent / "cache", **changes})


def losses(run: Path) -> list[tuple[str, int, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["kind"], row["step"], row["loss"]) for row in rows if row["kind"] in ("train", "eval")]


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


def test_a_world_size_that_differs_from_what_is_used_is_an_error(tmp_path: Path) -> None:
    program = (
        "import os, sys; from accelerate import PartialState; PartialState(cpu=True); "
        "os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='2'); "
        "from comera.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "train", "code-lm", *options(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "got WORLD_SIZE=2, but 1 that are connected" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["compare", "estimate", "inspect", "export", "score"])
def test_commands_other_than_train_run_in_one_process(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert main([command, "code-lm"]) == 2
    assert f"expected one process for `comera {command}`, got 2" in capsys.readouterr().err
