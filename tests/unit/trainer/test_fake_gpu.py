"""Steps on fake tensors of a GPU, in processes of their own, which know one more device."""

from pathlib import Path

import pytest

from ...helpers.fresh_python import run_fresh

HELPERS = Path(__file__).parents[2] / "helpers"
LONG = "compiled_step or recorded_step"  # another worker of xdist can take the rest


@pytest.mark.parametrize(
    ("name", "chosen"), [("fake_gpu.py", LONG), ("fake_gpu.py", f"not ({LONG})"), ("inductor_kernels.py", "")]
)
def test_steps_without_a_gpu(name: str, chosen: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", chosen, str(HELPERS / name))
    run = run_fresh("import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))", *options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout
