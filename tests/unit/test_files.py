"""Files are replaced atomically."""

from collections.abc import Callable
from pathlib import Path

import pytest

from comera.files import replace_file


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
