"""Files are replaced atomically, and checksums show what has changed since."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from comera.files import SUMS, damage, replace_file, write_sums


def _fails(beside: Path) -> None:
    beside.write_text("incomplete")
    raise RuntimeError("interrupted")


def test_text_bytes_and_functions_replace_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    contents: list[str | bytes | Callable[[Path], object]] = ["ä", b"b", lambda beside: beside.write_text("c")]
    assert [replace_file(path, content).read_text("utf-8") for content in contents] == ["ä", "b", "c"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("content", "error"), [("new \ud800", UnicodeEncodeError), (_fails, RuntimeError)])
def test_the_old_file_stays_when_writing_fails(
    tmp_path: Path, content: str | Callable[[Path], object], error: type[Exception]
) -> None:
    path = replace_file(tmp_path / "a.txt", "old")
    with pytest.raises(error):
        replace_file(path, content)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_the_old_file_stays_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = replace_file(tmp_path / "a.txt", "old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        replace_file(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_users_permissions_whatever_writes_them(tmp_path: Path, umask: int, mode: int) -> None:
    def private(beside: Path) -> None:
        beside.unlink()
        os.close(os.open(beside, os.O_CREAT | os.O_WRONLY, 0o600))

    before = os.umask(umask)
    try:
        for content in ("text", private):
            assert replace_file(tmp_path / "a", content).stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_checksums_show_every_change(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path)
    assert damage(tmp_path, ["a", "b"]) is None
    (tmp_path / "b").write_text("c")
    assert damage(tmp_path, ["a"]) is None
    assert damage(tmp_path, ["a", "b"]) == "b differs from its checksum"
    (tmp_path / "b").unlink()
    assert damage(tmp_path, ["a"]) == "it has no b"
    (tmp_path / "c").write_text("c")
    assert damage(tmp_path, ["c"]) == "it has no b"
    write_sums(tmp_path)
    (tmp_path / "d").write_text("d")
    assert damage(tmp_path, ["d"]) == f"{SUMS} lacks d"
    (tmp_path / SUMS).write_text("more\n" + (tmp_path / SUMS).read_text())
    assert damage(tmp_path, ["a"]) == f"{SUMS} is damaged"
    (tmp_path / SUMS).unlink()
    assert damage(tmp_path, ["a"]) == f"it has no {SUMS}"


@pytest.mark.skipif(shutil.which("xxh128sum") is None, reason="xxh128sum is not installed")
def test_checksums_are_those_of_xxh128sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    write_sums(tmp_path)
    subprocess.run(["xxh128sum", "-c", SUMS], cwd=tmp_path, check=True)
