"""Rows of a small classification task, and their files: one word determines the label."""

import csv
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

WORDS = [
    "a",
    "the",
    "film",
    "story",
    "actor",
    "scene",
    "music",
    "plot",
    "camera",
    "ending",
    "start",
    "middle",
    "very",
    "quite",
    "so",
]
ANSWERS = {"good": "positive", "bad": "negative"}
Row = tuple[str, ...]


def reviews(count: int, seed: int = 0) -> list[Row]:
    """Sentences and labels."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        words, (word, label) = rng.choices(WORDS, k=rng.randint(2, 12)), rng.choice([*ANSWERS.items()])
        words.insert(rng.randrange(len(words)), word)
        rows.append((" ".join(words), label))
    return rows


def write_csv(file: Path, rows: Iterable[Sequence[object]], header: Sequence[str] = ("sentence", "label")) -> Path:
    with open(file, "w", newline="") as out:
        csv.writer(out).writerows([header, *rows])
    return file
