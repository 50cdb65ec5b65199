"""Examples as token ids: tokenized once into a cache folder, then memory-mapped, and batches of them.

    rows -> examples -> [CLS] text [SEP] or [CLS] first [SEP] second [SEP], cut at the context -> arrays and a manifest

Batches are pure functions of their place in the run, so a resumed run sees the same ones."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from comera.errors import DataError
from comera.recipes.classify.files import Columns, Part, Skipped, read_examples
from comera.recipes.examples import ExampleBatch, Examples, ExampleWriter
from comera.recipes.progress import Progress
from comera.recipes.tokenizers import TextTokenizer

ENCODE_EXAMPLES = 4096  # per call of the tokenizer: bounds memory, and keeps all cores busy
MANIFEST = "manifest.json"


class PreparedExamples:
    """Prepared texts, memory-mapped. train, dev: the arrays of the training and the held-out part; test: of the test
    part, None without one. folder: where they lie, named after everything they depend on. tokenizer: that made them.
    pad: id of the padding. manifest: where they come from. label_names: names of the labels 0, 1, ... skipped, cut:
    examples of all parts that were skipped, by reason, and that were longer than `max_length`."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, pad: int, max_length: int, buckets: int) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.manifest = read_manifest(folder)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.label_names: tuple[str, ...] = tuple(self.manifest["label_names"])
        parts = {part: self.manifest[part] for part in ("train", "dev", "test") if part in self.manifest}
        reasons = dict.fromkeys(reason for part in parts.values() for reason in part["skipped"])
        self.skipped = {reason: sum(part["skipped"].get(reason, 0) for part in parts.values()) for reason in reasons}
        self.cut = sum(part.get("cut", 0) for part in parts.values())
        arrays = {part: Examples(folder, part, max_length, buckets, pad) for part in parts}
        self.train, self.dev, self.test = arrays["train"], arrays["dev"], arrays.get("test")
        self.train_size, self.dev_size = len(self.train), len(self.dev)

    @property
    def label_counts(self) -> dict[str, dict[str, int]]:
        """Number of examples by part ("train", "dev") and label."""
        parts = {"train": self.train, "dev": self.dev}
        counts = {name: np.bincount(part.labels, minlength=len(self.label_names)) for name, part in parts.items()}
        return {name: dict(zip(self.label_names, each.tolist(), strict=True)) for name, each in counts.items()}

    @property
    def most_frequent(self) -> tuple[str, float]:
        """The most frequent label of the held-out examples, and its share of them: what a model that ignores its input
        reaches, the score to beat."""
        counts = self.label_counts["dev"]
        label = max(counts, key=counts.__getitem__)
        return label, counts[label] / self.dev_size

    def steps_per_epoch(self, batch_size: int, processes: int = 1) -> int:
        """Steps that cover all training examples, with `processes` batches per step."""
        return -(-self.train.batches_per_epoch(batch_size) // processes)

    def train_batch(self, index: int, batch_size: int, seed: int) -> ExampleBatch:
        """The `index`-th batch, counted over all epochs: a pure function of its arguments. Each epoch contains every
        example once, in a new order; its last batch may be smaller. Those of a batch have near-equal length."""
        return self.train.shuffled(index, batch_size, seed)

    def dev_batches(self, batch_size: int) -> Iterator[ExampleBatch]:
        """All held-out examples once, sorted by length: the same batches every time."""
        return self.dev.sorted(batch_size)


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is noted of prepared data."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Note it beside the arrays."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def write_part(
    folder: Path,
    name: str,
    part: Part,
    columns: Columns,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    skipped: Skipped,
    *,
    limit: int | None,
    title: str,
    quiet: bool,
) -> dict[str, Any]:
    """Tokenize a part, at most `limit` examples of it, and write its arrays; returns what the manifest says of it:
    numbers of examples and tokens, and how many were skipped, by reason, or cut. tokenizer: which cuts long texts.
    labels: their names. title: of the progress bar. Raises DataError if none remains."""
    writer, cut = ExampleWriter(), 0
    with Progress(quiet) as progress:
        progress.start(title, None, "examples")
        examples = islice(read_examples(part, columns, labels, skipped), limit)
        while chunk := list(islice(examples, ENCODE_EXAMPLES)):
            texts: list[Any] = [example.texts if len(example.texts) > 1 else example.texts[0] for example in chunk]
            for example, encoding in zip(chunk, tokenizer.encode_batch_fast(texts), strict=True):
                ids, sequences = encoding.ids, set(encoding.sequence_ids)
                empty = next((role for k, role in enumerate(columns.roles) if k not in sequences), None)
                if empty is not None:  # text, but only characters that the tokenizer drops
                    skipped.add(f"empty {empty}", f"{part.name}, {example.texts[columns.roles.index(empty)]!r:.80}")
                    continue
                cut += bool(encoding.overflowing)
                segments = encoding.type_ids
                writer.add(ids, segments.index(1) if 1 in segments else len(ids), example.label)
            progress.to(len(writer), len(writer))
    if not len(writer):
        raise DataError(
            f"{part.name}: expected labeled {'sentence pairs' if len(columns.texts) > 1 else 'texts'}, got none "
            f"(skipped: {skipped.counts}): check data.path, {columns.options} and data.held_out"
        )
    return {**writer.write(folder, name), "skipped": skipped.counts, "first": skipped.first, "cut": cut}
