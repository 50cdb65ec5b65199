"""Prepared tokens in memory-mapped files, and batches of them, which are pure functions of their place in the run:
streams, cut into blocks, and examples, texts or pairs of texts, in batches of near-equal length.

    epoch: shuffle -> pools of many batches -> sort each pool by length -> cut into batches -> shuffle the batches

Every batch is padded to a bucket, one of a few lengths, so that few shapes occur.
B batch, T tokens of a padded example, N examples."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from comera.errors import DataError
from comera.files import replace_file
from comera.recipes.data.cache import RESUME, Progress
from comera.recipes.data.documents import Corpus, split
from comera.recipes.data.tokenizer import FILE, report_skipped, train_on

MANIFEST = "manifest.json"
ENCODE_BYTES = 1_000_000  # text per call of the tokenizer
KEPT_BYTES = 16_000_000  # text between two notes of what is done, which wait for the disk
ENCODE_EXAMPLES = 4096  # likewise, of examples: bounds memory, and keeps all cores busy
ARRAYS = ("tokens", "offsets", "boundaries", "labels")
POOL = 64  # batches sorted together: a larger pool means less padding, a smaller one more random batches

Array = np.ndarray[Any, Any]


def read_manifest(folder: Path) -> dict[str, Any]:
    """What is noted of prepared data."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Note it beside the arrays."""
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type of token ids in a file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _chunks(sized: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    total = 0

    def place_of(item: tuple[str, int]) -> int:
        nonlocal total
        total += item[1]
        return total // ENCODE_BYTES

    for _, chunk in groupby(sized, place_of):
        yield list(chunk)


def write_streams(
    folder: Path,
    corpora: tuple[Corpus, Corpus | None],
    config: Any,
    given: Tokenizer | None,
    frame: Callable[[Tokenizer], tuple[Callable[[list[str]], Iterable[Array]], dict[str, Any]]],
    *,
    special_tokens: Sequence[str],
    vocab_size: int,
    subset: int | None,
    names: tuple[str, str],
    quiet: bool,
) -> None:
    """Read documents, tokenize them and write the tokens of each part to a file of its own, beside the tokenizer and a
    manifest. corpora: the documents, and those that are held out, or a share of the others is. config: with `held_out`
    and `tokenizer_bytes`. given: None to train a tokenizer of `special_tokens` and at most `vocab_size` tokens. frame:
    gives for a tokenizer what makes the token ids of texts, about ENCODE_BYTES at a time, and its part of the manifest.
    subset: bytes to read, at most. names: of what is read and of its documents, for messages and the manifest. In a
    folder that a killed process has left, its tokenizer and tokens are kept; only the documents are gathered anew."""
    skipped, long_words, (what, unit) = Counter[str](), list[str](), names
    for corpus in filter(None, corpora):
        skipped.update(corpus.skipped)
    with Progress(quiet) as progress:
        progress.start("reading", None)
        parts, tokenizer, done = split(folder, *corpora, config.held_out, subset, skipped), given, _read_done(folder)
        if done:
            tokenizer, long_words = Tokenizer.from_file(str(folder / FILE)), done["long_words"]
        elif tokenizer is None:
            progress.start("training the tokenizer", None)
            tokenizer, long_words = train_on(parts["train"], config.tokenizer_bytes, vocab_size, special_tokens)
        replace_file(folder / FILE, tokenizer.to_str(pretty=True))
        done = done or {"long_words": long_words, "parts": {}}
        tokenizer.encode_special_tokens = True  # a "<mask>" in a text is ordinary text
        encode, manifest = frame(tokenizer)
        progress.start(f"tokenizing the {what}", sum(part.bytes for part in parts.values()))
        for name, part in parts.items():
            count, tokens = done["parts"].get(name, (0, 0))
            with open(folder / f"{name}.bin", "ab") as out:
                if out.tell() < tokens * (width := np.dtype(manifest["dtype"]).itemsize):
                    count = tokens = 0  # the disk has lost some
                out.truncate(tokens * width)
                before = int(part.numbers("size")[:count].sum())
                progress.add(before)
                if count and not quiet:
                    print(f"{what}: goes on after {before:,} of {part.bytes:,} bytes of {name}", file=sys.stderr)
                sized = ((document.text, len(document.text.encode())) for document in part.read(count))
                since = 0
                for chunk in _chunks(sized):
                    for ids in encode([text for text, _ in chunk]):
                        ids.tofile(out)
                        tokens += len(ids)
                    count += len(chunk)
                    since += (size := sum(size for _, size in chunk))
                    progress.add(size)
                    if since >= KEPT_BYTES or count == len(part):
                        out.flush()
                        os.fsync(out.fileno())
                        done["parts"][name], since = (count, tokens), 0
                        replace_file(folder / RESUME, json.dumps(done))
            manifest[name] = {unit: len(part), "bytes": part.bytes, "tokens": tokens}
    (folder / RESUME).unlink(missing_ok=True)
    write_manifest(folder, manifest | {"skipped": dict(skipped), "long_words": len(long_words)})
    if not quiet:
        train, held_out = manifest["train"], manifest["held_out"]
        lines = [
            f"{train[unit]:,} {unit} ({train['tokens']:,} tokens) to train on, {held_out[unit]:,} "
            f"({held_out['tokens']:,}) held out, {manifest['vocab_size']:,} different tokens",
            *report_skipped(skipped, long_words),
        ]
        print(*(f"{what}: {line}" for line in lines), sep="\n", file=sys.stderr)


def _read_done(folder: Path) -> dict[str, Any]:
    """What a killed process had noted in RESUME, once it was on disk; empty if there is nothing that can be read."""
    with suppress(OSError, ValueError):
        return dict(json.loads((folder / RESUME).read_text("utf-8")))
    return {}


def open_stream(folder: Path, part: str, fewest: int, expected: str) -> Array:
    """The token ids of a part, memory-mapped. Raises DataError for fewer than `fewest`; expected: says how many."""
    manifest = read_manifest(folder)
    about, tokens = manifest[part], manifest[part]["tokens"]
    if tokens < fewest:
        name, (what, count) = part.replace("_", "-"), next(iter(about.items()))
        raise DataError(
            f"expected {expected} in the {name} part, got {tokens} tokens from {count} {what}: give more text, or a "
            "smaller data.block_size"
        )
    return np.memmap(folder / f"{part}.bin", dtype=manifest["dtype"], mode="r", shape=(tokens,))


@lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> Array:
    """The order of an epoch's blocks."""
    return np.random.default_rng([seed, 0, epoch]).permutation(length)


def train_rows(blocks: int, index: int, size: int, seed: int) -> list[int]:
    """The blocks of the `index`-th batch of `size`: each epoch permutes all blocks anew."""
    epochs, offsets = np.divmod(np.arange(index * size, (index + 1) * size), blocks)
    return [int(permutation(blocks, seed, int(e))[o]) for e, o in zip(epochs, offsets, strict=True)]


class ExampleBatch(NamedTuple):
    """A padded batch: input_ids, token_type_ids (B, T) int64, attention_mask (B, T) bool, labels (B,) int64.
    token_type_ids: 1 in the second segment, else 0. attention_mask: False in the padding."""

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class Examples:
    """Tokenized examples, memory-mapped, and their batches. tokens: the concatenated ids of all. offsets (N+1,): the
    start of each, then the end of the last. boundaries (N,): length of each one's first segment, all of it for one
    text. labels (N,). Raises OSError or ValueError if the arrays are damaged."""

    def __init__(self, folder: Path, part: str, max_length: int, buckets: int, pad: int) -> None:
        self.tokens, self.offsets, self.boundaries, self.labels = (
            np.asarray(np.load(folder / f"{part}.{name}.npy", mmap_mode="r")) for name in ARRAYS
        )
        self.lengths: Array = np.diff(self.offsets)
        self.max_length, self.buckets, self.pad = max_length, buckets, pad
        if not len(self.lengths) == len(self.boundaries) == len(self.labels) or self.offsets[-1] != len(self.tokens):
            raise ValueError(f"the arrays of {folder / part} do not match")

    def __len__(self) -> int:
        return len(self.labels)

    def padded(self, length: int) -> int:
        """`length` rounded up to a bucket: a multiple of max_length / buckets, at most max_length."""
        step = -(-self.max_length // self.buckets)
        return min(-(-length // step) * step, self.max_length)

    def batch(self, rows: Array) -> ExampleBatch:
        """The examples `rows`, in this order, padded to the bucket of the longest."""
        lengths_B = self.lengths[rows]
        places_T = np.arange(self.padded(int(lengths_B.max())))
        mask_BT = places_T < lengths_B[:, None]
        ids_BT = np.full(mask_BT.shape, self.pad, np.int64)
        ids_BT[mask_BT] = self.tokens[(self.offsets[rows][:, None] + places_T)[mask_BT]]
        segments_BT = mask_BT & (places_T >= self.boundaries[rows][:, None])
        arrays = (ids_BT, segments_BT.astype(np.int64), mask_BT, self.labels[rows].astype(np.int64))
        return ExampleBatch(*(torch.from_numpy(array) for array in arrays))

    def batches_per_epoch(self, size: int) -> int:
        """Batches of `size` examples in an epoch; the last may be smaller."""
        return -(-len(self) // size)

    def shuffled(self, index: int, size: int, seed: int) -> ExampleBatch:
        """The `index`-th batch of an endless sequence of epochs; a pure function of its arguments. Each epoch has all
        examples in a new order; its last batch may be smaller."""
        epoch, place = divmod(index, self.batches_per_epoch(size))
        return self.batch(_epoch(self, size, seed, epoch)[place * size : (place + 1) * size])

    def sorted(self, size: int) -> Iterator[ExampleBatch]:
        """All examples once, sorted by length, always in the same order."""
        rows = np.argsort(self.lengths, kind="stable")
        for first in range(0, len(rows), size):
            yield self.batch(rows[first : first + size])


@lru_cache(maxsize=4)
def _epoch(examples: Examples, size: int, seed: int, epoch: int) -> Array:
    """The rows of an epoch (N,), batch after batch; those that do not fill a batch come last, unsorted."""
    rng = np.random.default_rng([seed, epoch])
    full = len(examples) // size
    rows, rest = np.split(rng.permutation(len(examples)), [full * size])
    pools = np.arange(len(rows)) // (POOL * size)
    rows = rows[np.lexsort((examples.lengths[rows], pools))]  # by pool, then by length
    batches = rows.reshape(full, size)[rng.permutation(full)]
    return np.concatenate([batches.reshape(-1), rest])


Example = tuple[Array, int, int]
"""The token ids of an example, the length of its first segment, and its label."""


def write_examples(folder: Path, part: str, examples: Sequence[Example]) -> dict[str, int]:
    """Write PART.tokens.npy and so on, as `Examples` reads them; returns the numbers of examples and tokens."""
    ids, boundaries, labels = zip(*examples, strict=True)
    tokens = np.concatenate(ids)
    arrays = {
        "tokens": tokens.astype(np.uint16) if tokens.max() < 2**16 else tokens,
        "offsets": np.cumsum([0, *map(len, ids)], dtype=np.int64),
        "boundaries": np.array(boundaries, np.int32),
        "labels": np.array(labels, np.int8 if max(labels) < 128 else np.int16),
    }
    for name in ARRAYS:
        np.save(folder / f"{part}.{name}.npy", arrays[name])
    return {"examples": len(examples), "tokens": len(tokens)}
