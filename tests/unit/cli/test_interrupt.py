"""Ctrl-C while modules are imported, at the moment of any import."""

import os
import signal
import subprocess
import sys

import pytest

from comera.cli.interrupt import INTERRUPTED, MESSAGE, held_back, interruptible

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
