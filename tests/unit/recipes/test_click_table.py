"""Clicks in a table of one's own: CSV and TSV become the same columns as Criteo's format, bad rows are counted."""

import csv
import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comera.errors import ConfigError, DataError
from comera.recipes.dlrm.criteo import ClickData, CriteoConfig, prepare
from comera.recipes.dlrm.criteo.config import CATEGORIES, INTEGERS
from comera.recipes.dlrm.criteo.rows import open_table
from comera.recipes.dlrm.criteo.synthetic import ClickLog

ROWS = 120
COLUMNS = {"label": "clicked", "numbers": ("age", "price"), "categories": ("city", "site")}


def table(rows: int = ROWS, delimiter: str = ",") -> str:
    lines = [["price", "city", "clicked", "unused", "site", "age"]]
    for k in range(rows):
        city = ["Ulm", '"Bad Tölz, 1"' if delimiter == "," else "Bad Tölz, 1", ""][k % 3]
        lines.append([f"{k / 4 - 5}", city, str(k % 2), "x", f"s{k % 7}", "" if k % 5 == 0 else str(k)])
    return "".join(delimiter.join(line) + "\n" for line in lines)


def read(file: Path, **fields: Any) -> ClickData:
    config = CriteoConfig(path=str(file), cache=str(file.parent / "cache"), **(COLUMNS | fields))
    return prepare(config, quiet=True)


@pytest.fixture
def data(tmp_path: Path) -> ClickData:
    (tmp_path / "rows.csv").write_text(table())
    return read(tmp_path / "rows.csv")


def test_numbers_and_categories_have_their_roles(data: ClickData) -> None:
    batch = data.batch("train", 0, 12)
    assert (batch.dense.shape, batch.ids.shape) == ((12, 2), (12, 2))
    age = np.array([0 if k % 5 == 0 else k for k in range(12)])
    price = np.arange(12) / 4 - 5
    wanted = np.stack([np.log1p(age), np.sign(price) * np.log1p(np.abs(price))], 1)
    np.testing.assert_allclose(batch.dense.numpy(), wanted, rtol=1e-6)
    assert batch.labels.tolist() == [0, 1] * 6
    assert batch.ids[:, 0].tolist() == [1, 2, 3] * 4  # in order of appearance; an empty field is a category, too
    assert batch.ids[:, 1].tolist() == [1 + k % 7 for k in range(12)]
    assert data.table_sizes == (4, 8)
    assert data.rows == ROWS


@pytest.mark.parametrize("name", ["rows.csv.gz", "rows.tsv", "rows.tsv.gz"])
def test_every_form_of_a_table_gives_the_same_batches(data: ClickData, name: str, tmp_path: Path) -> None:
    text = table(delimiter="\t" if ".tsv" in name else ",").replace("\n", "\r\n").encode()
    text = b"\xef\xbb\xbf" + text
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    other = read(tmp_path / name)
    for ours, theirs in zip(data.batch("test", 0, 9), other.batch("test", 0, 9), strict=True):
        assert ours.equal(theirs)


def test_integers_become_what_criteos_become(tmp_path: Path) -> None:
    log = ClickLog(1).write(tmp_path / "train.txt", 60)
    names = ["y", *(f"i{k}" for k in range(INTEGERS)), *(f"c{k}" for k in range(CATEGORIES))]
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    rows = [[f if not f.startswith("-") else "0" for f in line[:14]] + line[14:] for line in lines]
    (tmp_path / "rows.csv").write_text("\n".join(map(",".join, [names, *rows])))
    columns = {"label": "y", "numbers": names[1:14], "categories": names[14:]}
    ours = read(tmp_path / "rows.csv", **columns)
    theirs = prepare(CriteoConfig(path=str(log), cache=str(tmp_path / "cache")), quiet=True)
    assert ours.table_sizes == theirs.table_sizes
    for one, two in zip(ours.batch("train", 0, 40), theirs.batch("train", 0, 40), strict=True):
        assert one.equal(two)


BAD = {
    "too few fields": ("1,Ulm,1", r"expected 6 fields as in the header, got 3"),
    "too many fields": ("1,Ulm,1,x,s,2,3", r"expected 6 fields as in the header, got 7"),
    "label other than 0 or 1": ("1,Ulm,2,x,s,2", "expected 0 or 1 as clicked, got '2'"),
    "unparsable number": ("1,Ulm,1,x,s,old", "expected a number as age, got 'old'"),
    "quotation marks that do not match": ('1,"Ulm,1,x,s,2', "expected fields between commas, got quotation marks"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_counted_and_one_too_many_is_named(kind: str, tmp_path: Path) -> None:
    lines = table().splitlines()
    lines.insert(40, BAD[kind][0])
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    assert read(tmp_path / "rows.csv").bad == {kind: 1}
    with pytest.raises(DataError, match=rf"rows\.csv, line 41: .*{BAD[kind][1]}") as raised:
        read(tmp_path / "rows.csv", max_bad_rows=0)
    assert "\n" not in str(raised.value)


def test_a_long_field_is_no_bad_row_whatever_else_has_run(tmp_path: Path) -> None:
    csv.field_size_limit(2**17)  # Python's own, which other readers of tables raise
    (tmp_path / "rows.csv").write_text(f"{table()}1,{'Ulm' * 60_000},1,x,s,2\n")
    assert read(tmp_path / "rows.csv").rows == ROWS + 1
    csv.field_size_limit(2**17)
    (tmp_path / "wide.csv").write_text(table().replace("unused", "unused" * 30_000))
    assert read(tmp_path / "wide.csv").rows == ROWS


def test_missing_labels_are_bad_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(table() + "1,Ulm,,x,s,2\n" + "1,Ulm,0.0,x,s,nan\n" + "1,Ulm,1.0,x,s, \n")
    data = read(tmp_path / "rows.csv")
    assert data.bad == {"label other than 0 or 1": 1, "unparsable number": 1}
    assert data.rows == ROWS + 1


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"numbers": (), "categories": ()}, ConfigError, r"to name columns, got .* columns price, city, clicked"),
        ({"label": "click"}, ConfigError, r"expected the columns 'click', got 'price', 'city', 'clicked', 'unused'"),
        ({"numbers": ("age", "size")}, ConfigError, r"expected the columns 'size', got 'price'.*: set data\.label"),
        ({"categories": ("city", "clicked")}, ConfigError, r"data\.categories must be columns that are neither"),
        ({"table_sizes": (5, 5, 5)}, ConfigError, "or 2 sizes from 1"),
        ({"table_sizes": "kaggle"}, ConfigError, "or 2 sizes from 1"),
    ],
)
def test_columns_that_are_not_there_are_one_line(
    fields: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text(table())
    with pytest.raises(error, match=message) as raised:
        read(tmp_path / "rows.csv", **fields)
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file"),
        (b"\n1,2\n", "line 1: expected a header with the names of the columns"),
        (table().replace("\n", "\r").encode(), r"rows\.csv, line 1: expected a header .* that ends in a newline"),
        (b"price,price,city,clicked,site,age\n", "expected columns of different names"),
        (table(rows=3).encode(), "expected at least 14 good rows.* got 3"),
        (table(rows=0).encode(), "expected at least 14 good rows.* got 0"),
    ],
)
def test_tables_without_rows_or_header_are_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "rows.csv")


def test_hashed_tables_and_a_score_without_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(table())
    assert read(tmp_path / "rows.csv", table_sizes=(3, 5)).table_sizes == (3, 5)
    config = CriteoConfig(path="x", **COLUMNS)
    bare = "\n".join(line.partition(",")[2] for line in table().splitlines())  # without the price
    (tmp_path / "bare.csv").write_text(bare)
    with pytest.raises(ConfigError, match="expected the columns 'price'"):
        open_table(tmp_path / "bare.csv", config, labeled=None)
    unlabeled = "site,city,age,price\ns1,Ulm,3,4\n"
    (tmp_path / "new.csv").write_text(unlabeled)
    rows = open_table(tmp_path / "new.csv", config, labeled=None)
    assert not rows.labeled
    parsed = rows.parse(b"s1,Ulm,3,4\n")
    np.testing.assert_allclose(parsed.dense[:, 0], np.log1p([3, 4]), rtol=1e-6)
