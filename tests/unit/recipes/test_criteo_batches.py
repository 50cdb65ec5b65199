"""Batches of prepared clicks: pure functions of their place, every row once an epoch; and later rows encoded alike."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from comera.errors import DataError
from comera.recipes.dlrm.criteo import ClickBatch, ClickData, CriteoConfig, RowEncoder, prepare
from comera.recipes.dlrm.criteo import batches as criteo_batches
from comera.recipes.dlrm.criteo.rows import CriteoRows
from comera.recipes.dlrm.criteo.synthetic import ClickLog

from ...helpers.click_rows import ROWS, lines_of, read, write


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("clicks") / "train.txt", ROWS)


@pytest.fixture(params=[True, False], ids=["shuffled", "in order"])
def data(path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ClickData:
    monkeypatch.setattr(criteo_batches, "RUN", 50)
    monkeypatch.setattr(criteo_batches, "POOL", 4)
    criteo_batches._epoch.cache_clear()
    criteo_batches._pool.cache_clear()
    return read(path, shuffle=request.param)


def keys(batch: ClickBatch) -> list[bytes]:
    """What identifies a row."""
    arrays = [batch.dense.numpy(), batch.ids.numpy().astype(np.int32), batch.labels.numpy()]
    return [b"".join(array[k].tobytes() for array in arrays) for k in range(len(batch.labels))]


def encode(data: ClickData, rows: list[list[str]], labeled: bool = True) -> ClickBatch:
    return RowEncoder(data.folder).encode_rows(CriteoRows(labeled).parse(lines_of(rows)), slice(None), labeled)


def assert_equal(left: ClickBatch, right: ClickBatch) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def test_form(data: ClickData) -> None:
    for batch in (data.train_batch(0, 7, 0), data.batch("test", 0, 7), encode(data, ROWS[:7])):
        assert (batch.dense.shape, batch.dense.dtype) == ((7, 13), torch.float32)
        assert (batch.ids.shape, batch.ids.dtype) == ((7, 26), torch.int64)
        assert (batch.labels.shape, batch.labels.dtype) == ((7,), torch.float32)
        assert batch.ids[:, 3].is_contiguous()
        assert batch.dense.is_contiguous()
        batch.dense.add_(1)  # the prepared data are not written to
    assert_equal(data.batch("test", 0, 7), data.batch("test", 0, 7))


@pytest.mark.parametrize("size", [1, 7, 64, 500, 1286])
def test_an_epoch_has_each_row_once(data: ClickData, size: int) -> None:
    steps = data.steps_per_epoch(size)
    assert steps == -(-1286 // size)
    rows = [key for index in range(2 * steps + 1) for key in keys(data.train_batch(index, size, seed=3))]
    everything = Counter(key for batch in data.batches("train", 10_000) for key in keys(batch))
    assert sum(everything.values()) == 1286
    if data.shuffle and size < 1286:  # a batch is sorted; the epoch ends within one
        whole = steps - (1286 % size > 0)
        assert not Counter(rows[: whole * size]) - everything
    else:
        assert Counter(rows[:1286]) == everything
        assert Counter(rows[1286:2572]) == everything


@pytest.mark.parametrize("size", [1286, 643, 2])
def test_shuffled_epochs_differ_and_are_complete(path: Path, size: int) -> None:
    data = read(path)
    everything = Counter(key for batch in data.batches("train", 10_000) for key in keys(batch))
    steps = data.steps_per_epoch(size)
    epochs = [
        [key for k in range(steps) for key in keys(data.train_batch(epoch * steps + k, size, 0))] for epoch in range(3)
    ]
    assert [Counter(epoch) for epoch in epochs] == [everything] * 3
    if size < 1286:
        assert epochs[0] != epochs[1] != epochs[2]


def test_batches_are_pure_functions_of_their_place(data: ClickData) -> None:
    first = [data.train_batch(index, 100, seed=5) for index in range(40)]
    for index in (39, 0, 17, 13, 12):
        assert_equal(data.train_batch(index, 100, seed=5), first[index])
    other = data.train_batch(0, 100, seed=6)
    assert torch.equal(other.ids, first[0].ids) != data.shuffle


def test_a_batch_may_be_larger_than_the_data(data: ClickData) -> None:
    counts = Counter(keys(data.train_batch(1, 3000, seed=0)))
    assert sum(counts.values()) == 3000
    assert len(counts) == len({key for batch in data.batches("train", 999) for key in keys(batch)})
    assert data.steps_per_epoch(3000) == 1
    assert data.steps_per_epoch(100, processes=3) == 5


def test_in_order_the_first_batch_is_the_oldest(path: Path) -> None:
    assert_equal(read(path, shuffle=False).train_batch(2, 50, 0), read(path).batch("train", 2, 50))


def test_shuffling_reads_from_few_places_and_reaches_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criteo_batches, "RUN", 100)
    monkeypatch.setattr(criteo_batches, "POOL", 5)
    for function in (criteo_batches._epoch, criteo_batches._pool):
        function.cache_clear()
    rows, size = 12_345, 100
    batches = [criteo_batches._shuffled(rows, index * size, size, seed=1) for index in range(123)]
    assert sorted(np.concatenate(batches).tolist() + criteo_batches._shuffled(rows, 12_300, 45, 1).tolist()) == list(
        range(rows)
    )
    places = [len(np.unique(batch // 100)) for batch in batches]
    assert max(places) <= 2 * 2 * 5  # two pools at a joint, each run over a boundary of hundreds
    assert np.std([batch.mean() for batch in batches]) > 0.1 * rows  # pools from all over the time
    assert all((np.diff(batch) > 0).all() for batch in batches)


def test_parts_in_batches(data: ClickData) -> None:
    assert data.batch_count("validation", 20) == 6
    sizes = [len(batch.labels) for batch in data.batches("validation", 20)]
    assert sizes == [20] * 5 + [7]
    for part, index in (("test", 6), ("test", -1), ("train", 65)):
        with pytest.raises(DataError, match=rf"{part}: expected a batch from 0 to \d+, got {index}"):
            data.batch(part, index, 20)
    with pytest.raises(DataError, match="expected a part of the data, one of train, validation, test, got 'dev'"):
        data.batch("dev", 0, 20)


# Rows that come later.


@pytest.mark.parametrize(
    "fields", [{}, {"min_count": 5}, {"table_sizes": "kaggle"}, {"table_sizes": (1, 2, 3, *(50,) * 23)}]
)
def test_the_same_rows_get_the_same_ids(path: Path, fields: dict[str, Any]) -> None:
    data = read(path, **fields)
    whole = [
        torch.cat(tensors)
        for tensors in zip(*(b for p in criteo_batches.PARTS for b in data.batches(p, 300)), strict=True)
    ]
    for tensor, expected in zip(encode(data, ROWS), whole, strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("table_sizes", ["appearance", "kaggle"])
def test_unknown_categories(path: Path, table_sizes: Any) -> None:
    data = read(path, table_sizes=table_sizes)
    row = [*ROWS[0][:14], *["fedcba98"] * 26]
    batch = encode(data, [row])
    expected = [0] * 26 if table_sizes == "appearance" else [1 + 0xFEDCBA98 % (size - 1) for size in data.table_sizes]
    assert batch.ids[0].tolist() == expected


def test_rows_without_labels(path: Path) -> None:
    data = read(path)
    batch = encode(data, [row[1:] for row in ROWS[:5]], labeled=False)
    labeled = encode(data, ROWS[:5])
    assert torch.isnan(batch.labels).all()
    assert torch.equal(batch.ids, labeled.ids)
    assert torch.equal(batch.dense, labeled.dense)


def test_an_encoder_needs_prepared_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected prepared click data in .*: prepare the same files"):
        RowEncoder(tmp_path)


# Without data.


@pytest.mark.parametrize("source", [None, "synthetic"])
def test_a_synthetic_log(tmp_path: Path, source: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    config = CriteoConfig(path=source, synthetic_rows=5000, synthetic_seed=3, cache=str(tmp_path / "cache"))
    data = prepare(config)
    written = read(ClickLog(3).write(tmp_path / "train.txt", 5000))
    assert (len(data), data.table_sizes) == (5000, written.table_sizes)
    for part in criteo_batches.PARTS:
        assert_equal(data.batch(part, 0, 10_000), written.batch(part, 0, 10_000))
    planted = data.manifest["planted"]
    assert planted["seed"] == 3
    assert all(0.3 < planted["loss"][part] < 0.6 for part in criteo_batches.PARTS)
    assert f"of the planted model: {planted['loss']['train']:.4f} train, " in capsys.readouterr().err
    assert data.click_rate == pytest.approx(0.256, abs=0.03)
    assert written.manifest["planted"] is None


def test_first_rows_of_a_synthetic_log(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"cache": str(tmp_path / "cache"), "table_sizes": (9,) * 26}
    short = prepare(CriteoConfig(synthetic_rows=5000, max_rows=700, **fields), quiet=True)
    long = prepare(CriteoConfig(synthetic_rows=700, **fields), quiet=True)
    assert short.folder != long.folder
    assert_equal(short.batch("train", 0, 999), long.batch("train", 0, 999))
