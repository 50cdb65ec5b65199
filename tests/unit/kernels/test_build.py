"""The C++ kernels are compiled once, checked when they are loaded, and not used, with a reason, where that fails."""

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

needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """The build begins anew, in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def in_haste(monkeypatch):
    """Nothing is optimized: how the real flags compile, test_compiled_once_and_found_again shows."""
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-O0"))


def factors():
    torch.manual_seed(0)
    return [LowRankFactors(torch.randn(3, i) / i, torch.randn(4, o) / 2) for i, o in ((12, 24), (24, 12))]


@needs_compiler
def test_compiled_once_and_found_again(anew, monkeypatch, caplog):
    assert select.unavailable_reason() is None
    (said,) = caplog.messages
    assert said.startswith("compiling comera's C++ kernels, once for this processor: about half a minute (")
    made = sorted(path.name for path in (anew / "comera" / "kernels").iterdir())
    assert made[0] == ".lock"
    assert [name.partition("-")[0] for name in made[1:]] == ["native", "passed"]
    forget()
    monkeypatch.setattr(compiler, "make", lambda *_: pytest.fail("compiled again"))
    assert select.unavailable_reason() is None
    assert len(caplog.messages) == 1
    assert sorted(path.name for path in (anew / "comera" / "kernels").iterdir()) == made


@pytest.mark.usefixtures("anew")
def test_without_a_compiler_there_is_a_reason_and_torch_does_the_work(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    assert "no C++ compiler" in select.unavailable_reason()
    x = torch.randn(5, 12)
    assert not select.supports("mlp", x)
    up, down = factors()
    without = mlp(x, [up], "gelu", down)
    assert without.shape == (5, 12)


def test_a_compiler_that_fails_leaves_nothing_behind(anew, monkeypatch, tmp_path):
    broken = tmp_path / "broken-c++"
    broken.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.cpp:1: error: no such flag' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert "error: no such flag" in select.unavailable_reason()
    assert [path.name for path in (anew / "comera" / "kernels").iterdir()] == [".lock"]


@needs_compiler
@pytest.mark.usefixtures("in_haste")
def test_another_folder_where_the_cache_cannot_be_written_to(anew, monkeypatch):
    (anew / "comera").write_text("a file in the place of the folder")
    assert select.unavailable_reason() is None
    assert (anew / "comera").is_file()


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
@pytest.mark.parametrize("change", [{"clip": "l p p d p"}, {"low_rank": "l l p l w8 l i"}, {"no_kernel": "i"}], ids=str)
def test_a_library_with_other_signatures_is_refused(change, monkeypatch):
    assert select.unavailable_reason() is None
    monkeypatch.setattr(library, "SIGNATURES", library.SIGNATURES | change)
    forget()
    reason = select.unavailable_reason()
    monkeypatch.undo()
    forget()
    assert f"expected {next(iter(change))} ({next(iter(change.values()))})" in reason
    assert "\n" not in reason


@needs_compiler
def test_a_function_missing_from_the_table_is_refused(monkeypatch):
    assert select.unavailable_reason() is None
    monkeypatch.delitem(library.SIGNATURES, "mlp")
    forget()
    reason, supported = select.unavailable_reason(), select.supports("merge", torch.zeros(1))
    monkeypatch.undo()
    forget()
    assert "expected mlp (absent)" in reason
    assert not supported


@needs_compiler
def test_a_library_that_does_not_load_is_refused(anew, monkeypatch):
    monkeypatch.setattr(compiler, "make", lambda program, march, path: path.write_bytes(b"no library"))
    assert "could not be loaded" in select.unavailable_reason()
    assert not select.supports("mlp", torch.zeros(1))


@needs_compiler
def test_threads_are_those_of_torch():
    code = (
        "import torch, os; from comera.kernels import select; assert select.unavailable_reason() is None;"
        "maps, names = open('/proc/self/maps').read().split(), ('libgomp', 'libomp', 'libiomp');"
        "print(len({m for m in maps if any(name in m for name in names)}))"
    )
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 1, "two libraries of OpenMP would compete for the same cores"
