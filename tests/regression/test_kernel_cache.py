"""The compiled kernels' cache: only whole libraries that nobody else can write are loaded; nothing is left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comera.kernels.cpp import compiler, library, trial

from ..helpers.chosen_kernels import forget

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

SOURCE = 'extern "C" { const char* comera_signatures() { return "mlp=i"; } int mlp(int) { return 0; } }'
LOAD = """
import sys
from pathlib import Path
from comera.kernels.cpp import compiler, library, trial
compiler.SOURCES, library.SIGNATURES, trial.refusal = Path(sys.argv[1]), {"mlp": "i"}, lambda path: None
print(library.unavailable_reason())
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where libraries are kept: an empty folder. They are of one small function, which no trial would pass."""
    for name in ("csrc", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "csrc" / "small.cpp").write_text(SOURCE)
    monkeypatch.setattr(compiler, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(trial, "refusal", lambda path: None)
    monkeypatch.setattr(library, "SIGNATURES", {"mlp": "i"})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()


def reason() -> str | None:
    """Why a process that begins now has no kernels."""
    forget()
    return library.unavailable_reason()


def made(cache: Path) -> Path:
    """The one library in the cache."""
    (found,) = cache.rglob("native-*.so")
    return found


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".so" and path.name != ".lock"]


def load_elsewhere(cache: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which may die of it."""
    command = [sys.executable, "-c", LOAD, str(compiler.SOURCES)]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty", "longer"])
def test_a_damaged_library_is_compiled_anew(cache: Path, damage: str) -> None:
    assert load_elsewhere(cache).stdout == "None\n"
    path = made(cache)
    whole = path.read_bytes()
    half = len(whole) // 2
    damaged = {
        "truncated": whole[: len(whole) // 4],
        "changed": whole[:half] + bytes(each ^ 255 for each in whole[half : half + 8]) + whole[half + 8 :],
        "empty": b"",
        "longer": whole + bytes(64),
    }[damage]
    path.write_bytes(damaged)
    run = load_elsewhere(cache)
    assert (run.returncode, run.stdout) == (0, "None\n"), f"exit status {run.returncode}"
    assert made(cache).read_bytes() != damaged, "it was loaded as it is"


@pytest.mark.parametrize("other", ["source", "flags", "compiler", "processor"])
def test_a_library_for_anything_else_is_another_one(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, other: str
) -> None:
    assert reason() is None
    if other == "source":
        (tmp_path / "csrc" / "small.cpp").write_text(f"{SOURCE} // changed")
    elif other == "flags":
        monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-g"))
    elif other == "compiler":
        newer = f"{compiler.about(str(compiler.find()))} and one"
        monkeypatch.setattr(compiler, "about", lambda program: newer)
    else:
        monkeypatch.setattr(compiler, "processor", lambda: "another one")
    first = made(cache)
    assert reason() is None
    assert len({first, *cache.rglob("native-*.so")}) == 2


def test_another_users_library_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() is None
    path = made(cache)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    before, loaded = path.stat(), spy(monkeypatch)
    assert reason() is None
    assert not any(os.path.samestat(before, each) for each in loaded), "another user's library was loaded"


@pytest.mark.parametrize("what", ["library", "folder"])
def test_a_library_that_others_can_write_is_not_loaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert reason() is None
    path = made(cache)
    (path if what == "library" else path.parent).chmod(0o777)
    before, loaded = path.stat(), spy(monkeypatch)
    assert reason() is None
    assert not any(os.path.samestat(before, each) for each in loaded), "a library that others can write was loaded"
    if what == "folder":
        assert "write" in caplog.text
        assert str(path.parent) in caplog.text


def test_a_symbolic_link_in_the_cache_is_not_loaded(cache: Path, tmp_path: Path) -> None:
    assert reason() is None
    path = made(cache)
    other = path.rename(tmp_path / "other.so")
    path.symlink_to(other)
    before = other.read_bytes()
    assert reason() is None
    assert not path.is_symlink()
    assert other.read_bytes() == before


def test_a_relative_cache_folder_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert reason() is None
    assert not (tmp_path / "here").exists(), "a library in the working folder would be loaded"
    assert made(tmp_path / "home").is_file()


def test_a_compiler_in_the_working_folder_is_not_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\ntouch {ran}\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    assert reason() is None
    assert not ran.exists()


def test_without_a_home_the_kernels_are_compiled_for_this_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert reason() is None
    assert "XDG_CACHE_HOME" in caplog.text
    assert not list((tmp_path / "tmp").iterdir()), "left behind"


def test_output_that_is_not_utf_8(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "latin-c++"
    script.write_bytes(b"#!/bin/sh\necho 'x.cpp:1: error: gar\xe7on \xff' >&2\n[ $1 = --version ] && exit 0\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    said = reason()
    assert said is not None
    assert "error: gar" in said
    assert "\n" not in said
    script.write_bytes(b"#!/bin/sh\necho '\xff'\n[ $1 = --version ] && exit 0\nkill -9 $$\n")
    said = reason()
    assert said is not None
    assert "latin-c++ could not compile them" in said
    assert "[]" not in said
    assert not left(cache)


def test_a_folder_that_nothing_is_run_from(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load = ctypes.CDLL

    def refuse(name: str | None, *args: Any, **options: Any) -> Any:
        if name is not None and str(refused) in name:
            raise OSError(f"{name}: failed to map segment from shared object: Operation not permitted")
        return load(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    refused = cache
    assert reason() is None
    assert "failed to map" in caplog.text
    refused = tmp_path
    said = reason()
    assert said is not None
    assert "failed to map" in said
    assert "\n" not in said
    assert not list((tmp_path / "tmp").iterdir()), "left behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_with_a_library_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() is None
    monkeypatch.setattr(compiler, "make", lambda *_: pytest.fail("compiled again"))
    made(cache).parent.chmod(0o500)
    assert reason() is None
    made(cache).parent.chmod(0o700)


def test_a_library_that_is_there_is_used_without_writing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() is None
    path = made(cache)
    before = {each: each.stat().st_mtime_ns for each in (path, path.parent)}
    monkeypatch.setattr(compiler, "make", lambda *_: pytest.fail("compiled again"))
    assert reason() is None
    assert {each: each.stat().st_mtime_ns for each in before} == before


def test_nowhere_to_write_is_a_line_why(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache.write_text("a file in the place of the folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    said = reason()
    assert said is not None
    assert "\n" not in said
    assert "could not be compiled" in said


def test_threads_and_processes_compile_it_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = cache.parent / "compiled"
    compile_now = compiler.make

    def slowly(*args: Any) -> None:
        with open(compiled, "a") as file:
            file.write("x")
        time.sleep(0.5)
        compile_now(*args)

    monkeypatch.setattr(compiler, "make", slowly)
    forget()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=library.unavailable_reason) for _ in range(2)]
    for process in processes:
        process.start()
    reasons: list[str | None] = []
    threads = [threading.Thread(target=lambda: reasons.append(library.unavailable_reason())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for each in (*threads, *processes):
        each.join()
    assert reasons == [None] * 4
    assert [process.exitcode for process in processes] == [0, 0]
    assert compiled.read_text() == "x", "compiled more than once"
    assert not left(cache)


def test_what_a_killed_build_left_is_removed(cache: Path) -> None:
    assert reason() is None
    path = made(cache)
    path.rename(path.with_name(f".{path.name}.4194305.new"))
    assert reason() is None
    assert not left(cache)


def spy(monkeypatch: pytest.MonkeyPatch) -> list[os.stat_result]:
    """The files that are loaded from now on."""
    loaded: list[os.stat_result] = []
    load = ctypes.CDLL

    def note(name: str | None, *args: Any, **options: Any) -> Any:
        if name is not None:  # the process itself
            loaded.append(os.stat(name))
        return load(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", note)
    return loaded
