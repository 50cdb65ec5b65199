"""Rows of texts and labels become examples; what is of no use is an error that names its place, or counted and said."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from comera.errors import ConfigError, DataError
from comera.recipes.classify.data import ClassifyDataConfig, PreparedExamples, find_rows, prepare
from comera.recipes.classify.rows import find_columns
from comera.recipes.data.prepared import Examples

from ...helpers.data_sets import data_set, put_on_hub, save
from ...helpers.mnli_rows import ids_of, write_vocabulary
from ...helpers.review_rows import Row, reviews, write_csv

PAIRS = [(f"the {word} film", f"a {word} story {k}", label) for k, (word, label) in enumerate(reviews(60))]


def read(path: Path | str, tmp_path: Path, **fields: Any) -> PreparedExamples:
    config = {"vocab_size": 320, "held_out": 0.2, "cache": str(tmp_path / "cache"), **fields}
    return prepare(ClassifyDataConfig(path=str(path), **config))


def texts_of(data: PreparedExamples, part: Examples) -> list[str]:
    return [data.tokenizer.tokenizer.decode(ids).strip() for ids in ids_of(part)]


def rows_of(data: PreparedExamples) -> list[Row]:
    parts = [part for part in (data.train, data.dev, data.test) if part is not None]
    return [
        (text, data.label_names[label])
        for part in parts
        for text, label in zip(texts_of(data, part), part.labels.tolist(), strict=True)
    ]


# --- where rows are --------------------------------------------------------------------------------------------------


def test_every_form_of_rows_gives_the_same_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = reviews(50)
    lines = [json.dumps({"sentence": text, "label": label}) for text, label in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    (tmp_path / "a.tsv.gz").write_bytes(
        gzip.compress("\n".join(map("\t".join, [("sentence", "label"), *rows])).encode())
    )
    expected = read(write_csv(tmp_path / "a.csv", rows), tmp_path)
    assert sorted(rows_of(expected)) == sorted(rows)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "classify: columns: text 'sentence', label 'label' (text and label guessed; data.text and data.label name "
        "others)",
        f"classify: {expected.train_size} examples to train on, {expected.dev_size} held out; 2 labels: negative, "
        f"positive; {expected.vocab_size} different tokens",
    ]
    for name in ("a.jsonl", "a.tsv.gz"):
        data = read(tmp_path / name, tmp_path)
        assert ids_of(data.train) == ids_of(expected.train)
        np.testing.assert_array_equal(data.dev.labels, expected.dev.labels)


def test_held_out_rows_are_a_share_by_seed_a_file_or_a_split(tmp_path: Path) -> None:
    rows = reviews(200)
    file = write_csv(tmp_path / "a.csv", [*rows, *rows[:40]])
    one, same, other = (read(file, tmp_path, held_out=0.3, split_seed=seed) for seed in (0, 0, 1))
    assert one.folder == same.folder != other.folder
    assert 30 < one.dev_size < 110
    assert {*texts_of(one, one.train)}.isdisjoint(texts_of(one, one.dev))
    assert texts_of(one, one.dev) != texts_of(other, other.dev)
    parts = {
        name: write_csv(tmp_path / f"{name}.csv", reviews(9, seed)) for seed, name in enumerate(("valid", "test"), 1)
    }
    data = read(file, tmp_path, **{name: str(path) for name, path in parts.items()})
    assert data.test is not None
    assert (data.train_size, data.dev_size, len(data.test)) == (240, 9, 9)
    assert texts_of(data, data.test) == [text for text, _ in reviews(9, 2)]


def test_the_second_time_the_cache_is_opened_and_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_csv(tmp_path / "a.csv", [*reviews(50), ("good", "")])
    first = read(file, tmp_path)
    said = capsys.readouterr().err
    assert f"classify: skipped 1 rows of {file}: no label (the first: {file}, line 52)" in said
    monkeypatch.setattr("comera.recipes.classify.data._write", None)
    assert read(file, tmp_path).folder == first.folder
    assert capsys.readouterr().err == said


def test_a_file_that_is_read_otherwise_gives_another_cache(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("".join(f"{label},{text}\n" for text, label in reviews(60)))
    digests = set()
    for name in ("rows.csv", "rows.tsv", "other.csv"):
        file = file.rename(tmp_path / name)
        digests.add(find_rows(ClassifyDataConfig(path=str(file))).digest)
    assert len(digests) == 2


def test_a_row_that_moves_to_the_held_out_file_gives_another_cache(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "label": label}) + "\n" for text, label in reviews(60)]
    train, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    for size in (40, 20):
        train.write_text("".join(lines[:size]))
        valid.write_text("".join(lines[size:]))
        data = read(train, tmp_path, valid=str(valid))
        assert (data.train_size, data.dev_size) == (size, 60 - size)


@pytest.mark.parametrize("names", [None, ["positive", "negative"]])
@pytest.mark.parametrize("where", ["hub", "saved"])
def test_data_sets_have_splits_and_names(
    where: str, names: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"train": reviews(40), "validation": reviews(8, 1), "test": reviews(9, 2)}
    splits = {}
    for name, rows in parts.items():
        texts, labels = map(list, zip(*rows, strict=True))
        numbers = [names.index(label) for label in labels] if names else labels
        if names and name == "test":
            numbers[0] = -1  # as where a benchmark keeps its labels
        splits[name] = data_set({"sentence": texts, "label": numbers}, **({"label": names} if names else {}))
    if where == "hub":
        put_on_hub(monkeypatch, splits)
    path = "someone/reviews" if where == "hub" else save(tmp_path / "saved", splits)
    data = read(path, tmp_path, test="test")
    assert data.test is not None
    assert (data.train_size, data.dev_size, len(data.test)) == (40, 8, 8 if names else 9)
    assert data.label_names == (("positive", "negative") if names else ("negative", "positive"))
    assert data.skipped == ({"no label": 1} if names else {})
    with pytest.raises(DataError, match=r"data\.valid: expected one of the splits train, .*, got 'dev'"):
        read(path, tmp_path, valid="dev")


def test_a_hub_without_the_data_set_and_a_path_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_hub(monkeypatch, FileNotFoundError("Dataset 'someone/reviews' doesn't exist on the Hub"))
    with pytest.raises(DataError, match=r"got someone/reviews, which could not be loaded \(FileNotFoundError: Dataset"):
        read("someone/reviews", tmp_path)
    with pytest.raises(ConfigError, match=r"data\.path: expected a file of rows.*, got none: run `comera train"):
        prepare(ClassifyDataConfig())
    (tmp_path / "a.xlsx").write_bytes(b"PK")
    rows = write_csv(tmp_path / "a.csv", reviews(20))
    for path, fields, said in (
        (tmp_path / "no/where", {}, r"data\.path: expected a file of rows .*, where nothing is"),
        (tmp_path, {}, "where another folder is"),
        (tmp_path / "a.xlsx", {}, r"data\.path: .* got .*a\.xlsx, which is another file"),
        (rows, {"valid": "nowhere.csv"}, r"data\.valid: expected a file of .*, got nowhere\.csv, which is no file"),
        (rows, {"test": str(tmp_path / "a.xlsx")}, r"data\.test: .*, which is another file"),
    ):
        with pytest.raises(DataError, match=said) as raised:
            read(path, tmp_path, **fields)
        assert "\n" not in str(raised.value)


# --- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "named", "texts", "label", "guessed"),
    [
        ("idx sentence label", {}, ("sentence",), "label", ["text", "label"]),
        ("words kind", {"label": "kind"}, ("words",), "kind", ["text"]),
        ("words kind", {"text": "words"}, ("words",), "kind", ["label"]),
        ("Text Label id", {}, ("Text",), "Label", ["text", "label"]),
        ("a b class", {"text": "b"}, ("b",), "class", ["label"]),
        ("question answer good", {"pair": "answer", "label": "good"}, ("question", "answer"), "good", ["text"]),
        ("x y z", {"text": "x", "pair": "y", "label": "z"}, ("x", "y"), "z", []),
    ],
)
def test_columns_are_guessed_where_there_is_one_sensible_choice(
    found: str, named: dict[str, str], texts: Row, label: str, guessed: list[str]
) -> None:
    options: dict[str, Any] = {"text": None, "pair": None, "label": None, **named}
    columns, what = find_columns(found.split(), "a.csv", **options)
    assert (columns.texts, columns.label, what) == (texts, label, guessed)


@pytest.mark.parametrize(
    ("found", "named", "said"),
    [
        ("sentence1 sentence2 label", {}, r"a\.csv: expected one .* the text, got sentence1, sentence2: set data\.t"),
        ("text a b", {}, r"expected one column that is likely to hold the label, got text, a, b: set data\.label"),
        ("label", {}, r"likely to hold the text, got none: set data\.text"),
        ("text label", {"text": "body"}, r"data\.text: expected one of the columns text, label of a\.csv, got 'body'"),
        ("text label", {"pair": "text", "text": "text"}, "expected different columns for data.text, .* got text, text"),
    ],
)
def test_columns_that_are_not_clear_are_refused(found: str, named: dict[str, str], said: str) -> None:
    options: dict[str, Any] = {"text": None, "pair": None, "label": None, **named}
    with pytest.raises(DataError, match=said):
        find_columns(found.split(), "a.csv", **options)


# --- rows of no use --------------------------------------------------------------------------------------------------


def test_rows_that_do_not_parse_are_skipped_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = [json.dumps({"text": text, "label": label}) for text, label in reviews(30)]
    bad = ['{"text": "a"', "[1]", '{"text": 7, "label": "positive"}', '{"text": "\\ud800", "label": "negative"}']
    (tmp_path / "a.jsonl").write_text("\n".join([*good, *bad]))
    data = read(tmp_path / "a.jsonl", tmp_path)
    assert data.skipped == {"unreadable row": 4}
    assert sorted(rows_of(data)) == sorted(reviews(30))
    said = capsys.readouterr().err
    assert f"unreadable row (the first: {tmp_path}/a.jsonl, line 31: expected JSON, got" in said
    table = ["text,label", *(f"{text},{label}" for text, label in reviews(30)), 'a,"b"c', "a,b,c", "alone"]
    (tmp_path / "a.csv").write_text("\n".join(table))
    assert read(tmp_path / "a.csv", tmp_path).skipped == {"unreadable row": 3}


def test_an_open_quote_is_no_single_row(tmp_path: Path) -> None:
    table = ["text,label", '"never closed,positive', *(f"{text},{label}" for text, label in reviews(30))]
    (tmp_path / "a.csv").write_text("\n".join(table))
    with pytest.raises(DataError, match=r"a\.csv, line 32: expected fields between commas, got a row that"):
        read(tmp_path / "a.csv", tmp_path)
    (tmp_path / "b.csv").write_text("\n".join([*table, 'a "quote" opens,negative']))
    with pytest.raises(DataError, match=r"b\.csv, line \d+: expected fields between commas"):
        read(tmp_path / "b.csv", tmp_path)


def test_pairs_without_a_side_and_rows_without_a_label_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(dict(zip(("a", "b", "label"), row, strict=True))) for row in PAIRS]
    lines += ['{"a": "x", "label": "positive"}', '{"a": null, "b": "x", "label": "positive"}', '{"a": "x", "b": "y"}']
    lines += ['{"a": "x", "b": " ", "label": "negative"}', '{"a": "x", "b": "y", "label": ""}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    data = read(tmp_path / "a.jsonl", tmp_path, text="a", pair="b")
    assert data.skipped == {"empty second text": 2, "empty first text": 1, "no label": 2}
    assert data.train_size + data.dev_size == len(PAIRS)
    assert capsys.readouterr().err.count("(the first: ") == len([*data.manifest["train"]["skipped"],
                                                                  *data.manifest["dev"]["skipped"]])  # fmt: skip
    segments = data.dev.batch(np.arange(3)).token_type_ids
    assert segments.sum(1).tolist() == [
        int(length - boundary) for length, boundary in zip(data.dev.lengths[:3], data.dev.boundaries[:3], strict=True)
    ]


def test_longer_texts_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*reviews(30), ("good film " * 50, "positive"), ("bad plot " * 50, "negative")]
    data = read(write_csv(tmp_path / "a.csv", rows), tmp_path, max_length=16)
    assert data.cut >= 2
    assert max(*data.train.lengths, *data.dev.lengths) == 16
    assert f"classify: cut {data.cut} examples to 16 tokens (data.max_length)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("labels", "fields", "said"),
    [
        (["yes"] * 30, {}, r"expected two labels or more, got yes alone: check data\.label"),
        ([""] * 30, {}, r"expected two labels or more, got none: check data\.label"),
        ([str(k) for k in range(1100)], {}, r"up to 1,000 different labels, got more, .*: is data\.label the column"),
        (["a", "b"] * 15, {"held_out": 1e-9}, r"held out\): expected labeled texts, got none .* and data\.held_out"),
    ],
)
def test_labels_that_teach_nothing_are_errors(
    labels: list[str], fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    rows = [(f"text {k}", label) for k, label in enumerate(labels)]
    with pytest.raises(DataError, match=said):
        read(write_csv(tmp_path / "a.csv", rows), tmp_path, **fields)


def test_held_out_labels_and_columns_are_those_of_training(tmp_path: Path) -> None:
    train = write_csv(tmp_path / "a.csv", reviews(30))
    valid = write_csv(tmp_path / "v.csv", [("good", "perfect")])
    with pytest.raises(DataError, match=r"v\.csv, line 2: expected as label negative \(0\), positive \(1\), or"):
        read(train, tmp_path, valid=str(valid))
    valid = write_csv(tmp_path / "v.csv", [("good", "positive")], ("text", "label"))
    with pytest.raises(DataError, match=r"v\.csv: expected the columns sentence, label, got text, label: set data\.v"):
        read(train, tmp_path, valid=str(valid))


def test_numbers_are_labels_in_their_order_and_minus_one_is_one_of_them(tmp_path: Path) -> None:
    rows = [(f"text {k}", (-1, 0, 10, 2)[k % 4]) for k in range(60)]
    assert read(write_csv(tmp_path / "a.csv", rows), tmp_path).label_names == ("-1", "0", "2", "10")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def vocabularies(folder: Path) -> Iterator[Path]:
    yield write_vocabulary(folder / "words" / "vocab.txt")
    yield folder / "words"
    rows = read(write_csv(folder / "a.csv", reviews(50)), folder)
    yield rows.folder / "tokenizer.json"
    (folder / "saved").mkdir()
    for name, text in rows.tokenizer.files(64).items():
        (folder / "saved" / name).write_text(text)
    yield folder / "saved"


def test_tokenizers_are_read_from_files_and_folders(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", [(f"a bed the cab {k}", k % 2) for k in range(50)])
    sizes = []
    for path in vocabularies(tmp_path):
        data = read(file, tmp_path, tokenizer=str(path))
        sizes.append(data.vocab_size)
        for name, text in data.tokenizer.files(64, "input_ids", "attention_mask").items():
            (tmp_path / name).write_text(text)
        ids = AutoTokenizer.from_pretrained(tmp_path)("a bed the cab 0")
        assert set(ids) == {"input_ids", "attention_mask"}
        assert ids["input_ids"] in [*ids_of(data.train), *ids_of(data.dev)]
    assert sizes[0] == sizes[1] == 34
    assert sizes[2] == sizes[3]


def test_a_trained_tokenizer_is_the_same_each_time_and_reads_training_texts_alone(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "a.csv", reviews(80))
    valid = write_csv(tmp_path / "v.csv", [("Unseen " * 5, "positive")])
    one, two = (read(file, tmp_path, cache=str(tmp_path / name), valid=str(valid)) for name in "xy")
    assert one.tokenizer.tokenizer.to_str() == two.tokenizer.tokenizer.to_str()
    assert not [token for token in one.tokenizer.tokenizer.get_vocab() if "unseen" in token]
    assert texts_of(one, one.dev) == [("unseen " * 5).strip()]
    cased = read(file, tmp_path, valid=str(valid), lowercase=False)
    assert texts_of(cased, cased.dev) == [("Unseen " * 5).strip()]


@pytest.mark.parametrize("content", ["", "{}", '{"model": 1}'])
def test_a_file_that_is_no_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    file = write_csv(tmp_path / "a.csv", reviews(20))
    with pytest.raises(ConfigError, match=r"data\.tokenizer: expected tokenizer\.json, .* got .*tokenizer\.json \("):
        read(file, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer: expected tokenizer\.json, .* or a tokenizer that transformers reads"
    ):
        read(file, tmp_path, tokenizer=str(tmp_path / "nowhere"))
