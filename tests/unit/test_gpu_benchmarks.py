"""The GPU benchmarks run on a CPU with tiny cases, so that time on a GPU is spent measuring, not debugging."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.kernels import select

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *options: str) -> str:
    """What a script prints; it must succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_side_of_the_step_runs_and_reports_its_mode() -> None:
    before = sorted((BENCHMARKS / "results").iterdir())
    lines = run("gpu_step", "--dry", "--precision", "tf32", "--batch", "128").splitlines()
    assert len(lines) == 6
    assert sum("graph" in line for line in lines) == 4
    assert sorted((BENCHMARKS / "results").iterdir()) == before


@pytest.mark.skipif(not select.triton_available(), reason="triton is not installed")
def test_every_kernel_runs_against_what_it_replaces() -> None:
    names = {line.split()[0] for line in run("gpu_kernels", "--dry").splitlines()}
    assert names == set(select.TRITON)


@pytest.mark.skipif(not select.triton_available(), reason="triton is not installed")
@pytest.mark.parametrize("gpu", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", ["low_rank", "block product, L"])
def test_kernels_compile_for_a_gpu_that_is_not_here_without_spills_and_for_its_matrix_units(
    kernel: str, gpu: str
) -> None:
    *rows, last = run("gpu_dry", "--dry", "--gpus", gpu, "--kernels", kernel, "--dtypes", "bfloat16").splitlines()
    assert last == "0 kernels spill or lack matrix instructions"
    assert rows
    assert all(row.startswith(gpu) and int(row.split()[-1]) > 0 for row in rows)


def test_the_roofline_counts_a_block_by_a_gpu_s_kernels_and_in_bfloat16() -> None:
    dense, compressed = (
        line.split()[-10:] for line in run("gpu_roofline", "--dry", "--cases", "BERT-base").splitlines()
    )
    block, rest = 4096 * 768**2 * (4 + 2 * 4) + 2 * 32 * 128**2 * 768, 32 * 768 * (768 + 2)
    flops = 6 * (block + rest) + 2 * 32 * 128**2 * 768  # the backward makes the scores again
    assert dense[5] == f"{flops / 1e12:.3f}"
    assert float(dense[6]) == pytest.approx(flops / 989e9, abs=0.01)
    assert float(compressed[5]) < float(dense[5]) / 4
    assert 100 < int(dense[0]) < 200  # and not each attribute of a fake tensor


def test_missing_data_is_named() -> None:
    script = [sys.executable, str(BENCHMARKS / "gpu_mnli.py")]
    environment = {name: value for name, value in os.environ.items() if name != "COMERA_MNLI"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "give --data, or set COMERA_MNLI" in done.stderr
