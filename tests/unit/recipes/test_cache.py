"""What an opening of prepared data compares with its checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from comera.errors import DataError
from comera.recipes.data import cache
from comera.recipes.data.cache import open_or_make
from comera.recipes.dlrm.criteo.batches import RowEncoder

from ...helpers.click_rows import ROWS, read, write


def write_two(folder: Path) -> None:
    (folder / "small").write_bytes(bytes(10))
    (folder / "large").write_bytes(bytes(1000))


def load(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("small", "large")]


def test_of_large_data_only_small_files_are_compared_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "VERIFIED_BYTES", 1000)
    monkeypatch.setattr(cache, "SMALL_BYTES", 500)
    folder, good = tmp_path / "data", [bytes(10), bytes(1000)]
    assert open_or_make(folder, load, write_two) == good
    assert not caplog.text
    (folder / "large").write_bytes(b"1" * 1000)
    assert open_or_make(folder, load, write_two)[1] == b"1" * 1000
    assert "to compare all, run xxh128sum -c XXH128SUMS" in caplog.text
    (folder / "small").write_bytes(b"1" * 10)
    assert open_or_make(folder, load, write_two) == good
    (folder / "large").unlink()
    assert open_or_make(folder, load, write_two) == good


def test_data_of_before_checksums_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_or_make(tmp_path / "data", load, write_two)
    (tmp_path / "data" / "XXH128SUMS").unlink()
    assert open_or_make(tmp_path / "data", load, write_two) == [bytes(10), bytes(1000)]
    assert "it has no XXH128SUMS" in caplog.text
    assert (tmp_path / "data" / "XXH128SUMS").exists()


def test_rows_are_not_encoded_with_damaged_dictionaries(tmp_path: Path) -> None:
    folder = read(write(tmp_path / "train.txt", ROWS[:60])).folder
    RowEncoder(folder)
    path = folder / "C03.table.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"C03\.table\.npy differs from its checksum"):
        RowEncoder(folder)
    (folder / "XXH128SUMS").unlink()  # prepared before there were checksums
    path.write_bytes(whole)
    RowEncoder(folder)
