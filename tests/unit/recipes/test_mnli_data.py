"""MNLI's pairs as token ids: the tokenizer's truth, sizes, settings, and what is said on the way."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import BertTokenizerFast

from comera.errors import DataError
from comera.recipes.classify.data import MNLI, prepare
from comera.recipes.classify.data import MNLI_LABELS as LABELS
from comera.recipes.data.cache import Progress

from ...helpers.data_sets import data_set, put_on_hub, save
from ...helpers.mnli_rows import (
    DEV,
    SPECIAL,
    TRAIN,
    Rows,
    assert_same_arrays,
    config_of,
    ids_of,
    random_pairs,
    read,
    write_jsonl,
    write_vocabulary,
)


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
    ids, special = ids_of(data.train)[0], data.tokenizer.tokenizer.get_vocab()
    assert [ids.count(special[token]) for token in ("[CLS]", "[SEP]", "[MASK]", "[PAD]")] == [1, 2, 0, 0]
    assert data.train.boundaries.tolist() == [ids.index(special["[SEP]"]) + 1]


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


def test_what_is_said_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("comera.recipes.data.prepared.ENCODE_EXAMPLES", 2)
    prepare(config_of(write_jsonl(tmp_path / "mnli")))
    assert capsys.readouterr().err.splitlines() == [
        "mnli: columns: text 'premise', text 'hypothesis', label 'label'",
        f"mnli: 3 examples to train on, 2 held out; 3 labels: {', '.join(LABELS)}; 34 different tokens",
    ]
    counts: list[int] = []
    add = Progress.add
    monkeypatch.setattr(Progress, "add", lambda bar, amount: counts.append(amount) or add(bar, amount))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    prepare(config_of(tmp_path / "mnli", max_length=64))
    assert counts == [2, 1, 2]
    assert "preparing the texts" in capsys.readouterr().err


# --- every form of the data gives the same arrays ---------------------------------------------------------------------


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


# --- bad input: skipped and counted, or an error that names its place -------------------------------------------------


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
        ("sentence1\tsentence2\na\tb\n", "line 2: expected the fields .*, gold_label, got sentence1, sentence2: set"),
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
