"""Criteo's files → prepared columns: the same whatever read them, numbered, shared when rare, or hashed."""

from __future__ import annotations

import gzip
import io
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import ConfigError
from comera.recipes.data.cache import Progress
from comera.recipes.dlrm.criteo import KAGGLE_TABLES, ClickData, CriteoConfig, preparation, prepare
from comera.recipes.dlrm.criteo.batches import PARTS
from comera.recipes.dlrm.criteo.rows import KINDS

from ...helpers.click_rows import ROWS, assert_same_rows, contents, lines_of, naive, read, small_blocks, spoil, write


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
