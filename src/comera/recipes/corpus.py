"""Files of text or code as documents, and documents as tokens: what the recipes code-lm and lm share.

    files -> training | held-out (by a hash of the name) -> byte-level BPE -> one stream of token ids in a file

Everything is a pure function of the files' contents and the settings."""

import gzip
import hashlib
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from comera.errors import DataError
from comera.recipes.progress import Progress

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
LONGEST_WORD = 256  # characters; training a byte-pair encoding takes time in proportion to its longest words
_KINDS = (r"[^\W\d_]", r"\d", r"[^\w\s]", "_", r"\s")  # of characters that make a word
LONG_WORD = re.compile("|".join(rf"{kind}{{{LONGEST_WORD + 1}}}" for kind in _KINDS))
ENCODE_BYTES = 1_000_000  # text per call of the tokenizer

# fmt: off
SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".cs", ".go",
    ".rs", ".swift", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml",
    ".ex", ".exs", ".erl", ".clj", ".sh", ".sql",
)
# fmt: on


class Source(NamedTuple):
    """A source file: its path relative to the root, and the size and digest of its contents."""

    path: str
    size: int
    digest: str


def find_files(
    root: Path, suffixes: tuple[str, ...], max_bytes: int | None = None
) -> tuple[list[Source], dict[str, int]]:
    """The files below `root` with these suffixes, sorted by path, and how many were skipped, by reason. Skipped: hidden
    folders, folders of installed packages, pipes and devices, and files that are unreadable, empty, not UTF-8 or copies
    of another one (a held-out copy would have been seen in training). max_bytes: take a random but fixed subset of at
    most this size. Files that end in .gz are read unpacked."""
    skipped = {"no_file": 0, "unreadable": 0, "not_utf8": 0, "empty": 0, "repeated": 0}
    chosen: dict[str, Source] = {}
    left = float("inf") if max_bytes is None else max_bytes
    # in a random but fixed order, so that max_bytes takes a random subset
    for path in sorted(_walk(root, suffixes), key=lambda p: place("subset", p)):
        try:
            status = (root / path).stat()
            if not stat.S_ISREG(status.st_mode):
                skipped["no_file"] += 1
                continue
            if status.st_size > left:
                continue
            content = _content(root / path)
            content.decode("utf-8")
        except (OSError, EOFError, zlib.error):
            skipped["unreadable"] += 1
            continue
        except UnicodeDecodeError:
            skipped["not_utf8"] += 1
            continue
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        if not content or digest in chosen:
            skipped["repeated" if content else "empty"] += 1
            continue
        chosen[digest] = Source(path, len(content), digest)
        left -= len(content)
    return sorted(chosen.values()), skipped


def as_text(skipped: Mapping[str, int]) -> str:
    """Counts by reason, those that are not 0, such as "3 not_utf8, 1 empty"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items() if count)


def byte_level(model: models.BPE) -> Tokenizer:
    """A byte-level tokenizer, as in GPT-2 and RoBERTa."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, special ones first."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths of the files, relative to `root`, with forward slashes."""
    if root.is_file():
        yield "."
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in files:
            if name.endswith(suffixes):
                yield (Path(folder) / name).relative_to(root).as_posix()


def place(purpose: str, path: str) -> float:
    """A pseudorandom number in [0, 1] that depends on the path alone."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def read(root: Path, source: Source) -> str:
    """The text of a file that `find_files` found. Raises DataError if it has changed since."""
    content = _content(root / source.path)
    if hashlib.blake2b(content, digest_size=16).hexdigest() != source.digest:
        raise DataError(f"{root / source.path} changed while it was being read: run again")
    return content.decode("utf-8")


def _content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def sample_texts(texts: Iterable[tuple[str, str]], limit: int, long_words: list[str]) -> Iterator[str]:
    """Texts to train a tokenizer on, of about `limit` bytes, out of (name, text) in this order; the names of those with
    long words, which are not among them, go to `long_words`."""
    for name, text in texts:
        if limit <= 0:
            return
        if LONG_WORD.search(text[:limit]):
            long_words.append(name)
            continue
        yield text[:limit]
        limit -= len(text.encode())


def report_skipped(skipped: Mapping[str, int], long_words: Sequence[str]) -> list[str]:
    """Lines to print about files that were skipped, and about texts that the tokenizer was not trained on."""
    lines = [f"skipped files: {as_text(skipped)}"] if any(skipped.values()) else []
    if long_words:
        lines.append(
            f"the tokenizer was not trained on {len(long_words):,} files with words of more than {LONGEST_WORD} "
            f"characters, such as {long_words[0]}"
        )
    return lines


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type of token ids in a file."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def write_tokens(
    file: Path, texts: Iterable[str], encode: Callable[[list[str]], Iterable[np.ndarray[Any, Any]]], progress: Progress
) -> int:
    """Write the tokens of texts to a file, one text after the other; returns how many. encode: token ids of each text,
    called for about ENCODE_BYTES at a time: bounds memory, and keeps all cores busy."""
    tokens = 0
    with open(file, "wb") as out:
        sized = ((text, len(text.encode())) for text in texts)
        for chunk in _chunks(sized):
            for ids in encode([text for text, _ in chunk]):
                ids.tofile(out)
                tokens += len(ids)
            progress.add(sum(size for _, size in chunk))
    return tokens


def _chunks(sized: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    total = 0

    def place_of(item: tuple[str, int]) -> int:
        nonlocal total
        total += item[1]
        return total // ENCODE_BYTES

    for _, chunk in groupby(sized, place_of):
        yield list(chunk)


def open_tokens(file: Path, dtype: str, tokens: int) -> np.ndarray[Any, Any]:
    """The token ids in a file, memory-mapped."""
    return np.memmap(file, dtype=dtype, mode="r", shape=(tokens,))


@lru_cache(maxsize=4)
def permutation(length: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """The order of an epoch's blocks."""
    return np.random.default_rng([seed, 0, epoch]).permutation(length)


def train_rows(blocks: int, index: int, size: int, seed: int) -> list[int]:
    """The blocks of the `index`-th batch of `size`: each epoch permutes all blocks anew."""
    epochs, offsets = np.divmod(np.arange(index * size, (index + 1) * size), blocks)
    return [int(permutation(blocks, seed, int(e))[o]) for e, o in zip(epochs, offsets, strict=True)]
