"""MNLI's pairs as token ids: the tokenizer's truth, sizes, settings, and what is said on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import BertTokenizerFast

from comera.errors import ConfigError
from comera.recipes.classify.data import MNLI, prepare
from comera.recipes.classify.data import MNLI_LABELS as LABELS
from comera.recipes.data.cache import Progress

from ...helpers.mnli_rows import TRAIN, config_of, ids_of, random_pairs, read, write_jsonl, write_vocabulary


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("path", ""), ("max_length", 4), ("max_examples", 0), ("buckets", 0), ("buckets", -1)],
)
def test_a_setting_out_of_range_is_a_config_error(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{field} must be .*, got"):
        replace(MNLI, **{field: value})


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
