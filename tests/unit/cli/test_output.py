"""Output that nobody reads to its end, or that a disk has no room for, leaves no traceback."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import comera
from comera.__main__ import SPIN_COUNT
from comera.cli.interrupt import INTERRUPTED, MESSAGE, held_back, interruptible
from comera.cli.output import UNREAD

COMMANDS = (
    "inspect saved",
    "completion bash",
    "completion zsh",
    "train pinn --print_config",
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


# --- Ctrl-C while modules are imported --------------------------------------------------------------------------------


# interrupts itself at the n-th import after the first line of the command
SCRIPT = """
import os, signal, sys

class Watch:
    left = int(sys.argv.pop(1))

    def find_spec(self, name, path=None, target=None):
        Watch.left -= 1
        if Watch.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

from comera.__main__ import run

sys.meta_path.insert(0, Watch())
sys.exit(run())
"""


# what may be imported of comera before Ctrl-C is in its hands: an interrupt in these few milliseconds shows a traceback
BEFORE = {"comera", "comera._on_import", "comera._version", "comera.__main__", "comera.cli", "comera.cli.interrupt"}


def test_little_is_imported_before_interrupts_are_in_its_hands() -> None:
    script = "import sys; import comera.__main__; print(*(name for name in sys.modules if name.startswith('comera')))"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(shown.stdout.split()) == BEFORE


@pytest.mark.parametrize("place", [1, 10, 50, 200, 500, 1000, 1800])
def test_an_import_that_is_interrupted_ends_the_command_with_one_line(place: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(place), "train", "lm", "--train.stepz", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (INTERRUPTED, "", f"{MESSAGE}\n")


def test_work_is_interrupted_by_an_exception_only_under_a_prepared_process() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible():
        assert signal.getsignal(signal.SIGINT) is before
    script = (
        "from comera.cli.interrupt import at_once, interruptible\nimport os, signal\nat_once()\n"
        "try:\n    with interruptible():\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    print('raised', flush=True)\nos.kill(os.getpid(), signal.SIGINT)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (INTERRUPTED, "raised\n", f"{MESSAGE}\n")


def test_a_process_that_ignores_interruptions_goes_on_ignoring_them() -> None:
    script = (
        "from comera.cli.interrupt import at_once\nimport os, signal\nat_once()\nos.kill(os.getpid(), signal.SIGINT)"
    )
    command = [sys.executable, "-c", script]
    ignoring = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    shown = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=ignoring)
    assert (shown.returncode, shown.stderr) == (os.EX_OK, "")


def test_an_interruption_waits_until_a_child_that_starts_is_prepared() -> None:
    script = (
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('started', flush=True)\n"
        "from comera.cli.interrupt import at_once\nat_once()\nprint('not reached')"
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with held_back():
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    shown, complaint = child.communicate()
    assert (child.returncode, shown, complaint) == (INTERRUPTED, "started\n", f"{MESSAGE}\n")


# --- threads ----------------------------------------------------------------------------------------------------------


WAITING = """
import os, sys
from comera.__main__ import run
sys.argv = ["comera", "--version"]
run()
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["nothing", "count", "policy"],
)
def test_threads_sleep_soon_unless_told_otherwise(given: dict[str, str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_WAIT"))}
    command = [sys.executable, "-c", WAITING]
    shown = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == expected
