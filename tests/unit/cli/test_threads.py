"""Threads of the command line do not spin for long, unless the user says how they wait."""

import os
import subprocess
import sys

import pytest

from comera.__main__ import SPIN_COUNT

SCRIPT = """
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
    command = [sys.executable, "-c", SCRIPT]
    shown = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == expected
