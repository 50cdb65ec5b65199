"""The C++ kernels under the address and undefined-behavior sanitizers, over odd shapes and wrong lengths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.kernels.cpp import build, compiler

ROOT = Path(__file__).parents[3]
FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUN = (
    "import runpy, sys; from pathlib import Path; from comera.kernels.cpp import library;"
    "library.on_trial = Path(sys.argv[1]); reason = library.unavailable_reason(); assert reason is None, reason;"
    "runpy.run_module('tests.helpers.odd_operands', run_name='__main__')"
)


def _runtime() -> str | None:
    """Where the compiler's address sanitizer is."""
    program = compiler.find()
    if program is None or not sys.platform.startswith("linux"):
        return None
    command = [program, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else None


@pytest.mark.skipif(_runtime() is None, reason="the compiler has no address sanitizer")
def test_no_kernel_leaves_its_operands(tmp_path, monkeypatch):
    runtime = _runtime()
    assert runtime is not None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, *FLAGS))
    program = compiler.find()
    assert program is not None
    made = build.cached(build.cache_folder(), program)  # here, where the compiler itself runs without the sanitizer
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "COMERA_KERNELS": "all"}
    environment |= {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    command = [sys.executable, "-c", RUN, str(made)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all kernels ran" in run.stdout
