"""Rows of MNLI, a vocabulary for them, and their files."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from comera.recipes.classify.data import MNLI, ClassifyDataConfig, PreparedExamples, prepare
from comera.recipes.data.prepared import ARRAYS, Examples

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


def config_of(folder: Path, **fields: Any) -> ClassifyDataConfig:
    return replace(MNLI, path=str(folder), cache=str(folder.parent / "cache"), **fields)


def read(folder: Path, **fields: Any) -> PreparedExamples:
    return prepare(config_of(folder, **fields), quiet=True)


def ids_of(pairs: Examples) -> list[list[int]]:
    return [pairs.tokens[a:b].tolist() for a, b in zip(pairs.offsets[:-1], pairs.offsets[1:], strict=True)]


def random_pairs(count: int) -> Rows:
    rng = random.Random(0)
    alphabet = LETTERS + LETTERS.upper() + "zé\u0301üÜ中.,!'\u200b"

    def sentence() -> str:
        words = ("".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(0, 9)))
        return " ".join(["a", *words, "\u2028" if rng.random() < 0.1 else "b"])

    return [(sentence(), sentence(), rng.randrange(3)) for _ in range(count)]


def assert_same_arrays(one: PreparedExamples, two: PreparedExamples) -> None:
    assert (one.train_size, one.dev_size) == (3, 2)
    for ours, theirs in ((one.train, two.train), (one.dev, two.dev)):
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
