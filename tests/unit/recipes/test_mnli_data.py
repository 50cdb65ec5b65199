"""MNLI's files → token ids: the tokenizer's truth, every form of the data, what is skipped, every bad input."""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import BertTokenizerFast

from comera.errors import ConfigError, DataError
from comera.recipes.mnli import data as mnli
from comera.recipes.mnli.data import MNLIData, MNLIDataConfig, prepare
from comera.recipes.mnli.files import LABELS
from comera.recipes.mnli.pairs import ARRAYS, Pairs
from comera.recipes.progress import Progress

Rows = list[tuple[str, str, Any]]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefgh"
TRAIN: Rows = [
    ("a cab fed a", "a bed", "entailment"),
    ("the bad cafe.", "gab", "neutral"),
    ("fee", "b", "contradiction"),
]
DEV: Rows = [("ab ba", "bab", "contradiction"), ("he had", "a bag", "entailment")]


def write_vocabulary(file: Path, without: str = "") -> Path:
    pieces = [*SPECIAL, *"abcdefgh.,!'[]éü中", *(f"##{letter}" for letter in LETTERS), "the", "bad", "##ad", "sep"]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{piece}\n" for piece in pieces if piece != without), encoding="utf-8")
    return file


def write_jsonl(folder: Path, train: Iterable[Any] = TRAIN, dev: Iterable[Any] = DEV) -> Path:
    """The form of the sample: train.jsonl, dev_matched.jsonl; rows that are text are written as they stand."""
    write_vocabulary(folder / "vocab.txt")
    for name, rows in (("train", train), ("dev_matched", dev)):
        lines = [
            row if isinstance(row, str) else json.dumps(dict(zip(("premise", "hypothesis", "label"), row, strict=True)))
            for row in rows
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def config_of(folder: Path, **fields: Any) -> MNLIDataConfig:
    return MNLIDataConfig(path=str(folder), cache=str(folder.parent / "cache"), **fields)


def read(folder: Path, **fields: Any) -> MNLIData:
    return prepare(config_of(folder, **fields), quiet=True)


def ids_of(pairs: Pairs) -> list[list[int]]:
    return [pairs.tokens[a:b].tolist() for a, b in zip(pairs.offsets[:-1], pairs.offsets[1:], strict=True)]


def random_pairs(count: int) -> Rows:
    rng = random.Random(0)
    alphabet = LETTERS + LETTERS.upper() + "zé\u0301üÜ中.,!'\u200b"

    def sentence() -> str:
        words = ("".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(0, 9)))
        return " ".join(["a", *words, "\u2028" if rng.random() < 0.1 else "b"])

    return [(sentence(), sentence(), rng.randrange(3)) for _ in range(count)]


@pytest.mark.parametrize("max_length", [5, 6, 9, 16, 17, 128])
def test_ids_and_segments_are_those_of_transformers(tmp_path: Path, max_length: int) -> None:
    rows = random_pairs(400)
    data = read(write_jsonl(tmp_path / "mnli", rows, rows[:40]), max_length=max_length)
    oracle = BertTokenizerFast(str(tmp_path / "mnli" / "vocab.txt"))
    premises, hypotheses, labels = (list(column) for column in zip(*rows, strict=True))
    expected = oracle(premises, hypotheses, truncation="longest_first", max_length=max_length)
    assert ids_of(data.train) == expected["input_ids"]
    assert ids_of(data.dev) == expected["input_ids"][:40]
    assert data.train.boundaries.tolist() == [segments.index(1) for segments in expected["token_type_ids"]]
    assert data.train.labels.tolist() == labels
    assert max(data.train.lengths) == max_length if max_length < 128 else max(data.train.lengths) < 128


def test_the_longer_sentence_is_cut_first(tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "mnli", [("a b c d e f g", "h a", 0), ("a", "b c d e f g h", 1)]), max_length=9)
    words = write_vocabulary(tmp_path / "vocab.txt").read_text(encoding="utf-8").split("\n")
    texts = [" ".join(words[i] for i in ids) for ids in ids_of(data.train)]
    assert texts == ["[CLS] a b c d [SEP] h a [SEP]", "[CLS] a [SEP] b c d e f [SEP]"]


def test_special_tokens_written_in_a_sentence_are_ordinary_text(tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "mnli", [("a [SEP] b", "[CLS] [MASK] [PAD]", 0)]))
    ids, special = ids_of(data.train)[0], data.manifest["special_tokens"]
    assert [ids.count(special[token]) for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]")] == [1, 2, 0, 0]
    assert data.train.boundaries.tolist() == [ids.index(special["[SEP]"]) + 1]


# Every form of the data.


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


def assert_same_arrays(one: MNLIData, two: MNLIData) -> None:
    assert (one.train_size, one.dev_size) == (3, 2)
    for ours, theirs in ((one.train, two.train), (one.dev, two.dev)):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


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
    monkeypatch.setattr("comera.recipes.mnli.files.DATASETS_ROWS", 2)
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
    with pytest.raises(DataError, match=r"no place to look, .*: set data\.vocab"):
        prepare(MNLIDataConfig(path="someone/mnli"), quiet=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda splits: splits.pop("validation_matched"), "expected the splits train, validation_matched, got train"),
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


# What is skipped, and bad input.


def test_pairs_without_a_label_or_text_are_skipped_and_counted(tmp_path: Path) -> None:
    unlabeled = [("a", "b", label) for label in ("-", -1, None, "")] + ['{"premise": "a", "hypothesis": "b"}']
    empty = [("", "b", 0), (" \t", "b", 1), ("\u200b", "b", 2), ("a", "  ", 0), ("a", "\ufffd", 0)]
    data = read(write_jsonl(tmp_path / "mnli", [*unlabeled, *TRAIN, *empty], [*DEV, ("a", "", 1)]))
    assert data.skipped == {"no label": 5, "empty premise": 3, "empty hypothesis": 3}
    assert data.manifest["dev"]["skipped"] == {"no label": 0, "empty premise": 0, "empty hypothesis": 1}
    assert_same_arrays(data, read(write_jsonl(tmp_path / "clean")))


def test_sizes_and_counts_of_labels(tmp_path: Path) -> None:
    data = read(write_jsonl(tmp_path / "mnli"))
    assert (data.train_size, data.dev_size, data.vocab_size) == (3, 2, 34)
    assert data.label_names == LABELS
    assert data.label_counts == {
        "train": {"entailment": 1, "neutral": 1, "contradiction": 1},
        "dev": {"entailment": 1, "neutral": 0, "contradiction": 1},
    }


def test_max_examples_takes_the_first_training_pairs_that_count(tmp_path: Path) -> None:
    folder = write_jsonl(tmp_path / "mnli", [("a", "b", "-"), *TRAIN])
    part, whole = read(folder, max_examples=2), read(folder)
    assert (part.train_size, part.dev_size) == (2, 2)
    assert ids_of(part.train) == ids_of(whole.train)[:2]
    assert part.label_counts["train"] == {"entailment": 1, "neutral": 1, "contradiction": 0}


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
        ("sentence1\tsentence2\tgold_label\na\tb\n", "line 2: expected 3 tab-separated columns .* got 2"),
        ("sentence1\tsentence2\tgold_label\na\tb\tc\tneutral\n", "line 2: expected 3 tab-separated columns .* got 4"),
        ("sentence1\tsentence2\na\tb\n", r"line 1: expected a header with the columns gold_label, got"),
        ("", r"line 1: expected a header with the columns sentence1, sentence2, gold_label, got \[''\]"),
    ],
)
def test_a_bad_table_is_a_data_error_that_names_the_line(tmp_path: Path, table: str, message: str) -> None:
    write_vocabulary(tmp_path / "mnli" / "vocab.txt")
    for name in ("train", "dev_matched"):
        (tmp_path / "mnli" / f"{name}.tsv").write_text(table)
    with pytest.raises(DataError, match=rf"train\.tsv, {message}"):
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
    with pytest.raises(DataError, match=rf"vocab\.txt: .* got 33 lines without \{token}: set data\.vocab"):
        read(folder)


def test_a_vocabulary_is_found_beside_the_data_or_named_and_else_missed(tmp_path: Path) -> None:
    folder = write_jsonl(tmp_path / "data" / "mnli")
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match=r"got nothing at .*mnli/vocab\.txt or .*bert-base-uncased/vocab\.txt: set"):
        read(folder)
    with pytest.raises(DataError, match=r"got nothing at .*nowhere"):
        read(folder, vocab=str(tmp_path / "nowhere"))
    beside = write_vocabulary(tmp_path / "data" / "vocab" / "bert-base-uncased" / "vocab.txt")
    assert (
        read(folder).folder == read(folder, vocab=str(beside)).folder == read(folder, vocab=str(beside.parent)).folder
    )
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="picture: expected a vocabulary in UTF-8"):
        read(folder, vocab=str(tmp_path / "picture"))


@pytest.mark.parametrize("part", ["train", "dev_matched"])
def test_no_pair_left_is_a_data_error(tmp_path: Path, part: str) -> None:
    rows = {"train": TRAIN, "dev_matched": DEV, part: [("a", "b", "-"), ("", "b", 0)]}
    folder = write_jsonl(tmp_path / "mnli", rows["train"], rows["dev_matched"])
    with pytest.raises(DataError, match=rf"{part}\.jsonl: expected labeled .* got none \(skipped: .*'no label': 1"):
        read(folder)


def test_a_path_without_mnli_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere, which does not exist: check data\.path"):
        read(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file, which is a file"):
        read(tmp_path / "file")
    (tmp_path / "mnli").mkdir()
    with pytest.raises(DataError, match=r"train\.tsv and dev_matched\.tsv; .* got nothing"):
        read(tmp_path / "mnli")
    (tmp_path / "mnli" / "train.tsv").touch()
    with pytest.raises(DataError, match=r"got train\.tsv: check data\.path"):
        read(tmp_path / "mnli")


@pytest.mark.parametrize(
    ("field", "value"),
    [("path", ""), ("max_length", 4), ("max_examples", 0), ("buckets", 0), ("buckets", -1)],
)
def test_a_setting_out_of_range_is_a_config_error(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{field} must be .*, got"):
        MNLIDataConfig(**{field: value})


def test_what_is_said_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mnli, "ENCODE_PAIRS", 2)
    prepare(config_of(write_jsonl(tmp_path / "mnli")))
    assert capsys.readouterr().err == "MNLI: 3 pairs to train on, 2 held out\n"
    counts: list[int | None] = []
    to = Progress.to
    monkeypatch.setattr(Progress, "to", lambda bar, done, count: counts.append(count) or to(bar, done, count))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    prepare(config_of(tmp_path / "mnli", max_length=64))
    assert counts == [2, 3, 2]
    shown = capsys.readouterr().err
    assert "preparing MNLI" in shown
    assert "3 pairs" in shown
