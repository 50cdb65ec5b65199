"""The wheel's kernels: the level for the processor is chosen, and none that could end the process or is not ours."""

import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from comera.kernels import select
from comera.kernels.cpp import build, compiler, library, selftest, trial

from ...helpers.chosen_kernels import forget

V4, V3, V2 = compiler.LEVELS["x86_64"].values()
PROGRAM = compiler.find()
# the code of comera_signatures -> what its process dies of
FATAL = {"__builtin_trap();": "SIGILL", "*(volatile int*)0 = 0;": "SIGSEGV"}
pytestmark = pytest.mark.skipif(
    PROGRAM is None or compiler.is_clang(PROGRAM) or not compiler.levels(),
    reason="no GCC, or a processor that wheels hold no kernels for",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The kernels, compiled in haste for the least level of this machine."""
    return in_haste(tmp_path_factory.mktemp("whole") / "kernels.so")


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Puts a library into the folder of a wheel's kernels, for a level of this processor, on a machine that has no
    compiler and an empty cache."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    monkeypatch.setattr(build, "PREBUILT", folder)
    monkeypatch.setattr(compiler, "find", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def add(library, level=0):
        version = compiler.digest(compiler.source_texts())
        path = folder / compiler.prebuilt_name(compiler.levels()[level], version)
        shutil.copy(library, path)
        compiler.seal(path, path.name)
        return path

    forget()
    yield add
    monkeypatch.undo()
    forget()


def in_haste(path, sources=compiler.SOURCES):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O0"))
        patch.setattr(compiler, "SOURCES", sources)
        compiler.make(PROGRAM, list(compiler.LEVELS[platform.machine()])[-1], path)
    return path


def compiled(folder, code):
    """A library whose comera_signatures runs some code, to say that there is one function, mlp."""
    path, text = folder / "other.so", folder / "other.cpp"
    text.write_text(f'extern "C" {{ const char* comera_signatures() {{ {code} return "mlp=i"; }} int mlp(int); }}')
    subprocess.run([PROGRAM, "-shared", "-fPIC", str(text), "-o", str(path)], check=True)
    return path


def kernels_folder(tmp_path):
    return tmp_path / "cache" / "comera" / "kernels"


def assert_torch_does_the_work(caplog, *said):
    """And that one line, with these words, says why."""
    reason = select.unavailable_reason()
    assert all(words in reason for words in said), reason
    assert "\n" not in reason
    assert not select.supports("low_rank", torch.zeros(1))
    assert caplog.messages == [f"torch's own operations take the place of comera's C++ kernels: {reason}"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (V4, ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
        (V4.replace("avx512vl", ""), ["x86-64-v3", "x86-64-v2"]),
        (V3, ["x86-64-v3", "x86-64-v2"]),
        (V3.replace("avx2", ""), ["x86-64-v2"]),
        (V2.replace("sse4_2", ""), []),
        ("", []),
    ],
)
def test_levels_of_a_processor(monkeypatch, flags, found):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compiler, "processor", lambda: f"flags\t\t: fpu {flags} vme\nmodel name\t: any")
    assert compiler.levels() == found
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert compiler.levels() == []


def test_the_best_level_is_used_and_tried_once(wheel, whole, tmp_path, caplog, monkeypatch):
    path = wheel(whole)
    assert select.unavailable_reason() is None
    assert library.version() == path.stem
    assert selftest.difference() is None
    (passed,) = kernels_folder(tmp_path).iterdir()
    assert passed.name.startswith("passed-")
    tried = []
    monkeypatch.setattr(trial, "_try", tried.append)
    forget()
    assert select.unavailable_reason() is None
    assert tried == []
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    forget()
    assert select.unavailable_reason() is None
    assert tried == [path], "another torch has other results to agree with"
    assert caplog.messages == []


@pytest.mark.parametrize("code", FATAL)
def test_a_library_that_ends_the_process_is_not_loaded(wheel, tmp_path, caplog, code):
    wheel(compiled(tmp_path, code))
    assert_torch_does_the_work(caplog, f"failed its self-test: {FATAL[code]} ended it", "no C++ compiler was found")
    assert not kernels_folder(tmp_path).exists()


def test_the_next_level_takes_its_place(wheel, whole, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compiler, "levels", lambda: ["best", "next"])
    wheel(compiled(tmp_path, "__builtin_trap();"), 0)
    path = wheel(whole, 1)
    assert select.unavailable_reason() is None
    assert library.version() == path.stem
    (line,) = caplog.messages
    assert line.startswith("not the best of the wheel's C++ kernels are used: best-")
    assert line.endswith("SIGILL ended it")


def test_a_processor_without_avx2_takes_what_it_can_run(wheel, whole, monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("a processor of x86-64")
    monkeypatch.setattr(compiler, "processor", lambda: f"flags: {V2}")
    wheel(whole)
    assert select.unavailable_reason() is None
    assert library.version().startswith("x86-64-v2-")


def test_a_processor_below_every_level(wheel, whole, monkeypatch, caplog):
    wheel(whole)
    monkeypatch.setattr(compiler, "processor", lambda: "flags: fpu sse sse2")
    assert_torch_does_the_work(caplog, "the wheel has no kernels for this processor")


def test_wrong_results_are_found(wheel, tmp_path, caplog):
    sources = tmp_path / "csrc"
    shutil.copytree(compiler.SOURCES, sources)
    vectors = sources / "vectors.h"
    assert "0.240221216f" in vectors.read_text()  # of the exponential
    vectors.write_text(vectors.read_text().replace("0.240221216f", "0.250221216f"))
    wheel(in_haste(tmp_path / "wrong.so", sources))
    assert_torch_does_the_work(caplog, "failed its self-test", "differs from torch's result on")


def test_other_signatures_are_refused(wheel, tmp_path, caplog):
    wheel(compiled(tmp_path, ""))
    assert_torch_does_the_work(caplog, "the compiled kernels do not fit: expected adamw (")


@pytest.mark.parametrize("moved", [False, True], ids=["as it was", "under the right name"])
def test_a_library_of_another_version_is_not_loaded(wheel, whole, monkeypatch, caplog, moved):
    right = wheel(whole)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "source_texts", lambda: ["other sources"])
        other = wheel(whole)
    assert other != right
    if moved:
        other.replace(right)
    else:
        right.unlink()
    monkeypatch.setattr(trial, "_try", lambda path: pytest.fail("tried"))
    assert_torch_does_the_work(caplog, "is damaged" if moved else "are of another version of comera: install it anew")


@pytest.mark.parametrize("kept", [0, 100, 10_000])
def test_a_damaged_library_is_not_loaded(wheel, whole, monkeypatch, caplog, kept):
    path = wheel(whole)
    path.write_bytes(path.read_bytes()[:kept])
    monkeypatch.setattr(trial, "_try", lambda path: pytest.fail("tried"))
    assert_torch_does_the_work(caplog, f"{path} is damaged: install comera anew")


def test_what_is_no_library_is_not_loaded(wheel, tmp_path, caplog):
    (tmp_path / "text").write_text("no library")
    path = wheel(tmp_path / "text")
    assert_torch_does_the_work(caplog, f"the wheel's kernels could not be loaded: {path}: file too short")


def test_a_broken_compiler_behind_a_broken_wheel(wheel, tmp_path, monkeypatch, caplog):
    (build.PREBUILT / "x86-64-v4-0123456789abcdef.so").write_bytes(b"of 1999")
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cpp:1: error: no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(compiler, "find", lambda: str(broken))
    reason = select.unavailable_reason()
    assert "of another version of comera" in reason
    assert "could not compile them: x.cpp:1: error: no such flag" in reason
    announced, line = caplog.messages
    assert announced.startswith("compiling comera's C++ kernels")
    assert line.endswith(reason)


@pytest.mark.parametrize("trouble", ["no folder", "of another user", "others can write"])
def test_without_a_cache_the_trial_is_held_in_every_process(wheel, whole, tmp_path, monkeypatch, caplog, trouble):
    """A cache that others could have written to is not believed that a library has passed."""
    path, folder = wheel(whole), kernels_folder(tmp_path)
    folder.mkdir(parents=True)
    (folder / f"passed-{trial._digest(path)}").touch()
    if trouble == "no folder":
        shutil.rmtree(folder)
        folder.write_text("a file in its place")
    elif trouble == "others can write":
        folder.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    tried = []
    monkeypatch.setattr(trial, "_try", tried.append)
    assert select.unavailable_reason() is None
    assert tried == [path]
    (line,) = caplog.messages
    assert line.startswith("every process will test the C++ kernels anew, since their cache folder cannot be used (")


def test_a_trial_that_hangs_or_cannot_start(wheel, tmp_path, monkeypatch, caplog):
    wheel(compiled(tmp_path, "for (volatile int k = 0;;) k = 1;"))
    monkeypatch.setattr(trial, "_PATIENCE", 0.2)
    assert_torch_does_the_work(caplog, "did not end in 0.2 seconds")
    forget()
    caplog.clear()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    assert_torch_does_the_work(caplog, "could not be started: ")


def test_one_openmp_serves_torch_and_the_kernels(whole):
    """It is no dependency of the library, which finds what torch has loaded."""
    code = (
        "import sys; from pathlib import Path; from comera.kernels.cpp import library, selftest;"
        "library.on_trial = Path(sys.argv[1]); print(selftest.difference());"
        "files = {line.split()[-1] for line in open('/proc/self/maps')};"
        "print(*(f for f in files if any(name in f for name in ('libgomp', 'libomp', 'libiomp'))))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(whole)], capture_output=True, text=True, check=True)
    difference, openmp = run.stdout.splitlines()
    assert difference == "None"
    assert len(openmp.split()) == 1, "two libraries of OpenMP would compete for the same cores"


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no compiler for aarch64")
def test_the_sources_compile_for_aarch64(tmp_path):
    (level,) = compiler.LEVELS["aarch64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O0", "-Wall", "-Werror"))
        compiler.make(shutil.which("aarch64-linux-gnu-g++"), level, tmp_path / "kernels.so")
    machine = (tmp_path / "kernels.so").read_bytes()[18:20]  # e_machine of an ELF file
    assert int.from_bytes(machine, "little") == 183
