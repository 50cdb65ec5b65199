"""The C++ kernels are compiled at installation, checked there and when they are loaded, and not used, with a reason,
where that fails. Most libraries here are of one small function: what the real ones compute, the other files test."""

import ctypes
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from comera.errors import ConfigError
from comera.kernels import select
from comera.kernels.cpp import compiler, library
from comera.kernels.cpp import mlp as ours
from comera.ops.low_rank import LowRankFactors
from comera.ops.mlp import mlp

from ...helpers.chosen_kernels import forget

V4, V3, V2 = compiler.LEVELS["x86_64"].values()
REMEDY = "python -m comera.kernels.cpp.compiler compiles them, or says why not"
needs_compiler = pytest.mark.skipif(compiler.find() is None or not compiler.levels(), reason="no C++ compiler")
SMALL = """
extern "C" {
const char* comera_signatures() { return "mlp=i w2 t;"; }
const char* comera_wrong() { CODE; return nullptr; }
int mlp(int, void*, int) { return 0; }
}
"""
# the code of comera_wrong -> why the library is refused at installation
FAILS = {
    "__builtin_trap()": "SIGILL",
    "*(volatile int*)0 = 0": "SIGSEGV",
    "for (volatile int k = 0;;) k = 1": "it did not end in 0.5 seconds",
    'return "sums"': "wrong sums",
}


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A file of C++ in the place of all, and an empty folder for what is compiled."""
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(compiler, "PREBUILT", tmp_path / "prebuilt")
    file = tmp_path / "csrc" / "small.cpp"
    file.write_text(SMALL.replace("CODE", ""))
    forget()
    yield file
    monkeypatch.undo()
    forget()


def install(level=0):
    """The library for one of this processor's levels, compiled."""
    (made,) = compiler.install(compiler.PREBUILT, compiler.levels()[level : level + 1])
    return made


def put(library, level=0):
    """A library in the place of one that is compiled, sealed."""
    (name,) = compiler.names(compiler.levels()[level : level + 1])
    compiler.PREBUILT.mkdir(exist_ok=True)
    path = compiler.PREBUILT / name
    path.write_bytes(library + compiler._checksum(name, library))
    return path


def other_compiler(tmp_path, monkeypatch, script):
    """A compiler that is a script of the shell."""
    path = tmp_path / "other-c++"
    path.write_bytes(b"#!/bin/sh\n" + script)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def assert_torch_does_the_work(caplog, *said):
    """And that one line, with these words, says why, and what to do."""
    forget()
    reason = select.unavailable_reason()
    assert all(words in reason for words in said), reason
    assert reason.endswith(f": {REMEDY}")
    assert "\n" not in reason
    assert not select.supports("low_rank", torch.zeros(1))
    assert caplog.messages == [f"torch's own operations take the place of comera's C++ kernels: {reason}"]


def factors():
    torch.manual_seed(0)
    return [LowRankFactors(torch.randn(3, i) / i, torch.randn(4, o) / 2) for i, o in ((12, 24), (24, 12))]


@needs_compiler
def test_compiled_once_and_loaded_without_writing(sources, monkeypatch, caplog):
    path = install()
    assert [path] == list(compiler.PREBUILT.iterdir()) == compiler.built()
    monkeypatch.setattr(compiler, "make", lambda *_: pytest.fail("compiled again"))
    before = compiler.PREBUILT.stat().st_mtime_ns
    assert select.unavailable_reason() is None
    assert library.version() == path.stem
    assert compiler.PREBUILT.stat().st_mtime_ns == before
    assert caplog.messages == []


@needs_compiler
def test_as_a_program_it_compiles_for_this_processor(sources):
    code = (
        "import sys; from pathlib import Path; from comera.kernels.cpp import compiler;"
        "compiler.SOURCES, compiler.PREBUILT = map(Path, sys.argv[1:]); compiler.main();"
        "assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(compiler.SOURCES), str(compiler.PREBUILT)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [shown.stdout.strip()] == [str(path) for path in compiler.built()]
    nowhere = os.environ | {"PATH": "/nowhere", "CXX": ""}
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=nowhere)
    assert shown.stderr == "the kernels were not compiled: no C++ compiler was found (CXX, c++, g++)\n"
    assert shown.returncode == 1


def test_without_a_compiler_there_is_a_reason_and_torch_does_the_work(sources, monkeypatch, caplog):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    if sys.platform == "linux" and compiler.levels():
        assert compiler.install(compiler.PREBUILT, ["any"]) == "no C++ compiler was found (CXX, c++, g++)"
    assert_torch_does_the_work(caplog, "none are compiled from these sources for this processor")
    up, down = factors()
    without = mlp(torch.randn(5, 12), [up], "gelu", down)
    assert without.shape == (5, 12)


@needs_compiler
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (b"[ $1 = --version ] && exit 0\necho 'x.cpp:1: error: gar\xe7on \xff' >&2\nexit 1\n", "x.cpp:1: error: gar"),
        (b"[ $1 = --version ] && echo '\xff' && exit 0\nkill -9 $$\n", "status -9"),
        (b"echo clang version 20\n", "is Clang, whose OpenMP is not torch's: set CXX to a GCC"),
    ],
)
def test_a_compiler_of_no_use_leaves_nothing_behind(sources, monkeypatch, tmp_path, script, said):
    other_compiler(tmp_path, monkeypatch, script)
    reason = compiler.install(compiler.PREBUILT, compiler.levels()[:1])
    assert said in reason
    assert str(tmp_path / "other-c++") in reason
    assert "\n" not in reason
    assert not list(compiler.PREBUILT.glob("*"))


@needs_compiler
def test_a_compiler_in_the_working_folder_is_not_run(sources, monkeypatch, tmp_path):
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert install().exists()
    assert not (tmp_path / "ran").exists()


@needs_compiler
def test_nowhere_to_write_is_a_line_why(sources):
    compiler.PREBUILT.write_text("a file in the place of the folder")
    reason = compiler.install(compiler.PREBUILT, compiler.levels()[:1])
    assert reason.startswith("they could not be compiled: ")
    assert "\n" not in reason


@needs_compiler
@pytest.mark.parametrize("code", FAILS)
def test_a_library_that_fails_its_test_is_not_installed(sources, monkeypatch, code):
    """A process of its own dies of it."""
    monkeypatch.setattr(compiler, "_PATIENCE", 0.5 if "for" in code else 60)
    sources.write_text(SMALL.replace("CODE", code))
    reason = compiler.install(compiler.PREBUILT, compiler.levels()[:1])
    assert reason.startswith(compiler.levels()[0])
    assert reason.endswith(f" failed its test: {FAILS[code]}")
    assert not list(compiler.PREBUILT.iterdir())


@needs_compiler
@pytest.mark.parametrize(
    ("file", "right", "wrong", "found"),
    [
        ("vectors.h", "0.240221216f", "0.250221216f", "gelu"),  # of the exponential
        ("activations.h", "0.044715f + 1.0f) * -1.59", "0.044715f + 1.0f) * -1.58", "gelu_tanh"),
        ("activations.h", "s + h * (1.0f - s)", "s + h * (1.1f - s)", "silu"),
        ("products.h", "add ? load(to) + sum[i][j]", "add && i != 4 ? load(to) + sum[i][j]", "products"),
        ("products.h", "i & apart ? i + W : i + apart;", "i & apart ? i + W : i;", "products"),
        (
            "vectors.h",
            "load_part(const float* from, long count) {",
            "load_part(const float* from, long) {long count=1;",
            "parts",
        ),
    ],
)
def test_wrong_results_are_found(sources, tmp_path, file, right, wrong, found):
    """By what every library has in exports.cpp."""
    sources.unlink()
    real = compiler.Path(compiler.__file__).parent / "csrc"
    for path in (*real.glob("*.h"), real / "exports.cpp"):
        shutil.copy(path, compiler.SOURCES)
    text = (compiler.SOURCES / file).read_text()
    assert text.count(right) == 1
    (compiler.SOURCES / file).write_text(text.replace(right, wrong))
    reason = compiler.install(compiler.PREBUILT, compiler.levels()[:1])
    assert f"failed its test: wrong {found}" in reason


@needs_compiler
def test_a_library_that_is_wrong_where_it_is_loaded_is_not_used(sources, caplog):
    sources.write_text(SMALL.replace("CODE", 'return "sums"'))
    (name,) = compiler.names(compiler.levels()[:1])
    compiler.PREBUILT.mkdir()
    compiler.make(compiler.find(), compiler.levels()[0], compiler.PREBUILT / name)
    assert_torch_does_the_work(caplog, f"{name} computes sums wrongly")


@needs_compiler
def test_two_that_compile_at_once_and_what_a_killed_one_left(sources):
    compiler.PREBUILT.mkdir()
    (compiler.PREBUILT / ".x86-64-v4-0123456789abcdef.so.4194305").write_bytes(b"half")
    (compiler.PREBUILT / "x86-64-v4-0123456789abcdef.so").write_bytes(b"of other sources")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=install) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert list(compiler.PREBUILT.iterdir()) == compiler.built() != []
    assert select.unavailable_reason() is None


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


@needs_compiler
def test_the_next_level_takes_the_place_of_one_that_is_damaged(sources, monkeypatch, caplog):
    levels = ["best", compiler.levels()[0]]
    monkeypatch.setattr(compiler, "levels", lambda: levels)
    path = install(1)
    put(b"", 0).write_bytes(b"")
    assert select.unavailable_reason() is None
    assert library.version() == path.stem
    (line,) = caplog.messages
    assert line.startswith("not the best of comera's C++ kernels are used: ")
    assert line.endswith("is damaged")


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor of x86-64")
def test_a_processor_takes_what_it_can_run(sources, monkeypatch, caplog):
    assert len(compiler.install(compiler.PREBUILT, list(compiler.LEVELS["x86_64"]))) == 3
    for words, level in ((V2, "x86-64-v2"), (V3, "x86-64-v3")):
        monkeypatch.setattr(compiler, "processor", lambda words=words: f"flags: {words}")
        forget()
        assert select.unavailable_reason() is None
        assert library.version().startswith(level)
    monkeypatch.setattr(compiler, "processor", lambda: "flags: fpu sse sse2")
    assert_torch_does_the_work(caplog, "none are compiled from these sources for this processor")


@needs_compiler
@pytest.mark.parametrize("change", ["source", "flags"])
@pytest.mark.parametrize("moved", [False, True], ids=["as it was", "under the right name"])
def test_a_library_of_other_sources_is_not_loaded(sources, monkeypatch, caplog, change, moved):
    before = install()
    if change == "source":
        sources.write_text(f"{sources.read_text()} // changed")
    else:
        monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    if moved:
        before.rename(compiler.PREBUILT / compiler.names(compiler.levels())[0])
    assert_torch_does_the_work(caplog, "is damaged" if moved else "none are compiled from these sources")
    assert install() != before
    forget()
    assert select.unavailable_reason() is None


@needs_compiler
@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "longer"])
def test_a_damaged_library_is_not_loaded(sources, monkeypatch, caplog, damage):
    path = install()
    whole = path.read_bytes()
    half = len(whole) // 2
    damaged = {
        "empty": b"",
        "truncated": whole[:half],
        "changed": whole[:half] + bytes(each ^ 255 for each in whole[half : half + 8]) + whole[half + 8 :],
        "longer": whole + bytes(64),
    }[damage]
    path.unlink()  # as it is mapped into this process
    path.write_bytes(damaged)
    load = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, *_, **__: pytest.fail("loaded") if name else load(None))
    assert_torch_does_the_work(caplog, f"{path} is damaged")


@needs_compiler
def test_what_cannot_be_loaded_is_a_line_why(sources, monkeypatch, caplog):
    path = put(b"no library")
    assert_torch_does_the_work(caplog, f"{path} could not be loaded: {path}: file too short")
    load = ctypes.CDLL

    def refuse(name, *args, **options):
        if name is not None and str(path) in name:
            raise OSError(f"{name}: failed to map segment from shared object: Operation not permitted")
        return load(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    caplog.clear()
    install()
    assert_torch_does_the_work(caplog, f"{path} could not be loaded: ", "failed to map segment")


@needs_compiler
def test_operands_that_do_not_fit_the_librarys_signature_are_refused(sources):
    install()
    library.call("mlp", 1, library.words([1, 2, 3, 4]))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        library.call("mlp", 1)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        library.call("mlp", 1, None, None)
    with pytest.raises(ValueError, match="expected structs of 16 bytes for the kernel mlp, got 24 bytes"):
        library.call("mlp", 1, library.words([1, 2, 3]))
    with pytest.raises(ctypes.ArgumentError):
        library.call("mlp", torch.tensor(1.5), None)


def test_declined_by_the_environment(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "none")
    assert not select.supports("mlp", torch.zeros(1))
    monkeypatch.setenv("COMERA_KERNELS", "faster")
    with pytest.raises(ConfigError, match="COMERA_KERNELS"):
        select.supports("mlp", torch.zeros(1))


def test_other_tensors_are_left_to_torch():
    with FakeTensorMode():
        fake = torch.zeros(1)
    for tensor in (torch.zeros(1, dtype=torch.float64), torch.zeros(1, device="meta"), fake):
        assert not select.supports("mlp", torch.zeros(1), tensor)


@needs_compiler
def test_the_same_with_and_without(monkeypatch):
    calls = []
    kernel = ours.mlp
    monkeypatch.setattr(ours, "mlp", lambda *args: calls.append(1) or kernel(*args))
    x = torch.randn(select.MLP_LEAST_ROWS, 12, requires_grad=True)
    up, down = factors()
    tensors = [x, *up, *down]
    for tensor in tensors[1:]:
        tensor.requires_grad_()
    results = []
    for setting in ("mlp", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        z = mlp(x, [up], "gelu", down)
        results.append([z.detach(), *torch.autograd.grad(z.square().sum(), tensors)])
    assert len(calls) == 1
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@needs_compiler
def test_one_openmp_serves_torch_and_the_kernels():
    """It is no dependency of the library, which finds what torch has loaded."""
    code = (
        "import torch; from comera.kernels import select; from comera.kernels.cpp.gated import gated;"
        "assert select.unavailable_reason() is None; gated(torch.ones(2**20), None, 'gelu');"
        "files = {line.split()[-1] for line in open('/proc/self/maps')};"
        "print(len([f for f in files if any(name in f for name in ('libgomp', 'libomp', 'libiomp'))]))"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == 1, "two libraries of OpenMP would compete for the same cores"


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="no compiler for aarch64")
def test_the_sources_compile_for_aarch64(tmp_path):
    (level,) = compiler.LEVELS["aarch64"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O0", "-Wall", "-Werror"))
        compiler.make(shutil.which("aarch64-linux-gnu-g++"), level, tmp_path / "kernels.so")
    machine = (tmp_path / "kernels.so").read_bytes()[18:20]  # e_machine of an ELF file
    assert int.from_bytes(machine, "little") == 183
