"""The C++ kernels under the address and undefined-behavior sanitizers, over odd shapes and wrong lengths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.kernels.cpp import build

ROOT = Path(__file__).parents[3]
FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUN = (
    f"from comera.kernels.cpp import build, library; build.FLAGS = (*build.FLAGS, *{FLAGS});"
    "import runpy; reason = library.unavailable_reason(); assert reason is None, reason;"
    "runpy.run_module('tests.helpers.odd_operands', run_name='__main__')"
)


def _runtime() -> str | None:
    """Where the compiler's address sanitizer is."""
    compiler = build._compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    command = [compiler, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else None


@pytest.mark.skipif(_runtime() is None, reason="the compiler has no address sanitizer")
def test_no_kernel_leaves_its_operands(tmp_path, monkeypatch):
    runtime = _runtime()
    assert runtime is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *FLAGS))
    compiler = build._compiler()
    assert compiler is not None
    made = build.cached(build.cache_folder(), compiler)  # here, where the compiler itself runs without the sanitizer
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "COMERA_KERNELS": "all"}
    environment |= {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all kernels ran" in run.stdout
    assert list(made.parent.glob("*.so")) == [made], "another library than the sanitized one was made"
