"""Text or code as one stream of tokens, cut into blocks, for next-token prediction.

    documents -> training | held-out (by a hash of the name or the row) -> byte-level BPE -> one stream

Preparation is deterministic and happens once: tokens and tokenizer stay in a cache folder named by a digest of contents
and settings. Block i reads tokens i T .. i T + T - 1 and predicts each one's successor, so every token but the first is
predicted once. Batches are pure functions of their index, so a resumed run sees the same ones.
B batch, T block size, V vocabulary."""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from comera.errors import ConfigError, check_fields
from comera.files import typed_path
from comera.recipes.data import prepared
from comera.recipes.data.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.data.documents import TEXT_SUFFIXES, Corpus, TextReader, open_corpus
from comera.recipes.lm.ngrams import ngram_losses
from comera.recipes.lm.tokenizer import (
    BYTES,
    END_OF_TEXT,
    ByteTable,
    byte_tokenizer,
    read_tokenizer,
    separator_of,
    size_of,
)

FORMAT = 1  # of the cache folders; raise it when their contents, or how they are made, change
HELD_OUT_SEED = 0x5EED  # the same order of held-out blocks for every method and every training seed
NGRAM_BYTES = 16_000_000  # of the training part, at most, that n-grams are counted in
DEFAULT_VOCABULARY = 8192


@dataclass(frozen=True)
class LMDataConfig:
    """Text or code, and how it becomes blocks of tokens."""

    path: str | None = None
    """File or folder of text or code (.txt, .md, .py, ..., .jsonl, also .gz), a table (.csv, .tsv), a folder written by
    save_to_disk of Hugging Face's datasets, or the name of a data set on their hub; default: Python's own standard
    library."""
    held_out_path: str | None = None
    """The same, of held-out text; default: a fraction of the documents in path."""
    held_out: float = 0.05
    """Fraction of the documents held out of training, without held_out_path. Large files count as several documents."""
    suffixes: tuple[str, ...] = TEXT_SUFFIXES
    """File name suffixes to read in a folder; .csv and .tsv are not among the default ones."""
    text_field: str = "text"
    """Field of JSON lines, column of tables and data sets that holds the text."""
    subset: str | None = None
    """Subset of a data set on the hub, for those that have several."""
    max_bytes: int | None = None
    """Read only a random subset of the documents, of about this many bytes; the same subset every time."""
    tokenizer: str | None = None
    """A tokenizer.json of a byte-level tokenizer, or a folder with one; default: trained on the training part."""
    vocab_size: int | None = None
    """Tokens of the vocabulary, the separator of documents and the 256 bytes included; 256 means plain bytes, with byte
    0 between documents. Default: 8192, or those of the given tokenizer."""
    tokenizer_bytes: int = 4_000_000
    """Bytes of training text to train the tokenizer on."""
    block_size: int = 256
    """Tokens in a block: the sequence length."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "suffixes", tuple(self.suffixes))
        checks = {
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "suffixes": (bool(self.suffixes), "at least one suffix, such as .txt"),
            "max_bytes": (self.max_bytes is None or self.max_bytes > 0, "a number > 0, or none"),
            "vocab_size": (self.vocab_size is None or self.vocab_size >= BYTES, f"at least {BYTES}"),
            "tokenizer_bytes": (self.tokenizer_bytes > 0, "a number > 0"),
            "block_size": (self.block_size >= 2, "at least 2 tokens"),
        }
        check_fields(self, "data.", checks)

    def given_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that is not to be trained; raises ConfigError if it does not have `vocab_size` tokens."""
        if self.tokenizer is None:
            return byte_tokenizer() if self.vocab_size == BYTES else None
        tokenizer = read_tokenizer(typed_path(self.tokenizer, "data.tokenizer"))
        if self.vocab_size not in (None, size_of(tokenizer)):
            raise ConfigError(
                f"data.vocab_size: expected the {size_of(tokenizer):,} tokens of {self.tokenizer}, got "
                f"{self.vocab_size:,}: leave data.vocab_size out, or data.tokenizer"
            )
        return tokenizer

    def expected_vocabulary(self) -> int:
        """Tokens of the vocabulary, before the data is prepared: a small text can give fewer."""
        given = self.given_tokenizer()
        return size_of(given) if given else self.vocab_size or DEFAULT_VOCABULARY


class Batch(NamedTuple):
    """input_ids (B, T) and labels (B, T), their successors, int64; sizes (B,): bytes that a row's labels stand for."""

    input_ids: Tensor
    labels: Tensor
    sizes: Tensor


class LMData:
    """Prepared text. train, held_out: streams of token ids, memory-mapped. manifest: where they come from."""

    def __init__(self, folder: Path, config: LMDataConfig) -> None:
        self.config, self.folder = config, folder
        self.manifest = prepared.read_manifest(folder)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.separator: int = self.manifest["separator"]
        self.tokenizer = read_tokenizer(folder)
        self.bytes = ByteTable(self.tokenizer, self.separator)
        width = config.block_size
        self.train, self.held_out = (
            prepared.open_stream(folder, part, width + 1, f"more than one block of {width} tokens")
            for part in ("train", "held_out")
        )

    def blocks(self, stream: np.ndarray[Any, Any]) -> int:
        """How many blocks a stream has; what does not fill one at its end is dropped."""
        return (len(stream) - 1) // self.config.block_size

    def train_batch(self, index: int, size: int, seed: int) -> Batch:
        """The `index`-th batch of `size` blocks; each epoch permutes all blocks anew."""
        return self._batch(self.train, prepared.train_rows(self.blocks(self.train), index, size, seed))

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """All held-out blocks in batches of `size`, the last one smaller; their order depends on the data alone."""
        order = prepared.permutation(self.blocks(self.held_out), HELD_OUT_SEED, 0)
        for first in range(0, len(order), size):
            yield self._batch(self.held_out, order[first : first + size])

    def _batch(self, stream: np.ndarray[Any, Any], rows: Any) -> Batch:
        ids = self._rows(stream, np.asarray(rows))
        sizes = self.bytes.lengths[ids[:, 1:]].sum(1)
        return Batch(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (ids[:, :-1], ids[:, 1:], sizes)))

    def _rows(self, stream: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The tokens of blocks and their last successors, (B, T + 1) int64."""
        width = self.config.block_size
        return stream[rows[:, None] * width + np.arange(width + 1)].astype(np.int64)

    def ngram_losses(self, size: int, batches: int = 0) -> dict[str, float]:
        """What byte n-grams reach, in nats per byte, on exactly the bytes that `batches` held-out batches of `size`
        score (0: all of them), counted in up to NGRAM_BYTES of the training part, in evenly spaced blocks. Computed
        once and kept in the cache, in a folder of its own."""
        order = prepared.permutation(self.blocks(self.held_out), HELD_OUT_SEED, 0)
        scored = order[: size * batches] if batches else order

        def write(folder: Path) -> None:
            (folder / "losses.json").write_text(json.dumps(self._ngram_losses(scored)), "utf-8")

        return open_or_make(
            self.folder.with_name(f"{self.folder.name}-ngrams-{self.config.block_size}-{len(scored)}"),
            lambda folder: json.loads((folder / "losses.json").read_text("utf-8")),
            write,
        )

    def _ngram_losses(self, scored: np.ndarray[Any, Any]) -> dict[str, float]:
        blocks = self.blocks(self.train)
        bytes_per_block = max(1, self.manifest["train"]["bytes"] // blocks)
        train = self._rows(self.train, np.arange(0, blocks, -(-blocks * bytes_per_block // NGRAM_BYTES)))[:, :-1]
        ids = self._rows(self.held_out, scored)
        lengths = self.bytes.lengths[ids]
        return ngram_losses(self.bytes.bytes_of(train), self.bytes.bytes_of(ids), lengths.sum(1), lengths[:, 0])


def prepare(config: LMDataConfig, *, quiet: bool = False) -> LMData:
    """Read, tokenize and cache the text that `config` names; a second call with the same contents opens the cache. One
    process prepares while the others wait; a killed one leaves nothing that looks complete. Raises DataError for text
    that is missing or too little, ConfigError for a tokenizer or a library that is."""
    path = typed_path(sysconfig.get_paths()["stdlib"] if config.path is None else config.path, "data.path")
    settings = (config.suffixes, TextReader(config.text_field), config.subset)
    corpus, apart = open_corpus(path, "data.path", *settings), None
    if config.held_out_path is not None:
        apart = open_corpus(typed_path(config.held_out_path, "data.held_out_path"), "data.held_out_path", *settings)
    given = config.given_tokenizer()
    vocabulary = given.to_str() if given else config.vocab_size or DEFAULT_VOCABULARY
    share = apart.identity if apart else config.held_out
    digest = settings_digest([FORMAT, vocabulary, config.tokenizer_bytes, config.max_bytes, share, corpus.identity])
    return open_or_make(
        cache_folder(config.cache) / f"text-{digest}",
        lambda folder: LMData(folder, config),
        lambda folder: _write(folder, corpus, apart, given, config, quiet),
    )


def _write(
    folder: Path, corpus: Corpus, apart: Corpus | None, given: Tokenizer | None, config: LMDataConfig, quiet: bool
) -> None:
    def frame(tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
        separator = separator_of(tokenizer)
        lengths = ByteTable(tokenizer, separator).lengths
        dtype = prepared.id_dtype(len(lengths))

        def encode(texts: list[str]) -> Iterator[np.ndarray[Any, Any]]:
            for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                ids = np.array([*encoding.ids, separator], dtype)
                if lengths[ids].sum() != len(text.encode()) + 1:
                    raise ConfigError(
                        f"data.tokenizer: expected tokens that stand for exactly the bytes of a text, got others for "
                        f"{text[:60]!r} from {config.tokenizer}: give a byte-level tokenizer that does not normalize"
                    )
                yield ids

        return encode, {"format": FORMAT, "vocab_size": len(lengths), "separator": separator, "dtype": dtype.name}

    size = config.vocab_size or DEFAULT_VOCABULARY
    how: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "vocab_size": size, "subset": config.max_bytes}
    names = ("text", "documents")
    prepared.write_streams(folder, (corpus, apart), config, given, frame, **how, names=names, quiet=quiet)
