"""Criteo's files → prepared columns: the same whatever read them, numbered, shared when rare, or hashed."""

import gzip
import io
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import ConfigError, DataError
from comera.recipes.data.cache import RESUME, Progress
from comera.recipes.dlrm.criteo import KAGGLE_TABLES, ClickData, CriteoConfig, preparation, prepare
from comera.recipes.dlrm.criteo import columns as criteo_columns
from comera.recipes.dlrm.criteo import columns as criteo_ids
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo.batches import PARTS
from comera.recipes.dlrm.criteo.columns import State, features
from comera.recipes.dlrm.criteo.rows import CUT_SHORT, KINDS, LABEL, Place

from ...helpers.click_rows import (
    ROWS,
    assert_same_rows,
    contents,
    lines_of,
    naive,
    read,
    small_blocks,
    spoil,
    spoiled,
    write,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClickData:
    """ROWS, read by one process in a single block."""
    return read(write(tmp_path_factory.mktemp("reference") / "train.txt", ROWS), workers=1)


def test_columns_are_what_a_naive_reader_makes(reference: ClickData) -> None:
    rows = [naive(line) for line in lines_of(ROWS).split(b"\n")[:-1]]
    parts = [reference.batch(part, 0, 10_000) for part in ("train", "validation", "test")]
    labels, dense, ids = (np.concatenate([p[k].numpy() for p in parts]) for k in (2, 0, 1))
    assert [(int(label), d.tolist()) for label, d in zip(labels, dense, strict=True)] == [row[:2] for row in rows]
    for feature in range(26):
        seen: dict[int, int] = {}
        assert ids[:, feature].tolist() == [seen.setdefault(row[2][feature], len(seen) + 1) for row in rows]
        assert reference.table_sizes[feature] == len(seen) + 1
    manifest = reference.manifest
    assert manifest["click_rate"]["train"] == reference.click_rate == labels[: len(reference.train)].mean()
    assert manifest["rows"] == len(reference) == len(ROWS)
    assert reference.bad == {}


def test_parts_are_in_the_order_of_time(reference: ClickData) -> None:
    assert (reference.train, reference.validation, reference.test) == (
        range(1286),
        range(1286, 1393),
        range(1393, 1500),
    )


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("form", ["plain", "gz", "days"])
def test_workers_blocks_and_compression_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: ClickData, workers: int, form: str
) -> None:
    small_blocks(monkeypatch, size=4096 * workers)
    text, path = lines_of(ROWS), tmp_path / "log"
    if form == "days":
        path.mkdir()
        write(path / "day_0", ROWS[:700])
        (path / "day_1.gz").write_bytes(gzip.compress(lines_of(ROWS[700:])[:-1]))
    else:
        path.write_bytes(gzip.compress(text) if form == "gz" else text)
    assert contents(read(path, workers=workers).folder) == contents(reference.folder)


def test_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "train.txt", ROWS[:100])
    config = CriteoConfig(path=str(path), cache=str(tmp_path / "cache"))
    first = prepare(config)
    assert "clicks: 86 train, 7 validation, 7 test" in capsys.readouterr().err
    monkeypatch.setattr(preparation, "_write", None)
    assert prepare(config).folder == first.folder
    assert read(path, workers=3, shuffle=False, max_bad_rows=0).folder == first.folder  # none of these matters
    assert capsys.readouterr().err == ""


class Terminal(io.StringIO):
    """A stderr that people look at."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    path = write(tmp_path / "train.txt", ROWS)
    ticks, to, terminal = [], Progress.to, Terminal()

    def noted(bar: Progress, done: int, rows: int | None = None) -> None:
        ticks.append((done, rows))
        to(bar, done, rows)

    monkeypatch.setattr(Progress, "to", noted)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    prepare(CriteoConfig(path=str(path), cache=str(tmp_path / "cache"), workers=1))
    assert len(ticks) > 10
    assert ticks == sorted(ticks)
    assert ticks[-1] == (path.stat().st_size, len(ROWS))
    for text in ("reading the click log", "categories to ids", "100%", "clicks: 1,286 train"):
        assert text in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := Terminal())
    prepare(CriteoConfig(path=str(path), cache=str(tmp_path / "cache"), max_rows=100), quiet=True)
    assert quiet.getvalue() == ""


def test_other_settings_or_files_are_other_data(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", ROWS[:100])
    folders = {read(path, **fields).folder for fields in ({}, {"min_count": 2}, {"max_rows": 50})}
    folders |= {read(path, table_sizes=sizes).folder for sizes in ("kaggle", (7,) * 26)}
    folders.add(read(write(path, ROWS[:101])).folder)
    assert len(folders) == 6


def test_damaged_columns_are_made_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", ROWS[:100])
    data = read(path)
    before = contents(data.folder)
    for name in ("label.bin", "dense.bin", "C07.ids.bin", "manifest.json"):
        (data.folder / name).write_bytes((data.folder / name).read_bytes()[:-1])
        assert contents(read(path).folder) == before


def test_first_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    rows = [spoil(row, rng.choice(KINDS), rng) if k % 5 == 4 else row for k, row in enumerate(ROWS[:400])]
    whole = read(write(tmp_path / "part.txt", rows[:124]))  # 100 good ones, then a bad one
    results = []
    for size in (2**21, 4096):
        small_blocks(monkeypatch, size)
        data = read(write(tmp_path / f"train{size}.txt", rows), max_rows=100)
        results.append(data.bad)
        assert_same_rows(data, whole)
    assert results == [whole.bad] * 2


def test_a_frequency_threshold(tmp_path: Path) -> None:
    data = read(write(tmp_path / "train.txt", ROWS), min_count=20)
    ids = np.concatenate([batch.ids.numpy() for part in PARTS for batch in data.batches(part, 999)])
    rows = [naive(line) for line in lines_of(ROWS).split(b"\n")[:-1]]
    for feature in range(26):
        values = [row[2][feature] for row in rows]
        counts, seen = Counter(values[: len(data.train)]), {}  # rows that training does not see are not counted
        for value, given in zip(values, ids[:, feature].tolist(), strict=True):
            rare = counts[value] < 20 and value != 0
            assert given == (0 if rare else seen.setdefault(value, len(seen) + 1))
        assert data.table_sizes[feature] == len(seen) + 1 < len(counts)


def test_hashing_into_the_full_tables(tmp_path: Path) -> None:
    data = read(write(tmp_path / "train.txt", ROWS), table_sizes="kaggle")
    assert data.table_sizes == KAGGLE_TABLES
    assert sum(KAGGLE_TABLES) == 33_762_577
    values = np.array([row[2] for row in (naive(line) for line in lines_of(ROWS).split(b"\n")[:-1])])
    ids = data.batch("train", 0, 10_000).ids.numpy()
    for feature, size in enumerate(KAGGLE_TABLES):
        column = values[: len(ids), feature]
        np.testing.assert_array_equal(ids[:, feature], np.where(column == 0, 0, 1 + column % (size - 1)))


# The configuration.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"table_sizes": "large"}, r'data\.table_sizes must be "appearance", "kaggle" or 26 sizes .*\'large\''),
        ({"table_sizes": (5,) * 25}, r"data\.table_sizes must be "),
        ({"table_sizes": (0, *(5,) * 25)}, r"data\.table_sizes must be "),
        ({"table_sizes": (2**31, *(5,) * 25)}, r"data\.table_sizes must be "),
        ({"min_count": 0}, r"data\.min_count must be a number >= 1"),
        ({"min_count": 2, "table_sizes": "kaggle"}, r"data\.min_count must be .* unless table_sizes=appearance"),
        ({"max_rows": 13}, r"data\.max_rows must be at least 14 rows"),
        ({"max_bad_rows": -1}, r"data\.max_bad_rows must be "),
        ({"synthetic_rows": 3}, r"data\.synthetic_rows must be at least 14"),
        ({"synthetic_seed": -1}, r"data\.synthetic_seed must be "),
        ({"workers": 0}, r"data\.workers must be "),
    ],
)
def test_wrong_settings(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CriteoConfig(**fields)


def test_a_list_of_sizes_is_as_good_as_a_tuple() -> None:
    assert CriteoConfig(table_sizes=[3] * 26).hashed_sizes == (3,) * 26  # type: ignore[arg-type]


# --- bad rows: skipped and counted up to a limit ----------------------------------------------------------------------


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


# --- killed, interrupted or out of space ------------------------------------------------------------------------------


KILLED = """
import os, pathlib, signal, sys
from comera.recipes.dlrm.criteo import preparation
from comera.recipes.dlrm.criteo import columns as criteo_columns
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo import CriteoConfig, prepare
name, calls, path, cache = sys.argv[1:]
criteo_files.BLOCK = criteo_columns.BLOCK = 8192
criteo_columns.CHECKPOINT = 3
owner = {"append": criteo_columns.Columns, "make_ids": preparation, "rename": pathlib.Path}[name]
whole, left = getattr(owner, name), int(calls)
def killed(*args, **kwargs):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args, **kwargs)
setattr(owner, name, killed)
prepare(CriteoConfig(path=path, cache=cache, workers=2), quiet=True)
"""


@pytest.mark.parametrize(("name", "calls"), [("append", 20), ("make_ids", 9)])
def test_a_killed_preparation_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: ClickData, name: str, calls: int
) -> None:
    path, cache = write(tmp_path / "train.txt", ROWS), tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, name, str(calls), str(path), str(cache)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (parts,) = cache.glob("*.partial")
    state = State.load(parts)
    assert state is not None
    if name == "append":
        assert 0 < state.rows < len(ROWS)
    else:
        assert (state.rows, state.complete) == (len(ROWS), True)
        assert len(list(parts.glob("*.ids.bin"))) >= 7
    assert not (cache / parts.stem).exists()  # nothing that looks complete
    places, made = [], []
    read_blocks, make_ids = criteo_files.read_blocks, criteo_ids.make_ids
    monkeypatch.setattr(criteo_columns, "read_blocks", lambda f, p: places.append(p) or read_blocks(f, p))
    monkeypatch.setattr(preparation, "make_ids", lambda *a, **k: made.append(a) or make_ids(*a, **k))
    assert contents(read(path).folder) == contents(reference.folder)
    assert places == ([state.place] if name == "append" else [])
    assert len(made) == 26 - (0 if name == "append" else len(features()) - len(made))
    assert sorted(file.suffix for file in cache.iterdir()) == ["", ".lock"]


def test_killed_while_the_folder_has_no_name_yet(tmp_path: Path, reference: ClickData) -> None:
    path, cache = write(tmp_path / "train.txt", ROWS), tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, "rename", "0", str(path), str(cache)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert sorted(file.suffix for file in cache.iterdir()) == [".lock", ".partial"]
    data = read(path)
    assert contents(data.folder) == contents(reference.folder)
    assert sorted(file.suffix for file in cache.iterdir()) == ["", ".lock"]


class Stopped(BaseException):
    """As a keyboard interrupt, which pytest keeps for itself."""


@pytest.mark.parametrize("form", ["plain", "gz"])
@pytest.mark.parametrize("workers", [1, 2])
def test_stopped_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: ClickData, workers: int, form: str
) -> None:
    small_blocks(monkeypatch, size=32_768, checkpoint=2)
    path, whole, calls = tmp_path / "train.txt", criteo_columns.Columns.append, []
    rows = spoiled(LABEL, 5)
    path.write_bytes(gzip.compress(lines_of(rows)) if form == "gz" else lines_of(rows))

    def stopped(*args: Any) -> None:
        calls.append(args)
        whole(*args)
        if len(calls) % 4 == 0:
            raise Stopped

    monkeypatch.setattr(criteo_columns.Columns, "append", stopped)
    for _ in range(30):
        try:
            data = read(path, workers=workers)
            break
        except Stopped:
            assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".partial"]
    assert len(calls) > 12
    assert data.bad == {LABEL: 5}
    assert_same_rows(data, reference)


@pytest.mark.parametrize("damage", ["state", "column", "missing"])
def test_damaged_parts_are_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: ClickData, damage: str
) -> None:
    path = write(tmp_path / "train.txt", ROWS)
    monkeypatch.setattr(preparation, "_make_ids", _raise)
    with pytest.raises(Stopped):
        read(path)
    monkeypatch.undo()
    (parts,) = (tmp_path / "cache").glob("*.partial")
    if damage == "state":
        (parts / RESUME).write_text('{"rows": 5}')
        (parts / "label.bin").unlink()
    elif damage == "column":
        (parts / "C03.raw").write_bytes(b"123")
    else:
        (parts / "dense.bin").unlink()
    assert contents(read(path).folder) == contents(reference.folder)


def test_threads_parse_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """np.load parses the header of a file with ast, which fails now and then where several threads of Python up to
    3.11.7 and 3.12.1 do: SystemError: AST constructor recursion depth mismatch."""
    path, load, ids, loads = write(tmp_path / "train.txt", ROWS), np.load, preparation.make_ids, []

    def in_main_thread(*args: Any, **options: Any) -> Any:
        loads.append(args)
        assert threading.current_thread() is threading.main_thread()
        return load(*args, **options)

    def but_one(raw: Path, folder: Path, name: str, **options: Any) -> int:
        if name == "C26":
            raise Stopped
        return ids(raw, folder, name, **options)

    monkeypatch.setattr(np, "load", in_main_thread)
    monkeypatch.setattr(preparation, "make_ids", but_one)
    with pytest.raises(Stopped):  # with 25 columns that the next call finds made
        read(path, workers=2, min_count=2)
    monkeypatch.setattr(preparation, "make_ids", ids)
    data = read(path, workers=2, min_count=2)
    other = write(tmp_path / "other.txt", ROWS)
    assert loads
    assert contents(data.folder) == contents(read(other, workers=1, min_count=2).folder)


def _raise(*_: Any) -> None:
    raise Stopped


def test_a_full_disk_is_an_error_that_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "train.txt", ROWS[:100])
    monkeypatch.setattr(criteo_columns.Columns, "append", full)
    with pytest.raises(ConfigError, match=r"data\.cache: .* 160 bytes a row .*No space left.*: make room .* is kept"):
        read(path)
    assert sorted(file.suffix for file in (tmp_path / "cache").iterdir()) == [".lock", ".partial"]


def test_a_place_survives_its_file(tmp_path: Path) -> None:
    for name in criteo_columns.ROW_BYTES:
        (tmp_path / name).touch()
    state = State(Place(1, 2, 3), bad={LABEL: 2}, shown={LABEL: ["here"]})
    state.save(tmp_path)
    assert State.load(tmp_path) == state
    shutil.rmtree(tmp_path)
    assert State.load(tmp_path) is None
