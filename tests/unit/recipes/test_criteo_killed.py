"""A preparation of Criteo's files killed, interrupted or out of space: resumed, and never taken for complete."""

from __future__ import annotations

import gzip
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comera.errors import ConfigError
from comera.recipes.data.cache import RESUME
from comera.recipes.dlrm.criteo import ClickData, preparation
from comera.recipes.dlrm.criteo import columns as criteo_columns
from comera.recipes.dlrm.criteo import columns as criteo_ids
from comera.recipes.dlrm.criteo import rows as criteo_files
from comera.recipes.dlrm.criteo.columns import State, features
from comera.recipes.dlrm.criteo.rows import LABEL, Place

from ...helpers.click_rows import ROWS, assert_same_rows, contents, lines_of, read, small_blocks, spoiled, write

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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ClickData:
    """ROWS, read by one process in a single block."""
    return read(write(tmp_path_factory.mktemp("reference") / "train.txt", ROWS), workers=1)


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
