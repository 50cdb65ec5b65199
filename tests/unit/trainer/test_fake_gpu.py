"""Steps on fake tensors of a GPU, each file in a process of its own, which knows one more device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["fake_gpu.py", "inductor_kernels.py"])
def test_steps_without_a_gpu(name: str) -> None:
    tests = Path(__file__).parents[2] / "helpers" / name
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, cwd=tests.parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout
