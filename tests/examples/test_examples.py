"""Every script in examples/ runs; those that train resume after a kill, with cut ranks, as if there had been none."""

import os
import re
import runpy
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ..helpers.forked import context

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINING = {  # name -> processes
    "train_accelerate": 1,
    "train_ddp": 2,
    "train_fsdp2": 2,
    "train_lightning": 1,
    "train_transformers": 1,
}
LOSS = ("step ", "{'loss'")  # how a line with the loss of a step begins
KILLED_AFTER = 46  # steps: after a cut and the checkpoint of step 40


class Watched:
    """A script's output: kept in a file, and the end of the process after so many losses."""

    def __init__(self, path: Path, kill_after: int | None) -> None:
        self.file, self.left = path.open("w"), kill_after or -1

    def write(self, text: str) -> int:
        self.file.write(text)
        self.file.flush()
        if text.startswith(LOSS):
            self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def run_script(name: str, out: Path, output: Path, kill_after: int | None, place: dict[str, str]) -> None:
    """In a process of its own: run a script as `python examples/NAME.py --out OUT` would, or torchrun."""
    os.environ |= place
    torch.set_num_threads(1)
    sys.argv = [f"{name}.py", "--out", str(out)]
    sys.stdout = sys.stderr = Watched(output, kill_after)  # type: ignore[assignment]
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run(name: str, out: Path, *, kill_after: int | None = None) -> list[str]:
    """The lines that the first process printed. A killed process takes the others with it, as under torchrun."""
    forked = context()
    world = TRAINING.get(name, 1)
    places: Sequence[dict[str, str]] = [{}]
    if world > 1:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        places = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    outputs = [out.with_name(f"{out.name}-{rank}.txt") for rank in range(world)]
    processes: list[Any] = []
    for place, output in zip(places, outputs, strict=True):
        first = not processes
        processes.append(
            forked.Process(target=run_script, args=(name, out, output, kill_after if first else None, place))
        )
        processes[-1].start()
    processes[0].join(240)
    for process in processes[1:]:
        if kill_after:
            process.kill()
        process.join(60)
    text = outputs[0].read_text()
    expected = -signal.SIGKILL if kill_after else 0
    assert processes[0].exitcode == expected, "\n".join(output.read_text()[-3000:] for output in outputs)
    return text.splitlines()


def steps(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(LOSS)]


def sizes(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.search(r"(\d+) parameters", line))]


@pytest.mark.parametrize("name", TRAINING)
def test_a_killed_run_resumes_after_a_cut_and_ends_as_the_unbroken_one(name: str, tmp_path: Path) -> None:
    unbroken = run(name, tmp_path / "unbroken")
    losses = steps(unbroken)
    assert len(losses) == 60
    killed = run(name, tmp_path / "killed", kill_after=KILLED_AFTER)
    assert steps(killed) == losses[:KILLED_AFTER]
    resumed = run(name, tmp_path / "killed")
    assert steps(resumed) == losses[40:]
    assert sizes(resumed)[-1] == sizes(unbroken)[-1]
    assert all(size < sizes(unbroken)[0] for size in sizes(resumed)[:-1])  # they were cut before the kill


def test_a_distributed_checkpoint_of_the_step_where_the_late_stage_begins_resumes(tmp_path: Path) -> None:
    losses = steps(run("train_fsdp2", tmp_path / "run"))
    for folder in (tmp_path / "run").iterdir():
        if folder.name not in ("step-000010", "step-000020", "step-000030"):
            shutil.rmtree(folder)
    (tmp_path / "run" / "step-000030" / ".metadata").unlink()  # as a kill leaves it that comes while it is written
    assert steps(run("train_fsdp2", tmp_path / "run")) == losses[20:]


def test_adapters_beside_compressed_layers(tmp_path: Path) -> None:
    lines = run("tune_lora", tmp_path / "lora")
    losses = [float(line.split()[-1]) for line in steps(lines)]
    assert losses[-1] < losses[0] - 0.3
    assert [float(line.split()[-1]) < 1e-4 for line in lines[-2:]] == [True, True]


def test_every_example_is_tested() -> None:
    elsewhere = {"adazeta", "federated", "fno"}  # tests of their own
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*TRAINING, "tune_lora"} | elsewhere
