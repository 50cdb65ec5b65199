"""Output that nobody reads to its end, or that a disk has no room for, leaves no traceback."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import comera
from comera.cli.output import UNREAD

COMMANDS = (
    "inspect saved",
    "completion bash",
    "completion zsh",
    "train lm --print_config",
    "--help",
    "--version",
    "train lm --help",
    "export --help",
    "compare lm --help",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("working")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
    comera.tensorize_(model, ratio=3)
    comera.save_pretrained(model, folder / "saved")
    return folder


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads any more: the most impatient `head`."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def run(command: str, folder: Path, output: Any, *, buffered: bool = True) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "comera", *command.split()]
    env = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    return subprocess.run(argv, stdout=output, stderr=subprocess.PIPE, text=True, check=False, cwd=folder, env=env)


@pytest.mark.parametrize("command", COMMANDS)
def test_output_that_nobody_reads_ends_a_command_without_a_word(command: str, unread: int, folder: Path) -> None:
    shown = run(command, folder, unread)
    assert (shown.returncode, shown.stderr) == (UNREAD, "")


def test_so_do_a_long_help_that_argparse_cannot_write_and_a_table_after_other_words(unread: int, folder: Path) -> None:
    shown = run("train lm --help-all", folder, unread)
    assert (shown.returncode, shown.stderr) == (0, "")
    sizes = "--data.synthetic_rows 64 --data.cache cache --train.batch_size 4 --compress.min_rows 10"
    shown = run(f"estimate dlrm {sizes}", folder, unread)
    assert shown.returncode == UNREAD
    # so small a log leaves no room for the smallest tables of some methods
    assert all(line.startswith(("clicks: ", "dlrm: no estimate of ")) for line in shown.stderr.splitlines())


def test_so_does_output_that_is_not_buffered(unread: int, folder: Path) -> None:
    shown = run("inspect saved", folder, unread, buffered=False)
    assert (shown.returncode, shown.stderr) == (UNREAD, "")


def test_a_mistake_is_told_even_if_nobody_reads_the_output(unread: int, folder: Path) -> None:
    shown = run("inspect nowhere", folder, unread)
    assert shown.returncode == 2
    assert shown.stderr.startswith("comera: expected a run folder or a saved model at nowhere")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("command", ["inspect saved", "completion bash"])
def test_output_without_room_is_one_line(command: str, folder: Path) -> None:
    with open("/dev/full", "w") as full:
        shown = run(command, folder, full)
    assert shown.returncode == 2
    assert shown.stderr.splitlines()[-1].endswith("No space left on device")
    assert shown.stderr.count("\n") == 1


def test_a_reader_that_is_gone_is_not_confused_with_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    from comera.cli import main

    def lose(argv: list[str]) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setitem(main._COMMANDS, "inspect", lose)
    assert main.main(["inspect", "saved"]) == 2
