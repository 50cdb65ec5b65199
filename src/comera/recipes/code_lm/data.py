"""Source code as sequences of tokens, and masked batches of them for BERT-style pre-training.

    form files       files -> training | held-out -> byte-level BPE -> <s> file </s> <s> file </s> ... -> blocks
    form functions   documents -> training | held-out -> functions -> <s> code </s> or <s> docstring </s> code </s>, cut

A sequence of functions holds one example, and a batch examples of near-equal length, padded to one of a few lengths.
Packed blocks, as of whole files, would have no padding, but would cut pairs in two at their ends, and show a function
others that no user of the encoder puts beside it; and among examples of near-equal length there is little padding.
Preparation is deterministic and happens once. Batches are pure functions of their place in the run, so a resumed run
sees the same ones.
B batch, T block size or tokens of a padded example, P masked positions, N examples, V vocabulary."""

import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from comera.errors import ConfigError, DataError, check_fields
from comera.files import typed_path
from comera.recipes.code_lm.functions import mined
from comera.recipes.code_lm.masking import (
    HELD_OUT_SEED,
    ROLES,
    SPECIAL_TOKENS,
    Array,
    Masking,
    Special,
    frame_,
    run_files,
)
from comera.recipes.data import documents, prepared
from comera.recipes.data.cache import Progress, cache_folder, open_or_make, settings_digest
from comera.recipes.data.tokenizer import BYTE_ROLES, FILE, TextTokenizer, given_tokenizer, train_on

FORMATS = {"files": 2, "functions": 1}  # of the cache folders; raise them when contents, or how they are made, change
BUCKETS = 8  # lengths that batches of functions are padded to
COUNTED_TOKENS = 2**23  # of the functions to train on, at most, that the frequencies are taken from
IGNORED = -100  # a label that no loss counts
SINGLE, PAIR = range(2)  # labels of the stored functions

# Columns of CodeSearchNet: of its files, and of the data set on the hub.
CODE_FIELDS = ("original_string", "whole_func_string", "func_code_string", "code")
DOCSTRING_FIELDS = ("docstring", "func_documentation_string")
PATH_FIELDS = ("path", "func_path_in_repository")

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256  # a byte-level BPE starts with the 256 bytes
FEWEST_TOKENS = {"files": 4, "functions": 8}  # of a sequence: a pair has three special ones
Form = Literal["files", "functions"]


@dataclass(frozen=True)
class CodeDataConfig:
    """The source code and how it becomes sequences of tokens."""

    form: Form = "files"
    """files: whole files, packed into blocks; functions: single functions and pairs of a docstring and its function,
    one in each sequence."""
    path: str | None = None
    """Folder of source code, including subfolders; a file of JSON lines, CSV or TSV (also .gz), a folder written by
    save_to_disk of Hugging Face's datasets, or the name of a data set on their hub, with a source file in each row, or
    of form functions a function; default: Python's own standard library, and for functions the installed packages."""
    suffixes: tuple[str, ...] = documents.SUFFIXES
    """File name suffixes to read in a folder. Functions are mined from Python alone; .jsonl and .jsonl.gz hold rows."""
    text_field: str = "text"
    """Field of JSON lines, column of tables and data sets that holds the source code; form files."""
    code_field: str | None = None
    """The same for the function in a row of form functions; default: the first of original_string, whole_func_string,
    func_code_string and code that a row has."""
    docstring_field: str | None = None
    """And for its docstring; default: docstring or func_documentation_string. Without any, that in the code."""
    subset: str | None = None
    """Subset of a data set on the hub, for those that have several."""
    max_bytes: int | None = None
    """Read only a random subset of the files or rows, of at most about this many bytes; the same subset every time."""
    held_out: float = 0.05
    """Fraction of the files or rows held out of training, to measure the loss on."""
    tokenizer: str | None = None
    """Folder with RoBERTa's vocab.json and merges.txt, with vocab.txt or with tokenizer.json, or one of the latter two;
    default: trained on the training part."""
    vocab_size: int = 8192
    """Tokens of the vocabulary: of the byte-level BPE to train, including five special tokens and the 256 bytes, or of
    the given tokenizer."""
    tokenizer_bytes: int = 4_000_000
    """Bytes of training files to train the tokenizer on."""
    block_size: int = 128
    """Tokens in a block: the sequence length; longer functions are cut."""
    mask_share: float = 0.15
    """Fraction of the tokens that are masked and predicted."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "suffixes", tuple(self.suffixes))
        fewest = FEWEST_TOKENS.get(self.form, 0)
        checks = {
            "form": (self.form in FEWEST_TOKENS, f"one of {', '.join(FEWEST_TOKENS)}"),
            "suffixes": (bool(self.suffixes), "at least one suffix, such as .py"),
            "max_bytes": (self.max_bytes is None or self.max_bytes > 0, "a number > 0, or none"),
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "vocab_size": (self.vocab_size >= SMALLEST_VOCABULARY, f"at least {SMALLEST_VOCABULARY}"),
            "tokenizer_bytes": (self.tokenizer_bytes > 0, "a number > 0"),
            "block_size": (self.block_size >= fewest, f"at least {fewest} tokens"),
            "mask_share": (0 < self.mask_share < 0.3, "a fraction between 0 and 0.3"),
        }
        check_fields(self, "data.", checks)
        named = {name for name in ("code_field", "docstring_field") if getattr(self, name) is not None}
        if self.form == "files" and named:
            raise ConfigError(f"data.{min(named)} is for data.form functions: set data.text_field, or data.form")
        if self.form == "functions" and self.text_field != CodeDataConfig.text_field:
            raise ConfigError("data.text_field is for data.form files: set data.code_field and data.docstring_field")

    def given_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer that is not to be trained. Raises ConfigError for one without the special tokens that masked
        language modeling needs, and of another size than `vocab_size`."""
        if self.tokenizer is None:
            return None
        found = given_tokenizer(typed_path(self.tokenizer, "data.tokenizer"), "data.tokenizer")
        Special.of(found)
        if found.size != self.vocab_size:
            raise ConfigError(
                f"data.vocab_size: expected the {found.size:,} tokens of {self.tokenizer}, got {self.vocab_size:,}: "
                f"set data.vocab_size to {found.size}"
            )
        return found


class FunctionReader(NamedTuple):
    """Files of Python are documents; in rows, one field holds a function and another one its docstring. code,
    docstring: names of the fields; None: the first known one."""

    code: str | None
    docstring: str | None

    @property
    def identity(self) -> list[str | None]:
        return [self.code, self.docstring]

    def file(self, path: str, text: TextIO) -> Iterator[documents.Document]:
        yield documents.Document(path, text.read())

    def row(self, row: Any, rows: Counter[str]) -> Iterator[documents.Document]:
        options = {
            "data.code_field": (self.code, CODE_FIELDS),
            "data.docstring_field": (self.docstring, DOCSTRING_FIELDS),
        }
        for option, (named, _) in options.items():
            if named is not None and named not in row:
                fields = ", ".join(map(repr, row)) or "none"
                raise DataError(f"{option}: expected rows with the field {named!r}, got one with {fields}")
        names = [named or next((name for name in known if name in row), None) for named, known in options.values()]
        if names == [None, None] and row:
            raise DataError(
                f"expected rows with a function in one of the fields {', '.join(CODE_FIELDS)}, got one with "
                f"{', '.join(map(repr, row))}: set data.code_field"
            )
        texts = [
            "" if name is None or row[name] is None else documents.text_of(row, name, option, rows)
            for name, option in zip(names, options, strict=True)
        ]
        if None in texts:
            return
        function, comment = (text or "" for text in texts)
        if not function.strip():
            rows["rows without_code"] += 1
            return
        # All functions of a file are on the same side, where it is known: they resemble one another.
        path = next((row[name] for name in PATH_FIELDS if isinstance(row.get(name), str) and row[name]), function)
        yield documents.Document(path, function, comment)


class Batch(NamedTuple):
    """One masked batch, all int64: input_ids (B, T); positions (P,) into the flattened ids; labels (P,)."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor


class PaddedBatch(NamedTuple):
    """One masked batch: input_ids (B, T) int64; attention_mask (B, T) bool, False in the padding; positions (P,) int64
    into the flattened ids; labels (P,) int64. P follows from B and T alone, so that steps have few shapes; where the
    padding leaves fewer tokens to mask, the last labels are IGNORED."""

    input_ids: Tensor
    attention_mask: Tensor
    positions: Tensor
    labels: Tensor


class Prepared:
    """Prepared source code and its tokenizer. folder: where it lies. manifest: where it comes from."""

    def __init__(self, folder: Path, config: CodeDataConfig) -> None:
        self.config, self.folder, self.manifest = config, folder, prepared.read_manifest(folder)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.special = Special(*self.manifest.get("special", ()))  # of a given tokenizer
        self.masking = Masking(self.vocab_size, self.special)

    @property
    def tokenizer(self) -> Tokenizer:
        """The given tokenizer, or a byte-level BPE that was trained on the training part."""
        return Tokenizer.from_file(str(self.folder / FILE))

    def files(self, longest: int) -> dict[str, str]:
        """Files of the run: the tokenizer. longest: tokens of a text."""
        return run_files(self.tokenizer, longest, self.manifest.get("roles", ROLES))

    def _mask_each_(self, ids_BT: Array, rows: Array, count: int | None = None) -> tuple[Array, Array]:
        """Mask held-out sequences in place, by their numbers alone; returns the places in all of them and what stood
        there. count: tokens of each to mask; None: as many as the share says."""
        places, labels = list[Array](), list[Array]()
        for k, (row, ids_T) in enumerate(zip(rows, ids_BT, strict=True)):
            own = count or max(1, round(self.config.mask_share * len(self.masking.candidates(ids_T))))
            positions, hidden = self.masking.mask_(ids_T, own, np.random.default_rng([HELD_OUT_SEED, 1, int(row)]))
            places.append(positions + k * ids_BT.shape[1])
            labels.append(hidden)
        return np.concatenate(places), np.concatenate(labels)

    def _log_frequencies(self, tokens: Array) -> Tensor:
        counts = np.bincount(tokens.reshape(-1), minlength=self.vocab_size) + 1.0
        return torch.from_numpy(np.log(counts / counts.sum())).float()


class CodeData(Prepared):
    """Whole files. train, held_out: (blocks, T) arrays of token ids, memory-mapped."""

    def __init__(self, folder: Path, config: CodeDataConfig) -> None:
        super().__init__(folder, config)
        self.train, self.held_out = self._blocks("train"), self._blocks("held_out")

    def _blocks(self, part: str) -> Array:
        width = self.config.block_size
        flat = prepared.open_stream(self.folder, part, width, f"at least one block of {width} tokens")
        return flat[: len(flat) // width * width].reshape(-1, width)

    def log_frequencies(self) -> Tensor:
        """Log of each token's frequency in the training part, float32 (V,): counted over up to 65,536 evenly spaced
        blocks, plus one per token so that none is impossible."""
        return self._log_frequencies(self.train[:: -(-len(self.train) // 65_536)])

    def train_batch(self, index: int, size: int, seed: int) -> Batch:
        """The `index`-th batch of `size` blocks; each epoch permutes all blocks anew and draws new masks."""
        rows = prepared.train_rows(len(self.train), index, size, seed)
        count = max(1, round(self.config.mask_share * size * self.config.block_size))
        ids_BT = self.train[rows].astype(np.int64)
        masked = self.masking.mask_(ids_BT.reshape(-1), count, np.random.default_rng([seed, 1, index]))
        return Batch(*map(torch.from_numpy, (ids_BT, *masked)))

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out part in batches of `size` blocks, or one smaller batch if there are fewer. Blocks that do not
        fill the last batch are dropped, so the mean over batches is the mean over blocks. Blocks and masks depend on
        the data alone, not on the seed, the method or the batch size."""
        order = prepared.permutation(len(self.held_out), HELD_OUT_SEED, 0)
        count = max(1, round(self.config.mask_share * self.config.block_size))
        for first in range(0, max(1, len(order) - size + 1), size):
            rows = order[first : first + size]
            ids_BT = self.held_out[rows].astype(np.int64)
            yield Batch(*map(torch.from_numpy, (ids_BT, *self._mask_each_(ids_BT, rows, count))))


class FunctionData(Prepared):
    """Functions. train, held_out: examples, memory-mapped."""

    def __init__(self, folder: Path, config: CodeDataConfig) -> None:
        super().__init__(folder, config)
        self.train, self.held_out = (
            prepared.Examples(folder, part, config.block_size, BUCKETS, self.special.pad)
            for part in ("train", "held_out")
        )

    def log_frequencies(self) -> Tensor:
        """The same of up to COUNTED_TOKENS evenly spaced tokens."""
        return self._log_frequencies(self.train.tokens[:: -(-len(self.train.tokens) // COUNTED_TOKENS)])

    def steps_per_epoch(self, size: int, processes: int = 1) -> int:
        """Steps that cover all training examples, with `processes` batches per step."""
        return -(-self.train.batches_per_epoch(size) // processes)

    def train_batch(self, index: int, size: int, seed: int) -> PaddedBatch:
        """The `index`-th batch of `size` examples of near-equal length, see `Examples.shuffled`, with new masks."""
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
        for place in prepared.permutation(len(batches), HELD_OUT_SEED, 0):
            examples = self.held_out.batch(batches[place])
            ids_BT = examples.input_ids.numpy()
            yield self._padded(ids_BT, examples.attention_mask, *self._mask_each_(ids_BT, batches[place]))

    def _padded(self, ids_BT: Array, mask_BT: Tensor, positions: Array, labels: Array) -> PaddedBatch:
        count = max(len(positions), masked_at_most(self.config.mask_share, ids_BT.size))
        positions_P, labels_P = np.zeros(count, np.int64), np.full(count, IGNORED, np.int64)
        positions_P[: len(positions)], labels_P[: len(labels)] = positions, labels
        return PaddedBatch(torch.from_numpy(ids_BT), mask_BT, torch.from_numpy(positions_P), torch.from_numpy(labels_P))


def masked_at_most(share: float, tokens: int) -> int:
    """Masked positions of a batch of so many tokens, padding included."""
    return max(1, round(share * tokens))


def prepare(config: CodeDataConfig, *, quiet: bool = False) -> CodeData | FunctionData:
    """Read, tokenize and cache the source code that `config` names, in its form; a second call with the same contents
    opens the cache. One process prepares while the others wait; a killed one leaves nothing that looks complete. Says
    what was skipped or cut. Raises DataError for a path that is missing, or without enough code, ConfigError for a
    tokenizer that is of no use."""
    given, subset = config.given_tokenizer(), config.max_bytes
    own = [given.tokenizer.to_str(), dict(given.roles)] if given else []
    settings: list[Any] = [FORMATS[config.form]]
    if config.form == "functions":
        corpus = _functions_corpus(config)
        settings += [own or [config.vocab_size, config.tokenizer_bytes], config.held_out, subset, config.block_size]
        folder = cache_folder(config.cache) / f"functions-{settings_digest([*settings, corpus.identity])}"
        data = open_or_make(
            folder,
            lambda folder: FunctionData(folder, config),
            lambda folder: _write_functions(folder, corpus, given, config, quiet),
        )
        if not quiet:
            print(*(f"functions: {line}" for line in _about(data)), sep="\n", file=sys.stderr)
        return data
    root = typed_path(sysconfig.get_paths()["stdlib"] if config.path is None else config.path, "data.path")
    settings += [config.vocab_size, config.tokenizer_bytes, config.held_out, *own]
    if root.is_dir() and not documents.is_dataset(root):
        corpus, subset = source_files(root, config), None
    else:
        reader = documents.TextReader(config.text_field)
        corpus = documents.open_corpus(root, "data.path", config.suffixes, reader, config.subset)
        settings.append(subset)
    return open_or_make(
        cache_folder(config.cache) / f"code-{settings_digest([*settings, corpus.identity])}",
        lambda folder: CodeData(folder, config),
        lambda folder: _write_blocks(folder, corpus, subset, given, config, quiet),
    )


def source_files(root: Path, config: CodeDataConfig) -> documents.Corpus:
    """The source files below `root` (see `find_files`), each of them a document. Raises DataError for fewer than
    two."""
    sources, skipped = documents.find_files(root, config.suffixes, config.max_bytes)
    if len(sources) < 2:
        raise DataError(
            f"expected at least two source files in {root}, one to train on and one to hold out, got {len(sources)} "
            f"(skipped: {documents.as_text(skipped) or 'none'}): check data.path, data.suffixes "
            f"({' '.join(config.suffixes)}) and data.max_bytes ({config.max_bytes})"
        )
    return documents.Corpus(
        str(root),
        sources,
        skipped,
        lambda _: (documents.Document(each.path, documents.read(root, each)) for each in sources),
    )


def _write_blocks(
    folder: Path,
    corpus: documents.Corpus,
    subset: int | None,
    given: TextTokenizer | None,
    config: CodeDataConfig,
    quiet: bool,
) -> None:
    def frame(tokenizer: Tokenizer) -> tuple[Any, dict[str, Any]]:
        special, size = (Special.of(given), given.size) if given else (Special(), tokenizer.get_vocab_size())
        dtype = prepared.id_dtype(size)
        manifest: dict[str, Any] = {"format": FORMATS["files"], "vocab_size": size, "dtype": dtype.name}
        if given:
            manifest |= {"special": list(special), "roles": dict(given.roles)}

        def encode(texts: list[str]) -> Iterator[Array]:
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array([special.start, *encoding.ids, special.end], dtype)

        return encode, manifest

    how: dict[str, Any] = {"special_tokens": SPECIAL_TOKENS, "vocab_size": config.vocab_size, "subset": subset}
    names, known = ("source code", "files"), given.tokenizer if given else None
    prepared.write_streams(folder, (corpus, None), config, known, frame, **how, names=names, quiet=quiet)


def _functions_corpus(config: CodeDataConfig) -> documents.Corpus:
    """The documents to mine: those of data.path, else the standard library and the installed packages."""
    reader = FunctionReader(config.code_field, config.docstring_field)
    paths = sysconfig.get_paths()
    installed = dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib") if Path(paths[name]).is_dir())
    roots = [typed_path(root, "data.path") for root in (installed if config.path is None else [config.path])]
    return documents.joined(
        [documents.open_corpus(root, "data.path", config.suffixes, reader, config.subset) for root in roots]
    )


def _write_functions(
    folder: Path, corpus: documents.Corpus, given: TextTokenizer | None, config: CodeDataConfig, quiet: bool
) -> None:
    skipped = Counter({f"files {reason}": count for reason, count in corpus.skipped.items()})
    long_words: list[str] = []
    with Progress(quiet) as progress:
        progress.start("reading", None)
        parts, tokenizer = documents.split(folder, corpus, None, config.held_out, config.max_bytes, skipped), given
        if tokenizer is None:
            progress.start("training the tokenizer", None)
            trained, long_words = train_on(parts["train"], config.tokenizer_bytes, config.vocab_size, SPECIAL_TOKENS)
            tokenizer = TextTokenizer(trained, BYTE_ROLES)
        frame_(tokenizer.tokenizer, tokenizer.roles)
        (folder / FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), "utf-8")
        special, cutting = Special.of(tokenizer), tokenizer.cutting(config.block_size)
        masking = Masking(tokenizer.size, special)
        manifest: dict[str, Any] = {
            "format": FORMATS["functions"],
            "vocab_size": tokenizer.size,
            "special": list(special),
        }
        manifest |= {"roles": dict(tokenizer.roles), "sources": corpus.name}
        progress.start("mining functions", sum(part.bytes for part in parts.values()))
        seen: set[bytes] = set()
        for name, part in parts.items():
            written, pairs, cut = list[prepared.Example](), 0, 0
            examples = mined(_watched(part, progress), skipped, seen)
            while chunk := list(islice(examples, prepared.ENCODE_EXAMPLES)):
                texts: list[Any] = [(each.docstring, each.code) if each.docstring else each.code for each in chunk]
                for text, encoding in zip(texts, cutting.encode_batch_fast(texts), strict=True):
                    if not len(masking.candidates(np.array(encoding.ids))):
                        skipped["functions without_tokens"] += 1
                        continue
                    kind = PAIR if isinstance(text, tuple) else SINGLE
                    pairs, cut = pairs + (kind == PAIR), cut + bool(encoding.overflowing)
                    written.append((np.array(encoding.ids, np.int32), len(encoding.ids), kind))
            if not written:
                raise DataError(
                    f"expected functions in the {name.replace('_', '-')} part of {corpus.name}, got none (skipped: "
                    f"{documents.as_text(skipped) or 'none'}): check data.path, data.suffixes, data.max_bytes and "
                    "data.held_out"
                )
            manifest[name] = {
                **prepared.write_examples(folder, name, written),
                "files": len(part),
                "pairs": pairs,
                "cut": cut,
            }
    manifest |= {"skipped": dict(skipped), "long_words": len(long_words)}
    prepared.write_manifest(folder, manifest)


def _watched(part: documents.Part, progress: Progress) -> Iterator[documents.Document]:
    for document in part.read():
        yield document
        progress.add(len(document.text.encode()))


def _about(data: FunctionData) -> Iterator[str]:
    """What was read, skipped and cut."""
    manifest = data.manifest
    for name, about in ((name, manifest[name]) for name in ("train", "held_out")):
        yield (
            f"{about['examples']:,} {name.replace('_', '-')} examples ({about['pairs']:,} pairs, {about['tokens']:,} "
            f"tokens) from {about['files']:,} files or rows; {about['cut']:,} cut to {data.config.block_size} tokens"
        )
    if any(manifest["skipped"].values()):
        yield f"skipped: {documents.as_text(manifest['skipped'])}"
    if manifest["long_words"]:
        yield f"the tokenizer was not trained on {manifest['long_words']:,} texts with very long words"
