"""Every form of MNLI's data gives the same arrays: tables, JSON lines, folders and data sets of `datasets`."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comera.errors import DataError
from comera.recipes.mnli.data import MNLIDataConfig, prepare
from comera.recipes.mnli.files import LABELS

from ...helpers.mnli_rows import DEV, TRAIN, Rows, assert_same_arrays, read, write_jsonl, write_vocabulary


def as_tsv(folder: Path) -> None:
    for name, rows, extra in (("train", TRAIN, 0), ("dev_matched", DEV, 4)):
        labels = [f"label{i + 1}" for i in range(extra + 1)]
        lines = ["\t".join(["index", "genre", "sentence1", "sentence2", *labels, "gold_label"])]
        lines += ["\t".join([str(i), '"', a, b, *[c] * (extra + 1), c]) for i, (a, b, c) in enumerate(rows)]
        (folder / f"{name}.tsv").write_bytes("\r\n".join(lines).encode())


def as_published_jsonl(folder: Path) -> None:
    for name, rows in (("train", TRAIN), ("dev_matched", DEV)):
        lines = [json.dumps({"gold_label": c, "genre": "-", "sentence1": a, "sentence2": b}) for a, b, c in rows]
        (folder / f"multinli_1.0_{name}.jsonl").write_text("\n".join(lines))


def as_compressed_numbers(folder: Path) -> None:
    for name, rows in (("train", TRAIN), ("dev_matched", DEV)):
        records = [{"premise": a, "hypothesis": b, "label": LABELS.index(c)} for a, b, c in rows]
        text = "\n\n".join(json.dumps(record) for record in records)
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))


@pytest.mark.parametrize("write", [as_tsv, as_published_jsonl, as_compressed_numbers])
def test_every_form_gives_the_same_arrays(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write_vocabulary(tmp_path / "other" / "vocab.txt")
    write(tmp_path / "other")
    assert_same_arrays(read(tmp_path / "other"), read(write_jsonl(tmp_path / "mnli")))


def test_quotes_in_a_table_are_ordinary_characters(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "mnli" / "vocab.txt")
    for name in ("train", "dev_matched"):
        rows = ['sentence1\tsentence2\tgold_label\n"a\tb"\tneutral\n"a b"\t"\tneutral\n']
        (tmp_path / "mnli" / f"{name}.tsv").write_text("".join(rows))
    assert read(tmp_path / "mnli").train_size == 2


class FakeDataset:
    """As much of datasets.Dataset as is used: its columns, features and slices."""

    def __init__(self, rows: Rows, names: list[str] | None) -> None:
        self.rows = rows
        self.features = {"label": SimpleNamespace(names=names) if names else SimpleNamespace(dtype="string")}
        self.column_names = ["promptID", "premise", "hypothesis", "label"]

    def with_format(self, kind: None) -> FakeDataset:
        return self

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> dict[str, list[Any]]:
        columns = ("premise", "hypothesis", "label")
        return {name: [row[i] for row in self.rows[part]] for i, name in enumerate(columns)}


def fake_datasets(monkeypatch: pytest.MonkeyPatch, names: list[str] | None = None) -> list[str]:
    """Put a library `datasets` in place that has TRAIN and DEV under every name; returns what was asked of it."""

    def numbered(rows: Rows) -> Rows:
        return [(a, b, names.index(c)) for a, b, c in rows] if names else rows

    splits = {"train": FakeDataset(numbered(TRAIN), names), "validation_matched": FakeDataset(numbered(DEV), names)}
    asked: list[str] = []

    def load(path: str) -> dict[str, FakeDataset]:
        asked.append(path)
        return splits

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load, load_dataset=load))
    return asked


@pytest.mark.parametrize("names", [None, list(LABELS), ["contradiction", "entailment", "neutral"]])
def test_a_folder_saved_by_datasets_gives_the_same_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    monkeypatch.setattr("comera.recipes.classify.files.DATASETS_ROWS", 2)
    asked = fake_datasets(monkeypatch, names)
    saved = tmp_path / "saved"
    write_vocabulary(saved / "vocab.txt")
    (saved / "train").mkdir()
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "validation_matched"]}')
    (saved / "train" / "state.json").write_text('{"_fingerprint": "1"}')
    first = read(saved)
    assert_same_arrays(first, read(write_jsonl(tmp_path / "mnli")))
    assert asked == [str(saved)]
    monkeypatch.setitem(sys.modules, "datasets", None)  # the second time the library is not needed
    assert read(saved).folder == first.folder
    (saved / "train" / "state.json").write_text('{"_fingerprint": "2"}')
    with pytest.raises(DataError, match="`datasets`, which is not installed: pip install datasets"):
        read(saved)


def test_a_data_set_on_the_hub_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_datasets(monkeypatch, list(LABELS))
    vocab = write_vocabulary(tmp_path / "words" / "vocab.txt")
    config = MNLIDataConfig(path="someone/mnli", vocab=str(vocab.parent), cache=str(tmp_path / "cache"))
    assert_same_arrays(prepare(config, quiet=True), read(write_jsonl(tmp_path / "mnli")))
    assert prepare(config, quiet=True).train_size == 3
    assert asked == ["someone/mnli"]


def test_a_hub_that_cannot_be_reached_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(path: str) -> None:
        raise ConnectionError(f"no route to {path}")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    vocab = str(write_vocabulary(tmp_path / "vocab.txt"))
    config = MNLIDataConfig(path="someone/mnli", vocab=vocab, cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"got someone/mnli, which could not be loaded \(ConnectionError: no route"):
        prepare(config, quiet=True)
    with pytest.raises(DataError, match=r"got no folder at data\.path \('someone/mnli'\) .*: unpack https://"):
        prepare(MNLIDataConfig(path="someone/mnli"), quiet=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda splits: splits.pop("train"), "expected the split train, got validation_matched"),
        (lambda splits: splits["train"].column_names.remove("label"), r"columns premise, hypothesis, label, got"),
        (lambda splits: splits["train"].rows.append(("a", "b", 7)), r"hub/x \(train\), line 4: .* got 7"),
    ],
)
def test_other_data_from_datasets_are_data_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    fake_datasets(monkeypatch, list(LABELS))
    change(sys.modules["datasets"].load_dataset("hub/x"))
    vocab = str(write_vocabulary(tmp_path / "vocab.txt"))
    with pytest.raises(DataError, match=message):
        prepare(MNLIDataConfig(path="hub/x", vocab=vocab, cache=str(tmp_path / "cache")), quiet=True)
