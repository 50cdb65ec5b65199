"""The benchmark over slow links: it trains in namespaces of its own, leaves nothing behind, and says what it lacks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..helpers.scripts import load_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SPACES = Path("/run/netns")  # where `ip netns` lists them


@pytest.fixture
def allowed() -> None:
    """Skips where no namespaces can be made."""
    module = load_script(BENCHMARKS / "network.py")
    try:
        with module.Network(2, 100, 1):
            pass
        with module.Network(2):
            pass
    except module.NetworkRefusedError as error:
        pytest.skip(str(error))


def start(*options: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "links.py"), "--dry", "--processes", "2", "--steps", "2", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def left_by(process: subprocess.Popen[str]) -> list[str]:
    """Namespaces and interfaces of a process."""
    spaces = [space.name for space in SPACES.glob(f"comera-{process.pid}-*")] if SPACES.exists() else []
    return spaces + [link.name for link in Path("/sys/class/net").glob(f"cm{process.pid}n*")]


@pytest.mark.usefixtures("allowed")
def test_both_sides_train_with_and_without_a_limit() -> None:
    before = sorted((BENCHMARKS / "results").iterdir())
    process = start("--sides", "dense", "compressed", "--mbit", "20", "--delay-ms", "5")
    printed, errors = process.communicate()
    assert process.returncode == 0, printed + errors
    rows = [line.split(" | ") for line in printed.splitlines()]
    links = ("20 Mbit/s, 5 ms", "no limit")
    assert [row[:5] for row in rows] == [
        ["2", link, side, "2", "2"] for link in links for side in ("dense", "compressed")
    ]
    seconds, sent = ({(row[1], row[2]): float(row[column]) for row in rows} for column in (5, 6))
    for link in links:
        assert 0 < sent[link, "compressed"] < sent[link, "dense"]
    # a ring sends and receives a reduced half and then the mean: two delays at least, and the bytes at 20 Mbit/s
    assert seconds[links[0], "dense"] > 2 * 5e-3 + sent[links[0], "dense"] * 8 / 20 * 0.5
    assert left_by(process) == []
    assert sorted((BENCHMARKS / "results").iterdir()) == before


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing(number: signal.Signals) -> None:
    process = start()
    while not left_by(process):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert left_by(process) == []


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    process = start(PATH=str(tmp_path))
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors.splitlines()[-1] == (
        "links.py: the program ip is missing: install iproute2, and have its folder in PATH"
    )


def test_what_is_not_allowed_is_said_with_the_remedy(tmp_path: Path) -> None:
    program = tmp_path / "ip"
    program.write_text("#!/bin/sh\necho 'mount --make-shared /run/netns failed: Operation not permitted' >&2\nexit 1\n")
    program.chmod(0o755)
    process = start(PATH=f"{tmp_path}:{os.environ['PATH']}")
    _, errors = process.communicate()
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith("links.py: `ip netns add comera-")
    assert "(mount --make-shared /run/netns failed: Operation not permitted): run this as root, in" in last
