"""The benchmarks for a GPU run through on a CPU, in small, so that a first run on a GPU is spent on measuring."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.kernels import select

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> str:
    """What a script prints; it must end well."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_side_of_the_step_runs_and_says_in_which_mode() -> None:
    before = sorted((BENCHMARKS / "results").iterdir())
    lines = run("gpu_step", "--dry", "--precision", "tf32", "--batch", "128").splitlines()
    assert len(lines) == 6
    assert sum("eager (graphs need CUDA" in line for line in lines) == 4
    assert sorted((BENCHMARKS / "results").iterdir()) == before


@pytest.mark.skipif(not select.triton_available(), reason="triton is not installed")
def test_every_kernel_runs_beside_what_it_replaces() -> None:
    names = {line.split()[0] for line in run("gpu_kernels", "--dry").splitlines()}
    assert names == set(select.TRITON)


def test_without_a_gpu_or_data_they_say_what_they_want() -> None:
    script = [sys.executable, str(BENCHMARKS / "gpu_mnli.py")]
    environment = {name: value for name, value in os.environ.items() if name != "COMERA_MNLI"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "give --data, or set COMERA_MNLI" in done.stderr
