"""MNLI's files with bad input: what is skipped and counted, and what is an error that names its place."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from comera.errors import DataError

from ...helpers.mnli_rows import (
    DEV,
    SPECIAL,
    TRAIN,
    assert_same_arrays,
    random_pairs,
    read,
    write_jsonl,
    write_vocabulary,
)


def test_pairs_without_a_label_or_text_are_skipped_and_counted(tmp_path: Path) -> None:
    unlabeled = [("a", "b", label) for label in ("-", -1, None, "")] + ['{"premise": "a", "hypothesis": "b"}']
    empty = [("", "b", 0), (" \t", "b", 1), ("\u200b", "b", 2), ("a", "  ", 0), ("a", "\ufffd", 0)]
    data = read(write_jsonl(tmp_path / "mnli", [*unlabeled, *TRAIN, *empty], [*DEV, ("a", "", 1)]))
    assert data.skipped == {"no label": 5, "empty premise": 3, "empty hypothesis": 3}
    assert data.manifest["dev"]["skipped"] == {"empty hypothesis": 1}
    assert_same_arrays(data, read(write_jsonl(tmp_path / "clean")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("a", "b", "maybe"), r"train\.jsonl, line 2: expected as label entailment \(0\), .* got 'maybe'"),
        (("a", "b", 3), "line 2: expected as label .* got 3"),
        (("a", "b", True), "line 2: expected as label .* got True"),
        ('{"premise": "a", ', r"line 2: expected JSON, got '\{\"premise\": \"a\", '"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"premise": "a", "label": 0}', "line 2: expected the fields premise, hypothesis, label, got premise, label"),
        (("a", None, 0), "line 2: expected text as hypothesis, got None"),
        ((7, "b", 0), "line 2: expected text as premise, got 7"),
        (("a", "\ud800", 0), r"line 2: expected text as hypothesis, got '\\ud800' \(surrogates"),
    ],
)
def test_a_bad_line_is_a_data_error_that_names_it(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write_jsonl(tmp_path / "mnli", [TRAIN[0], line, TRAIN[1]]))
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_file_that_is_not_utf8_is_a_data_error(tmp_path: Path) -> None:
    folder = write_jsonl(tmp_path / "mnli")
    (folder / "train.jsonl").write_bytes((folder / "train.jsonl").read_bytes() + b'{"premise": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"train\.jsonl, line 4: expected UTF-8"):
        read(folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("sentence1\tsentence2\tgold_label\na\tb\n", "line 2: expected 3 fields as in the header, got 2"),
        ("sentence1\tsentence2\tgold_label\na\tb\tc\tneutral\n", "line 2: expected 3 fields as in the header, got 4"),
        (
            "sentence1\tsentence2\na\tb\n",
            "line 2: expected the fields .*, gold_label, got sentence1, sentence2: set",
        ),
        ("", "expected a header with the names of the columns, got an empty file"),
    ],
)
def test_a_bad_table_is_a_data_error_that_names_the_line(tmp_path: Path, table: str, message: str) -> None:
    write_vocabulary(tmp_path / "mnli" / "vocab.txt")
    for name in ("train", "dev_matched"):
        (tmp_path / "mnli" / f"{name}.tsv").write_text(table)
    with pytest.raises(DataError, match=rf"train\.tsv(, |: ){message}"):
        read(tmp_path / "mnli")


@pytest.mark.parametrize("damage", ["truncated", "flipped", "not gzip"])
def test_a_damaged_gzip_is_a_data_error(tmp_path: Path, damage: str) -> None:
    folder = write_jsonl(tmp_path / "mnli", random_pairs(300))
    plain = (folder / "train.jsonl").read_bytes()
    good = gzip.compress(plain)
    middle = len(good) // 2
    bad = {"truncated": good[:middle], "flipped": good[:middle] + b"\xff" * 9 + good[middle:], "not gzip": plain}
    (folder / "train.jsonl").unlink()
    (folder / "train.jsonl.gz").write_bytes(bad[damage])
    with pytest.raises(DataError, match=r"train\.jsonl\.gz, line \d+: (cannot be read|expected)"):
        read(folder)


@pytest.mark.parametrize("token", SPECIAL)
def test_a_vocabulary_without_a_special_token_is_a_data_error(tmp_path: Path, token: str) -> None:
    folder = write_jsonl(tmp_path / "mnli")
    write_vocabulary(folder / "vocab.txt", without=token)
    with pytest.raises(DataError, match=rf"vocab\.txt: .* got 33 lines without \{token}: set data\.tokenizer"):
        read(folder)


def test_a_vocabulary_is_found_beside_the_data_or_named_and_else_missed(tmp_path: Path) -> None:
    folder = write_jsonl(tmp_path / "data" / "mnli")
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"got nothing at .*mnli/vocab\.txt or .*uncased/vocab\.txt: (put|set)"):
        read(folder)
    with pytest.raises(DataError, match=r"got nothing at .*nowhere"):
        read(folder, tokenizer=str(tmp_path / "nowhere"))
    beside = write_vocabulary(tmp_path / "data" / "vocab" / "bert-base-uncased" / "vocab.txt")
    named = ({}, {"tokenizer": str(beside)}, {"tokenizer": str(beside.parent)})
    assert len({read(folder, **fields).folder for fields in named}) == 1
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="picture: expected a vocabulary in UTF-8"):
        read(folder, tokenizer=str(tmp_path / "picture"))


@pytest.mark.parametrize("part", ["train", "dev_matched"])
def test_no_pair_left_is_a_data_error(tmp_path: Path, part: str) -> None:
    rows = {"train": TRAIN, "dev_matched": DEV, part: [("a", "b", "-"), ("", "b", 0)]}
    folder = write_jsonl(tmp_path / "mnli", rows["train"], rows["dev_matched"])
    with pytest.raises(DataError, match=rf"{part}\.jsonl: expected labeled .* got none \(skipped: .*'no label': 1"):
        read(folder)


def test_a_path_without_mnli_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path: expected a file of rows .*nowhere, where nothing is"):
        read(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"expected a file of rows \(\.jsonl .*, which is another file"):
        read(tmp_path / "file")
    (tmp_path / "mnli").mkdir()
    with pytest.raises(DataError, match=r"train\.tsv and dev_matched\.tsv; .* got nothing"):
        read(tmp_path / "mnli")
    (tmp_path / "mnli" / "train.tsv").touch()
    with pytest.raises(DataError, match=r"got train\.tsv: check data\.path"):
        read(tmp_path / "mnli")
