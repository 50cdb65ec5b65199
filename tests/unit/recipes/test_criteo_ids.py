"""Values → ids: numbered as a dict would number them, rare ones shared, or hashed; and looked up again later."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from comera.recipes.dlrm.criteo import columns as criteo_ids
from comera.recipes.dlrm.criteo.columns import IDS, TABLE, VALUES, Lookup, hashed, make_ids


def values_of(count: int, kinds: int, seed: int = 0) -> np.ndarray:
    """Values with frequencies about 1/k, the missing one among them, and the extremes."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 2**32, kinds, dtype=np.uint32)
    names[: min(3, kinds)] = [2**32 - 1, 0, 1][:kinds]
    return names[np.minimum(kinds ** rng.random(count), kinds - 1).astype(int)]


def numbered(values: np.ndarray) -> list[int]:
    seen: dict[int, int] = {}
    return [seen.setdefault(value, len(seen) + 1) for value in values.tolist()]


def make(
    folder: Path, values: np.ndarray, size: int | None = None, min_count: int = 1, training: int | None = None
) -> tuple[np.ndarray, int]:
    values.tofile(folder / "raw")
    training = len(values) if training is None else training
    size = make_ids(folder / "raw", folder, "C", size=size, min_count=min_count, training=training)
    return np.fromfile(folder / f"C.{IDS}", np.int32), size


@pytest.mark.parametrize(
    ("count", "kinds", "piece"), [(1, 1, 1), (50, 3, 7), (20_000, 9_000, 3_000), (20_000, 50, 999)]
)
def test_numbers_are_those_of_a_dict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, kinds: int, piece: int
) -> None:
    monkeypatch.setattr(criteo_ids, "CHUNK", piece)
    values = values_of(count, kinds)
    ids, size = make(tmp_path, values)
    assert ids.tolist() == numbered(values)
    assert size == len(set(values.tolist())) + 1
    assert not Lookup(tmp_path, "C", size, False)(np.setdiff1d(np.arange(100, dtype=np.uint32), values)).any()


@pytest.mark.parametrize("piece", [64, 1000, 2**18])
@pytest.mark.parametrize(("min_count", "training"), [(1, 5000), (2, 5000), (2, 3001), (5, 3001), (10**6, 5000)])
def test_rare_values_share_one_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_count: int, training: int, piece: int
) -> None:
    monkeypatch.setattr(criteo_ids, "CHUNK", piece)
    values = values_of(5000, 900)
    ids, size = make(tmp_path, values, min_count=min_count, training=training)
    counts = Counter(values[:training].tolist())
    seen: dict[int, int] = {}
    expected = [
        seen.setdefault(value, len(seen) + 1) if counts[value] >= min_count or value == 0 else 0
        for value in values.tolist()
    ]
    assert ids.tolist() == expected
    assert size == len(seen) + 1
    assert np.load(tmp_path / f"C.{VALUES}").tolist() == sorted(seen)
    assert np.load(tmp_path / f"C.{TABLE}").tolist() == [seen[value] for value in sorted(seen)]


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 10_131_227, 2**31 - 1])
def test_hashing_stays_inside_its_table(tmp_path: Path, size: int) -> None:
    values = values_of(5000, 900)
    ids, made = make(tmp_path, values, size=size)
    assert made == size
    assert ids.tolist() == [0 if value == 0 or size == 1 else 1 + value % (size - 1) for value in values.tolist()]
    assert ids.min() >= 0
    assert ids.max() < size
    assert not (tmp_path / f"C.{VALUES}").exists()
    np.testing.assert_array_equal(Lookup(tmp_path, "C", size, True)(values), ids)


def test_hashing_fills_a_table() -> None:
    ids = hashed(np.random.default_rng(0).integers(1, 2**32, 100_000, dtype=np.uint32), 1000)
    assert len(np.unique(ids)) == 999


@pytest.mark.parametrize("min_count", [1, 3])
def test_lookup_gives_known_values_their_ids_and_others_0(tmp_path: Path, min_count: int) -> None:
    values = values_of(3000, 500)
    ids, size = make(tmp_path, values, min_count=min_count)
    lookup = Lookup(tmp_path, "C", size, False)
    np.testing.assert_array_equal(lookup(values), ids)
    unknown = np.setdiff1d(np.array(random.Random(0).sample(range(2**32), 1000), np.uint32), values)
    assert not lookup(unknown).any()


def test_a_table_without_values(tmp_path: Path) -> None:
    ids, size = make(tmp_path, np.array([5, 6, 7], np.uint32), min_count=2)
    assert (ids.tolist(), size) == ([0, 0, 0], 1)
    assert Lookup(tmp_path, "C", size, False)(np.array([5, 0], np.uint32)).tolist() == [0, 0]


def test_ids_take_their_name_when_they_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(criteo_ids.np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, values_of(100, 10))
    assert not (tmp_path / f"C.{IDS}").exists()
