"""Functions as masked sequences: single ones, and pairs of a docstring and its function (CodeBERT's form).

    documents -> training | held-out -> functions -> <s> code </s> or <s> docstring </s> code </s>, cut -> arrays

Each sequence holds one example, and a batch examples of near-equal length, padded to one of a few lengths. Packed
blocks, as of whole files, would have no padding, but would cut pairs in two at their ends, and show a function others
that no user of the encoder puts beside it; and among examples of near-equal length there is little padding.
Batches are pure functions of their place in the run, so a resumed run sees the same ones.
B batch, T tokens of a padded example, P masked positions, N examples, V vocabulary."""

import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from comera.errors import DataError
from comera.recipes.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.code_lm.config import CodeDataConfig
from comera.recipes.code_lm.functions import mined
from comera.recipes.code_lm.masking import HELD_OUT_SEED, Array, Masking
from comera.recipes.code_lm.vocabulary import SPECIAL_TOKENS, Special, frame_, run_files
from comera.recipes.corpus import as_text, permutation, sample_texts, train_tokenizer
from comera.recipes.examples import Examples, ExampleWriter
from comera.recipes.paths import typed_path
from comera.recipes.progress import Progress
from comera.recipes.sources import Corpus, Document, Part, joined, open_corpus, sample, split, text_of
from comera.recipes.tokenizer_files import FILE
from comera.recipes.tokenizers import BYTE_ROLES, TextTokenizer

FORMAT = 1  # of the cache folder; raise it when its contents, or how they are made, change
BUCKETS = 8  # lengths that batches are padded to
ENCODE_EXAMPLES = 4096  # per call of the tokenizer: bounds memory, and keeps all cores busy
COUNTED_TOKENS = 2**23  # of the training part, at most, that the frequencies are taken from
IGNORED = -100  # a label that no loss counts
SINGLE, PAIR = range(2)  # labels of the stored examples

# Columns of CodeSearchNet: of its files, and of the data set on the hub.
CODE_FIELDS = ("original_string", "whole_func_string", "func_code_string", "code")
DOCSTRING_FIELDS = ("docstring", "func_documentation_string")
PATH_FIELDS = ("path", "func_path_in_repository")


class FunctionReader(NamedTuple):
    """Files of Python are documents; in rows, one field holds a function and another one its docstring. code,
    docstring: names of the fields; None: the first known one."""

    code: str | None
    docstring: str | None

    @property
    def identity(self) -> list[str | None]:
        return [self.code, self.docstring]

    def file(self, path: str, text: str) -> Iterator[Document]:
        yield Document(path, text)

    def row(self, row: Any, rows: Counter[str]) -> Iterator[Document]:
        code = self._field(row, self.code, CODE_FIELDS, "data.code_field")
        docstring = self._field(row, self.docstring, DOCSTRING_FIELDS, "data.docstring_field")
        if code is None and docstring is None and row:
            raise DataError(
                f"expected rows with a function in one of the fields {', '.join(CODE_FIELDS)}, got one with "
                f"{', '.join(map(repr, row))}: set data.code_field"
            )
        texts = [
            "" if name is None or row[name] is None else text_of(row, name, option, rows)
            for name, option in ((code, "data.code_field"), (docstring, "data.docstring_field"))
        ]
        if None in texts:
            return
        function, comment = (text or "" for text in texts)
        if not function.strip():
            rows["rows without_code"] += 1
            return
        # All functions of a file are on the same side, where it is known: they resemble one another.
        path = next((row[name] for name in PATH_FIELDS if isinstance(row.get(name), str) and row[name]), function)
        yield Document(path, function, comment)

    def _field(self, row: Any, named: str | None, known: tuple[str, ...], option: str) -> str | None:
        if named is None:
            return next((name for name in known if name in row), None)
        if named not in row:
            raise DataError(
                f"{option}: expected rows with the field {named!r}, got one with {', '.join(map(repr, row)) or 'none'}"
            )
        return named


class PaddedBatch(NamedTuple):
    """One masked batch: input_ids (B, T) int64; attention_mask (B, T) bool, False in the padding; positions (P,) int64
    into the flattened ids; labels (P,) int64. P follows from B and T alone, so that steps have few shapes; where the
    padding leaves fewer tokens to mask, the last labels are IGNORED."""

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    labels: Tensor


class FunctionData:
    """Prepared functions: training and held-out examples, memory-mapped, and their tokenizer. manifest: where they come
    from."""

    def __init__(self, folder: Path, config: CodeDataConfig) -> None:
        self.config, self.folder = config, folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self.vocab_size: int = self.manifest["vocab_size"]
        self.special = Special(*self.manifest["special"])
        self.masking = Masking(self.vocab_size, self.special)
        self.train, self.held_out = (
            Examples(folder, part, config.block_size, BUCKETS, self.special.pad) for part in ("train", "held_out")
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The given tokenizer, or a byte-level BPE that was trained on the training part."""
        return Tokenizer.from_file(str(self.folder / FILE))

    def files(self, longest: int) -> dict[str, str]:
        """Files of the run: the tokenizer. longest: tokens of a text."""
        return run_files(self.tokenizer, longest, self.manifest["roles"])

    def log_frequencies(self) -> Tensor:
        """Log of each token's frequency in the training part, float32 (V,): counted over up to COUNTED_TOKENS evenly
        spaced ones, plus one per token so that none is impossible."""
        tokens = self.train.tokens[:: -(-len(self.train.tokens) // COUNTED_TOKENS)]
        counts = np.bincount(tokens, minlength=self.vocab_size) + 1.0
        return torch.from_numpy(np.log(counts / counts.sum())).float()

    def steps_per_epoch(self, size: int, processes: int = 1) -> int:
        """Steps that cover all training examples, with `processes` batches per step."""
        return -(-self.train.batches_per_epoch(size) // processes)

    def train_batch(self, index: int, size: int, seed: int) -> PaddedBatch:
        """The `index`-th batch of `size` examples of near-equal length; each epoch has all of them in a new order, its
        last batch may be smaller, and new masks are drawn."""
        examples = self.train.shuffled(index, size, seed)
        ids_BT = examples.input_ids.numpy()
        flat, rng = ids_BT.reshape(-1), np.random.default_rng([seed, 1, index])
        count = max(1, round(self.config.mask_share * len(self.masking.candidates(flat))))
        return self._padded(ids_BT, examples.attention_mask, *self.masking.mask_(flat, count, rng))

    def held_out_batches(self, size: int) -> Iterator[PaddedBatch]:
        """All held-out examples in batches of `size`, of near-equal length, in an order in which the first few batches
        represent all. Masks depend on the data alone, not on the seed, the method or the batch size."""
        order = np.argsort(self.held_out.lengths, kind="stable")
        batches = [order[first : first + size] for first in range(0, len(order), size)]
        for place in permutation(len(batches), HELD_OUT_SEED, 0):
            examples = self.held_out.batch(batches[place])
            ids_BT = examples.input_ids.numpy()
            width, places, labels = ids_BT.shape[1], list[Array](), list[Array]()
            for k, (row, ids_T) in enumerate(zip(batches[place], ids_BT, strict=True)):
                count = max(1, round(self.config.mask_share * len(self.masking.candidates(ids_T))))
                own, hidden = self.masking.mask_(ids_T, count, np.random.default_rng([HELD_OUT_SEED, 1, int(row)]))
                places.append(own + k * width)
                labels.append(hidden)
            flat = np.concatenate(places), np.concatenate(labels)
            yield self._padded(ids_BT, examples.attention_mask, *flat)

    def _padded(self, ids_BT: Array, mask_BT: Tensor, positions: Array, labels: Array) -> PaddedBatch:
        count = max(len(positions), masked_at_most(self.config.mask_share, ids_BT.size))
        positions_P, labels_P = np.zeros(count, np.int64), np.full(count, IGNORED, np.int64)
        positions_P[: len(positions)], labels_P[: len(labels)] = positions, labels
        return PaddedBatch(torch.from_numpy(ids_BT), mask_BT, torch.from_numpy(positions_P), torch.from_numpy(labels_P))


def masked_at_most(share: float, tokens: int) -> int:
    """Masked positions of a batch of so many tokens, padding included."""
    return max(1, round(share * tokens))


def prepare_functions(config: CodeDataConfig, *, quiet: bool = False) -> FunctionData:
    """Mine, tokenize and cache the functions that `config` names; a second call with the same contents opens the cache.
    One process prepares while the others wait; a killed one leaves nothing that looks complete. Says what was skipped
    or cut. Raises DataError for a path that is missing or without functions, ConfigError for a tokenizer that is of no
    use."""
    corpus, given = _corpus(config), config.given_tokenizer()
    vocabulary = [given.tokenizer.to_str(), dict(given.roles)] if given else [config.vocab_size, config.tokenizer_bytes]
    settings: list[object] = [FORMAT, vocabulary, config.held_out, config.max_bytes, config.block_size, corpus.identity]
    data = open_or_make(
        cache_folder(config.cache) / f"functions-{settings_digest(settings)}",
        lambda folder: FunctionData(folder, config),
        lambda folder: _write(folder, corpus, given, config, quiet),
    )
    if not quiet:
        print(*(f"functions: {line}" for line in _about(data)), sep="\n", file=sys.stderr)
    return data


def _corpus(config: CodeDataConfig) -> Corpus:
    """The documents to mine: those of data.path, else the standard library and the installed packages."""
    reader = FunctionReader(config.code_field, config.docstring_field)
    roots = [config.path]
    if config.path is None:
        paths = sysconfig.get_paths()
        roots = [root for root in dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib"))
                 if Path(root).is_dir()]  # fmt: skip
    return joined(
        [
            open_corpus(typed_path(root, "data.path"), "data.path", config.suffixes, reader, config.subset)
            for root in roots
            if root is not None
        ]
    )


def _write(folder: Path, corpus: Corpus, given: TextTokenizer | None, config: CodeDataConfig, quiet: bool) -> None:
    skipped = Counter({f"files {reason}": count for reason, count in corpus.skipped.items()})
    long_words: list[str] = []
    with Progress(quiet) as progress:
        progress.start("reading", None)
        parts = split(corpus, None, config.held_out, config.max_bytes, skipped)
        tokenizer = given or _trained(parts["train"], config, long_words, progress)
        frame_(tokenizer.tokenizer, tokenizer.roles)
        (folder / FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), "utf-8")
        special, cutting = Special.of(tokenizer), tokenizer.cutting(config.block_size)
        masking = Masking(tokenizer.size, special)
        manifest: dict[str, Any] = {"format": FORMAT, "vocab_size": tokenizer.size, "special": list(special)}
        manifest |= {"roles": dict(tokenizer.roles), "sources": corpus.name}
        progress.start("mining functions", sum(part.bytes for part in parts.values()))
        seen: set[bytes] = set()
        for name, part in parts.items():
            writer, pairs, cut = ExampleWriter(), 0, 0
            examples = mined(_watched(part, progress), skipped, seen)
            while chunk := list(islice(examples, ENCODE_EXAMPLES)):
                texts: list[Any] = [(each.docstring, each.code) if each.docstring else each.code for each in chunk]
                for text, encoding in zip(texts, cutting.encode_batch_fast(texts), strict=True):
                    if not len(masking.candidates(np.array(encoding.ids))):
                        skipped["functions without_tokens"] += 1
                        continue
                    kind = PAIR if isinstance(text, tuple) else SINGLE
                    pairs, cut = pairs + (kind == PAIR), cut + bool(encoding.overflowing)
                    writer.add(encoding.ids, len(encoding.ids), kind)
            if not len(writer):
                raise DataError(
                    f"expected functions in the {name.replace('_', '-')} part of {corpus.name}, got none (skipped: "
                    f"{as_text(skipped) or 'none'}): check data.path, data.suffixes, data.max_bytes and data.held_out"
                )
            manifest[name] = {**writer.write(folder, name), "files": part.documents, "pairs": pairs, "cut": cut}
    manifest |= {"skipped": dict(skipped), "long_words": len(long_words)}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _watched(part: Part, progress: Progress) -> Iterator[Document]:
    for document in part.read():
        yield document
        progress.add(len(document.text.encode()))


def _trained(train: Part, config: CodeDataConfig, long_words: list[str], progress: Progress) -> TextTokenizer:
    """A byte-level BPE, trained on a random but fixed subset of the training documents."""
    progress.start("training the tokenizer", None)
    texts = sample_texts(sample(train, config.tokenizer_bytes), config.tokenizer_bytes, long_words)
    return TextTokenizer(train_tokenizer(texts, config.vocab_size, SPECIAL_TOKENS), BYTE_ROLES)


def _about(data: FunctionData) -> Iterator[str]:
    """What was read, skipped and cut."""
    manifest = data.manifest
    for name, about in ((name, manifest[name]) for name in ("train", "held_out")):
        yield (
            f"{about['examples']:,} {name.replace('_', '-')} examples ({about['pairs']:,} pairs, {about['tokens']:,} "
            f"tokens) from {about['files']:,} files or rows; {about['cut']:,} cut to {data.config.block_size} tokens"
        )
    if any(manifest["skipped"].values()):
        yield f"skipped: {as_text(manifest['skipped'])}"
    if manifest["long_words"]:
        yield f"the tokenizer was not trained on {manifest['long_words']:,} texts with very long words"
