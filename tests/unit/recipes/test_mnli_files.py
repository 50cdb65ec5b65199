"""Every form of MNLI's data gives the same arrays: tables, JSON lines, folders and data sets of `datasets`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from comera.errors import DataError
from comera.recipes.classify.data import MNLI, prepare
from comera.recipes.classify.data import MNLI_LABELS as LABELS

from ...helpers.data_sets import data_set, put_on_hub, save
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


def splits_of(names: list[str] | None, train: Rows = TRAIN) -> dict[str, datasets.Dataset]:
    """TRAIN and DEV, labels as numbers of these names or as text."""

    def split(rows: Rows) -> datasets.Dataset:
        columns = dict(zip(("premise", "hypothesis", "label"), map(list, zip(*rows, strict=True)), strict=True))
        if names is None:
            return data_set({"promptID": [0] * len(rows), **columns})
        return data_set(columns | {"label": [names.index(label) for label in columns["label"]]}, label=names)

    return {"train": split(train), "validation_matched": split(DEV)}


@pytest.mark.parametrize("names", [None, list(LABELS), ["contradiction", "entailment", "neutral"]])
def test_a_folder_saved_by_datasets_gives_the_same_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str] | None
) -> None:
    saved = save(tmp_path / "saved", splits_of(names))
    write_vocabulary(saved / "vocab.txt")
    first = read(saved)
    assert_same_arrays(first, read(write_jsonl(tmp_path / "mnli")))
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_from_disk", None)  # the second time nothing is loaded
        assert read(saved).folder == first.folder
    other = save(tmp_path / "other", splits_of(names, [*TRAIN[:2], ("a", "b", "neutral")]))
    write_vocabulary(other / "vocab.txt")
    assert read(other).folder != first.folder


def test_a_data_set_on_the_hub_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = put_on_hub(monkeypatch, splits_of(list(LABELS)))
    vocab = write_vocabulary(tmp_path / "words" / "vocab.txt")
    config = replace(MNLI, path="someone/mnli", tokenizer=str(vocab.parent), cache=str(tmp_path / "cache"))
    assert_same_arrays(prepare(config, quiet=True), read(write_jsonl(tmp_path / "mnli")))
    assert prepare(config, quiet=True).train_size == 3
    assert asked == ["someone/mnli"]


def test_a_hub_that_cannot_be_reached_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_hub(monkeypatch, ConnectionError("no route to someone/mnli"))
    vocab = str(write_vocabulary(tmp_path / "vocab.txt"))
    config = replace(MNLI, path="someone/mnli", tokenizer=vocab, cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"got someone/mnli, which could not be loaded \(ConnectionError: no route"):
        prepare(config, quiet=True)
    with pytest.raises(DataError, match=r"got no folder at data\.path \('someone/mnli'\) .*: unpack https://"):
        prepare(replace(MNLI, path="someone/mnli"), quiet=True)


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"validation_matched": splits_of(None)["train"]}, "with the split train, got hub/x with validation_matched"),
        (
            {"train": splits_of(None)["train"].remove_columns("label")},
            r"columns premise, hypothesis, label, got promptID, premise, hypothesis: set data\.text",
        ),
        (
            {"train": data_set({"premise": ["a"] * 4, "hypothesis": ["b"] * 4, "label": [0, 1, 2, 7]})},
            r"hub/x \(train\), line 4: .* got 7",
        ),
    ],
)
def test_other_data_from_datasets_are_data_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, splits: dict[str, datasets.Dataset], message: str
) -> None:
    put_on_hub(monkeypatch, splits)
    vocab = str(write_vocabulary(tmp_path / "vocab.txt"))
    with pytest.raises(DataError, match=message):
        prepare(replace(MNLI, path="hub/x", tokenizer=vocab, cache=str(tmp_path / "cache")), quiet=True)
