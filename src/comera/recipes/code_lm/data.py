"""Source code as packed blocks of tokens, and masked batches for BERT-style pre-training.

    files -> training | held-out (by a hash of the path) -> byte-level BPE -> <s> file </s> <s> file </s> ... -> blocks

Preparation is deterministic and happens once: tokens and tokenizer stay in a cache folder named by a digest of the
files' contents and the settings. Batches are pure functions of their place in the run, so a resumed run sees the same
ones.
B batch, T block size, P masked positions, V vocabulary."""

import json
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from comera.errors import DataError
from comera.recipes.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.code_lm.config import CodeDataConfig as CodeDataConfig
from comera.recipes.code_lm.function_data import FunctionData, prepare_functions
from comera.recipes.code_lm.masking import HELD_OUT_SEED, Masking
from comera.recipes.code_lm.vocabulary import ROLES, SPECIAL_TOKENS, Special, run_files
from comera.recipes.corpus import (
    Source,
    find_files,
    id_dtype,
    open_tokens,
    permutation,
    place,
    read,
    report_skipped,
    sample_texts,
    train_rows,
    train_tokenizer,
    write_tokens,
)
from comera.recipes.paths import typed_path
from comera.recipes.progress import Progress
from comera.recipes.sources import Document, Part, TextReader, is_dataset, open_corpus, sample, split
from comera.recipes.tokenizer_files import FILE
from comera.recipes.tokenizers import TextTokenizer

FORMAT = 2  # of the cache folder; raise it when its contents, or how they are made, change


class Batch(NamedTuple):
    """One masked batch, all int64: input_ids (B, T); positions (P,) into the flattened ids; labels (P,)."""

    input_ids: Tensor
    positions: Tensor
    labels: Tensor


class CodeData:
    """Prepared source code: training and held-out blocks, memory-mapped, and their tokenizer. train, held_out: (blocks,
    T) arrays of token ids. manifest: where they come from."""

    def __init__(self, folder: Path, config: CodeDataConfig) -> None:
        self.config, self.folder = config, folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self.vocab_size: int = self.manifest["vocab_size"]
        self.special = Special(*self.manifest.get("special", ()))  # of a given tokenizer
        self.masking = Masking(self.vocab_size, self.special)
        self.train, self.held_out = self._blocks("train"), self._blocks("held_out")

    def _blocks(self, part: str) -> np.ndarray[Any, Any]:
        tokens, width = self.manifest[part]["tokens"], self.config.block_size
        if tokens < width:
            raise DataError(
                f"expected at least one block of {width} tokens in the {part.replace('_', '-')} part, got {tokens} "
                f"tokens from {self.manifest[part]['files']} files: "
                "give a folder with more code or a smaller data.block_size"
            )
        flat = open_tokens(self.folder / f"{part}.bin", self.manifest["dtype"], tokens)
        return flat[: tokens // width * width].reshape(-1, width)

    @property
    def tokenizer(self) -> Tokenizer:
        """The given tokenizer, or a byte-level BPE that was trained on the training part."""
        return Tokenizer.from_file(str(self.folder / FILE))

    def files(self, longest: int) -> dict[str, str]:
        """Files of the run: the tokenizer. longest: tokens of a text."""
        return run_files(self.tokenizer, longest, self.manifest.get("roles", ROLES))

    def log_frequencies(self) -> Tensor:
        """Log of each token's frequency in the training part, float32 (V,): counted over up to 65,536 evenly spaced
        blocks, plus one per token so that none is impossible."""
        blocks = self.train[:: -(-len(self.train) // 65_536)]
        counts = np.bincount(blocks.reshape(-1), minlength=self.vocab_size) + 1.0
        return torch.from_numpy(np.log(counts / counts.sum())).float()

    def train_batch(self, index: int, size: int, seed: int) -> Batch:
        """The `index`-th batch of `size` blocks; each epoch permutes all blocks anew and draws new masks."""
        rows = train_rows(len(self.train), index, size, seed)
        count = max(1, round(self.config.mask_share * size * self.config.block_size))
        return self._mask(self.train[rows], count, np.random.default_rng([seed, 1, index]))

    def held_out_batches(self, size: int) -> Iterator[Batch]:
        """The held-out part in batches of `size` blocks, or one smaller batch if there are fewer. Blocks that do not
        fill the last batch are dropped, so the mean over batches is the mean over blocks. Blocks and masks depend on
        the data alone, not on the seed, the method or the batch size."""
        width = self.config.block_size
        order = permutation(len(self.held_out), HELD_OUT_SEED, 0)
        count = max(1, round(self.config.mask_share * width))
        for first in range(0, max(1, len(order) - size + 1), size):
            masked = [
                self._mask(self.held_out[row : row + 1], count, np.random.default_rng([HELD_OUT_SEED, 1, int(row)]))
                for row in order[first : first + size]
            ]
            ids, positions, labels = zip(*masked, strict=True)
            flat = [p + row * width for row, p in enumerate(positions)]
            yield Batch(torch.cat(ids), torch.cat(flat), torch.cat(labels))

    def _mask(self, blocks: np.ndarray[Any, Any], count: int, rng: np.random.Generator) -> Batch:
        """Mask `count` tokens, never special ones."""
        ids = blocks.astype(np.int64).reshape(-1)
        masked = self.masking.mask_(ids, count, rng)
        return Batch(*(torch.from_numpy(a) for a in (ids.reshape(blocks.shape), *masked)))


def prepare(config: CodeDataConfig, *, quiet: bool = False) -> CodeData | FunctionData:
    """Read, tokenize and cache the source code that `config` names, in its form; a second call with the same files
    opens the cache. One process prepares while the others wait; a killed one leaves nothing that looks complete. Raises
    DataError for a missing folder, or one without enough code, ConfigError for a tokenizer that is of no use."""
    return prepare_blocks(config, quiet=quiet) if config.form == "files" else prepare_functions(config, quiet=quiet)


def prepare_blocks(config: CodeDataConfig, *, quiet: bool = False) -> CodeData:
    """What `prepare` does for whole files."""
    root = typed_path(sysconfig.get_paths()["stdlib"] if config.path is None else config.path, "data.path")
    given = config.given_tokenizer()
    settings: list[Any] = [FORMAT, config.vocab_size, config.tokenizer_bytes, config.held_out]
    if given:
        settings += [given.tokenizer.to_str(), dict(given.roles)]
    if root.is_dir() and not is_dataset(root):
        sources, skipped = find_sources(root, config)
        settings.append(sources)
        parts: Callable[[Counter[str]], dict[str, Part]] = lambda _: _parts_of_files(root, sources, config)  # noqa: E731
    else:
        corpus = open_corpus(root, "data.path", config.suffixes, TextReader(config.text_field), config.subset)
        skipped = corpus.skipped
        settings += [config.max_bytes, corpus.identity]
        parts = lambda rows: split(corpus, None, config.held_out, config.max_bytes, rows)  # noqa: E731
    return open_or_make(
        cache_folder(config.cache) / f"code-{settings_digest(settings)}",
        lambda folder: CodeData(folder, config),
        lambda folder: _write(folder, parts, Counter(skipped), given, config, quiet),
    )


def _parts_of_files(root: Path, sources: Sequence[Source], config: CodeDataConfig) -> dict[str, Part]:
    def part(files: Sequence[Source]) -> Part:
        documents = lambda: (Document(file.path, read(root, file)) for file in files)  # noqa: E731
        return Part(documents, len(files), sum(file.size for file in files))

    return dict(zip(("train", "held_out"), map(part, split_sources(sources, config.held_out)), strict=True))


def find_sources(root: Path, config: CodeDataConfig) -> tuple[list[Source], dict[str, int]]:
    """The source files below `root`, sorted by path, and how many were skipped, by reason (see `find_files`)."""
    sources, skipped = find_files(root, config.suffixes, config.max_bytes)
    if len(sources) < 2:
        raise DataError(
            f"expected at least two source files in {root}, one to train on and one to hold out, got {len(sources)} "
            f"(skipped: {skipped}): check data.path, data.suffixes ({' '.join(config.suffixes)}) "
            f"and data.max_bytes ({config.max_bytes})"
        )
    return sources, skipped


def split_sources(sources: Sequence[Source], share: float) -> tuple[list[Source], list[Source]]:
    """Training and held-out files, by a hash of the path: a file keeps its side when others come and go."""
    places = {s: place("held-out", s.path) for s in sources}
    first, last = min(places, key=places.__getitem__), max(places, key=places.__getitem__)  # at least one on each side
    held_out = {s for s in sources if s != last and (places[s] < share or s == first)}
    return [s for s in sources if s not in held_out], [s for s in sources if s in held_out]


def _write(
    folder: Path,
    make_parts: Callable[[Counter[str]], dict[str, Part]],
    skipped: Counter[str],
    given: TextTokenizer | None,
    config: CodeDataConfig,
    quiet: bool,
) -> None:
    with Progress(quiet) as progress:
        progress.start("training the tokenizer", None)
        long_words: list[str] = []
        parts = make_parts(skipped)
        if given:
            tokenizer, special = given.tokenizer, Special.of(given)
        else:
            texts = sample_texts(sample(parts["train"], config.tokenizer_bytes), config.tokenizer_bytes, long_words)
            tokenizer, special = train_tokenizer(texts, config.vocab_size, SPECIAL_TOKENS), Special()
        (folder / FILE).write_text(tokenizer.to_str(pretty=True), "utf-8")
        tokenizer.encode_special_tokens = True  # a "<mask>" in the source code is ordinary text
        size = given.size if given else tokenizer.get_vocab_size()
        dtype = id_dtype(size)
        manifest: dict[str, Any] = {"format": FORMAT, "vocab_size": size, "dtype": dtype.name}
        if given:
            manifest |= {"special": list(special), "roles": dict(given.roles)}

        def encode(texts: list[str]) -> Iterator[np.ndarray[Any, Any]]:
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield np.array([special.start, *encoding.ids, special.end], dtype)

        progress.start("tokenizing the source code", sum(part.bytes for part in parts.values()))
        for name, part in parts.items():
            tokens = write_tokens(folder / f"{name}.bin", (d.text for d in part.read()), encode, progress)
            manifest[name] = {"files": part.documents, "bytes": part.bytes, "tokens": tokens}
    manifest["skipped"], manifest["long_words"] = dict(skipped), len(long_words)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        train, held_out = manifest["train"], manifest["held_out"]
        lines = [
            f"{train['files']:,} files ({train['tokens']:,} tokens) to train on, {held_out['files']:,} "
            f"({held_out['tokens']:,}) held out",
            *report_skipped(skipped, long_words),
        ]
        print(*(f"source code: {line}" for line in lines), sep="\n", file=sys.stderr)
