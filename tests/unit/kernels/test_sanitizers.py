"""The C++ kernels under the address and undefined-behavior sanitizers, over odd shapes and wrong lengths."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from comera.kernels.cpp import compiler

ROOT = Path(__file__).parents[3]
FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def _runtime() -> str | None:
    """Where the compiler's address sanitizer is."""
    program = compiler.find()
    if program is None or not sys.platform.startswith("linux"):
        return None
    command = [program, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found if Path(found).is_absolute() and Path(found).exists() else None


def sanitized(folder: Path) -> str:
    """Code with which a process uses the kernels as the sanitizers watch them, which are compiled into a folder here,
    where the compiler itself runs without the sanitizer."""
    program, level, flags = compiler.find(), compiler.levels()[0], (*compiler.FLAGS, *FLAGS)
    assert program is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", flags)
        compiler.make(program, level, folder / compiler.names([level])[0])
    return (
        "from pathlib import Path; from comera.kernels.cpp import compiler, library\n"
        f"compiler.FLAGS, compiler.PREBUILT = {flags!r}, Path({str(folder)!r})\n"
        "reason = library.unavailable_reason(); assert reason is None, reason\n"
    )


@pytest.mark.skipif(_runtime() is None, reason="the compiler has no address sanitizer")
def test_no_kernel_leaves_its_operands(tmp_path):
    runtime = _runtime()
    assert runtime is not None
    code = f"{sanitized(tmp_path)}import runpy; runpy.run_module('tests.helpers.odd_operands', run_name='__main__')"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "COMERA_KERNELS": "all"}
    environment |= {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all kernels ran" in run.stdout
