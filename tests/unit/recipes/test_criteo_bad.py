"""Bad rows of Criteo's files: counted and skipped up to a limit, then an error with file and line; no column moves."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from comera.errors import DataError
from comera.recipes.dlrm.criteo import ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo.rows import CUT_SHORT, KINDS, LABEL

from ...helpers.click_rows import ROWS, assert_same_rows, lines_of, read, small_blocks, spoiled, write


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClickData:
    """ROWS, read by one process in a single block."""
    return read(write(tmp_path_factory.mktemp("reference") / "train.txt", ROWS), workers=1)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_are_skipped_and_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reference: ClickData,
    kind: str,
    workers: int,
) -> None:
    small_blocks(monkeypatch)
    path = write(tmp_path / "train.txt", spoiled(kind, 9))
    config = CriteoConfig(path=str(path), cache=str(tmp_path / "cache"), max_bad_rows=9, workers=workers)
    data = prepare(config)
    assert data.bad == {kind: 9}
    assert [row.split(": ")[0] for row in data.manifest["bad_rows"][kind]] == [
        f"{path}, line {line}" for line in (21, 42, 63)
    ]
    shown = capsys.readouterr().err
    assert f"skipped 9 bad rows (9 {kind}), such as" in shown
    assert f"{path}, line 21: expected" in shown
    assert_same_rows(data, reference)  # no column moved


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_row_too_many_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int
) -> None:
    small_blocks(monkeypatch)
    path = write(tmp_path / "train.txt", spoiled(kind, 9))
    message = (
        rf"train\.txt, line {9 * 21}: expected .*; that makes 9 bad rows \(9 {kind}\), and data\.max_bad_rows allows 8"
    )
    with pytest.raises(DataError, match=message):
        read(path, max_bad_rows=8, workers=workers)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_the_limit_holds_for_what_is_prepared_already(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", spoiled(LABEL, 3))
    folder = read(path, max_bad_rows=3).folder
    with pytest.raises(DataError, match=r"train\.txt, line 21: .*; that makes 3 bad rows .* allows 2"):
        read(path, max_bad_rows=2)
    assert read(path).folder == folder


def test_lines_are_counted_in_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    (tmp_path / "log").mkdir()
    write(tmp_path / "log" / "day_0", ROWS[:300])
    write(tmp_path / "log" / "day_1", [*ROWS[:150], ["1"], *ROWS[:20]])
    with pytest.raises(DataError, match=r"day_1, line 151: expected 40 fields between tabs, got 1 \('1'\)"):
        read(tmp_path / "log", max_bad_rows=0)


@pytest.mark.parametrize("limit", [0, 1])
def test_a_gzip_that_is_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    small_blocks(monkeypatch)
    path = tmp_path / "train.txt.gz"
    data = gzip.compress(lines_of(ROWS))
    path.write_bytes(data[: len(data) // 2])
    if limit:
        clicks = read(path, max_bad_rows=limit)
        assert clicks.bad == {CUT_SHORT: 1}
        assert 500 < len(clicks) < 1000
        assert f"line {len(clicks) + 1}: the compressed file ends here" in clicks.manifest["bad_rows"][CUT_SHORT][0]
    else:
        with pytest.raises(
            DataError, match=r"train\.txt\.gz, line \d+: the compressed file ends here, cut short; that"
        ):
            read(path, max_bad_rows=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"not a click log\n" * 50, r"line 4: expected 40 fields between tabs, got 1 .*; that makes 4 bad rows"),
        (b"\0" * 5000, r"expected at least 14 good rows, .* got 0 in .*\(bad rows: {'too few fields': 1}\)"),
        (lines_of(ROWS[:13]), r"expected at least 14 good rows, for training, validation and test, got 13"),
        (lines_of(ROWS[:20]).replace(b"\t", b","), r"line 4: expected 40 fields between tabs, got 1 "),
        (lines_of(ROWS[:20]).replace(b"\n", b"\r"), r"got 0 in .*\(bad rows: {'too many fields': 1}\)"),
    ],
    ids=["text", "zeros", "too little", "commas", "carriage returns"],
)
def test_what_is_no_click_log(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "train.txt").write_bytes(text)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "train.txt", max_bad_rows=3)
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]
