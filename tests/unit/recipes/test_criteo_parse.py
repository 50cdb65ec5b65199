"""Criteo's rows → numbers: exactly what a parser that takes one field at a time makes of them, good rows and bad."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comera.recipes.dlrm.criteo import columns as criteo_ids
from comera.recipes.dlrm.criteo.columns import IDS, TABLE, VALUES, Lookup, hashed, make_ids
from comera.recipes.dlrm.criteo.rows import KINDS, CriteoRows, Rows, log_integers

from ...helpers.click_rows import BAD_FIELDS, good_rows, lines_of, naive, random_row, spoil


def assert_as_naive(text: bytes, labeled: bool = True) -> Rows:
    rows = CriteoRows(labeled).parse(text)
    lines = text.split(b"\n")[:-1]
    results = [naive(line, labeled) for line in lines]
    good = [result for result in results if not isinstance(result, str)]
    assert rows.lines == len(lines)
    assert rows.labels.tolist() == [label for label, _, _ in good]
    assert rows.dense.T.tolist() == [dense for _, dense, _ in good]
    assert rows.values.T.tolist() == [values for _, _, values in good]
    bad = [(number, result) for number, result in enumerate(results) if isinstance(result, str)]
    assert [(each.place, each.kind) for each in rows.bad] == bad
    assert rows.places.tolist() == [number for number, result in enumerate(results) if not isinstance(result, str)]
    assert rows.labels.dtype == np.uint8
    assert rows.dense.dtype == np.float32
    assert rows.values.dtype == np.uint32
    return rows


def test_good_rows() -> None:
    rows = assert_as_naive(lines_of(good_rows(700)))
    assert len(rows.labels) == 700
    assert set(rows.labels.tolist()) == {0, 1}


@pytest.mark.parametrize("kind", KINDS)
def test_bad_rows_are_skipped_and_named(kind: str) -> None:
    rng = random.Random(KINDS.index(kind))
    rows = [spoil(row, kind, rng) if rng.random() < 0.3 else row for row in good_rows(300)]
    text = lines_of(rows)
    parsed = assert_as_naive(text)
    assert 50 < len(parsed.bad) < 150
    assert {each.kind for each in parsed.bad} == {kind}
    assert all("expected" in each.mistake for each in parsed.bad)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in BAD_FIELDS for field in BAD_FIELDS[kind]])
def test_every_bad_field(kind: str, field: str) -> None:
    place = {KINDS[2]: 0, KINDS[3]: 13, KINDS[4]: 39}[kind]
    row = good_rows(1)[0]
    row[place] = field
    rows = assert_as_naive(lines_of([row, *good_rows(1, seed=1)]))
    assert [each.kind for each in rows.bad] == [kind]
    assert len(rows.labels) == 1


def test_the_first_mistake_in_a_row_counts() -> None:
    row = good_rows(1)[0]
    row[0], row[5], row[20] = "x", "y", "z"
    assert [each.kind for each in assert_as_naive(lines_of([row])).bad] == [KINDS[2]]


@settings(deadline=None, max_examples=60)
@example(255842, False)  # one row without a field: nothing but the end of a line
@given(st.integers(0, 2**32), st.booleans())
def test_any_mixture_of_rows(seed: int, labeled: bool) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(rng.randrange(12))]
    rows = [spoil(row, rng.choice(KINDS), rng) if rng.random() < 0.4 else row for row in rows]
    text = bytearray(lines_of(rows, rng.choice(["\n", "\r\n"])))
    for _ in range(rng.randrange(4) if len(text) > 1 else 0):  # any byte anywhere but at the end, separators too
        text[rng.randrange(len(text) - 1)] = rng.choice([9, 10, 13, 0, 45, 48, 97, 255, rng.randrange(256)])
    assert_as_naive(bytes(text), labeled)


@settings(deadline=None, max_examples=100)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_any_integer_and_any_category(integer: int, value: int, digits: int) -> None:
    row = good_rows(1)[0]
    row[4], row[17] = str(integer), f"{value % 16**digits:0{digits}x}"
    rows = assert_as_naive(lines_of([row]))
    assert rows.values[3, 0] == value % 16**digits


def test_windows_line_ends_change_nothing() -> None:
    rows = good_rows(50)
    rows[3][-1] = rows[7][-1] = ""  # an empty last field has only the carriage return
    plain, windows = CriteoRows().parse(lines_of(rows)), CriteoRows().parse(lines_of(rows, "\r\n"))
    for name in ("labels", "dense", "values"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(windows, name))
    assert not windows.bad


def test_rows_without_a_label() -> None:
    rows = assert_as_naive(lines_of([row[1:] for row in good_rows(20)]), labeled=False)
    assert len(rows.labels) == 20
    assert len(assert_as_naive(lines_of(good_rows(20)), labeled=False).labels) == 0


@pytest.mark.parametrize("text", [b"", b"\n", b"\n\n\n", b"\r\n", b"\t" * 39 + b"\n", b"1" + b"\t" * 39 + b"\n"])
def test_hardly_any_text(text: bytes) -> None:
    assert_as_naive(text)


def test_empty_fields_are_zero() -> None:
    rows = CriteoRows().parse(b"1" + b"\t" * 39 + b"\n")
    assert rows.labels.tolist() == [1]
    assert not rows.dense.any()
    assert not rows.values.any()


def test_logarithms_are_those_of_double_precision() -> None:
    integers = np.array([-5, 0, 1, 16_777_217, 2**31 - 1])
    np.testing.assert_array_equal(log_integers(integers), np.log1p(np.maximum(integers, 0)).astype(np.float32))


def mistake_in(row: list[str]) -> str:
    (bad,) = CriteoRows().parse(lines_of([row])).bad
    return bad.mistake


def test_an_explanation_names_field_and_content() -> None:
    row = good_rows(1)[0]
    row[16] = "nothex"
    assert mistake_in(row) == "expected up to 8 hexadecimal digits as category 3, got 'nothex'"
    row[2] = "1.5"
    assert mistake_in(row) == "expected a decimal integer of 32 bits as integer 2, got '1.5'"
    assert "expected 40 fields between tabs, got 39" in mistake_in(row[1:])


# --- values as ids: numbered, shared when rare, or hashed -------------------------------------------------------------


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
    assert not Lookup.load(tmp_path, "C", size, False)(np.setdiff1d(np.arange(100, dtype=np.uint32), values)).any()


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
    np.testing.assert_array_equal(Lookup.load(tmp_path, "C", size, True)(values), ids)


def test_hashing_fills_a_table() -> None:
    ids = hashed(np.random.default_rng(0).integers(1, 2**32, 100_000, dtype=np.uint32), 1000)
    assert len(np.unique(ids)) == 999


@pytest.mark.parametrize("min_count", [1, 3])
def test_lookup_gives_known_values_their_ids_and_others_0(tmp_path: Path, min_count: int) -> None:
    values = values_of(3000, 500)
    ids, size = make(tmp_path, values, min_count=min_count)
    lookup = Lookup.load(tmp_path, "C", size, False)
    np.testing.assert_array_equal(lookup(values), ids)
    unknown = np.setdiff1d(np.array(random.Random(0).sample(range(2**32), 1000), np.uint32), values)
    assert not lookup(unknown).any()


def test_a_table_without_values(tmp_path: Path) -> None:
    ids, size = make(tmp_path, np.array([5, 6, 7], np.uint32), min_count=2)
    assert (ids.tolist(), size) == ([0, 0, 0], 1)
    assert Lookup.load(tmp_path, "C", size, False)(np.array([5, 0], np.uint32)).tolist() == [0, 0]


def test_ids_take_their_name_when_they_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(criteo_ids.np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, values_of(100, 10))
    assert not (tmp_path / f"C.{IDS}").exists()
