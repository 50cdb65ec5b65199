"""Criteo's rows → numbers: exactly what a parser that takes one field at a time makes of them, good rows and bad."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

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
