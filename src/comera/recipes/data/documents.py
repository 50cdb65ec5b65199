"""Documents out of files of text and code, rows of JSON lines and tables, and data sets of Hugging Face's `datasets`.

    path -> files and their digests -> documents, gathered -> training | held-out, by a hash of each one's key

The files are read twice: for the digests, which name the cache folder, and if that does not exist, to gather the
documents in one memory-mapped Arrow file, which all that follows reads. Memory holds a document and a part of a file at
a time, however large that is. Everything is a pure function of the files' contents and the settings."""

import gzip
import hashlib
import io
import math
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import numpy as np

from comera.errors import DataError
from comera.recipes.data.cache import gather
from comera.recipes.data.tables import parse_rows, row_suffix

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "node_modules", "__pycache__"})
# fmt: off
SUFFIXES = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".cxx", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".cs", ".go",
    ".rs", ".swift", ".js", ".jsx", ".mjs", ".ts", ".tsx", ".rb", ".php", ".pl", ".lua", ".r", ".jl", ".hs", ".ml",
    ".ex", ".exs", ".erl", ".clj", ".sh", ".sql",
)
# fmt: on
TEXT_SUFFIXES = (".txt", ".md", ".rst", *SUFFIXES, ".jsonl", ".jsonl.gz")  # tables in a folder are seldom text
LARGE_FILE = 1_000_000  # characters: a larger file is read as passages, so that a part of it can be held out
PASSAGE = 65_536
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set
READ_ROWS = 64  # documents in memory at a time
# of the documents in an Arrow file; subset, side, order: places in [0, 1) by the key; name: the key, shortened
_KINDS = {"name": "string", "text": "large_string", "docstring": "large_string", "size": "int64"}
_PLACES = {"subset": "subset", "side": "held-out", "order": "tokenizer"}


class Source(NamedTuple):
    """A source file: its path relative to the root, and the size and digest of its contents."""

    path: str
    size: int
    digest: str


class Document(NamedTuple):
    """A text and a key by which it keeps its side, training or held-out, when others come and go. docstring: what
    documents the function that is the text; None for other texts."""

    key: str
    text: str
    docstring: str | None = None


class Reader(Protocol):
    """How documents come from files and rows. identity: JSON-ready, differs where the documents do. file: the documents
    of a text file, of this path. row: of a row, in a counter if it has none; raises DataError for one of other
    columns."""

    @property
    def identity(self) -> Any: ...
    def file(self, path: str, text: TextIO) -> Iterator[Document]: ...
    def row(self, row: Any, rows: Counter[str]) -> Iterator[Document]: ...


class TextReader(NamedTuple):
    """Files are documents, large ones several; in rows, a field holds the text."""

    field: str

    @property
    def identity(self) -> str:
        return self.field

    def file(self, path: str, text: TextIO) -> Iterator[Document]:
        start = text.read(LARGE_FILE + 1)
        if len(start) > LARGE_FILE:
            yield from (Document(f"{path}#{n}", part) for n, part in enumerate(_passages(start, text)))
        else:
            yield Document(path, start)

    def row(self, row: Any, rows: Counter[str]) -> Iterator[Document]:
        text = text_of(row, self.field, "data.text_field", rows)
        if text:
            yield Document(text, text)
        elif text is not None:
            rows["rows empty"] += 1


def text_of(row: Any, field: str, option: str, rows: Counter[str]) -> str | None:
    """The text in a field of a row; None, and counted, if it cannot be written in UTF-8. option: that names the field.
    Raises DataError if there is no text."""
    text = row.get(field)
    if not isinstance(text, str):
        raise DataError(
            f"expected rows with a text in the field {field!r}, got one with {', '.join(map(repr, row))}: set {option}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        rows["rows not_utf8"] += 1
        return None
    return text


def _passages(held: str, text: TextIO) -> Iterator[str]:
    """What is held of a text and the rest of it, cut at line ends into passages of about PASSAGE characters."""
    while held:
        end = held.rfind("\n", 0, PASSAGE) + 1 or PASSAGE
        yield held[:end]
        held = held[end:]
        if len(held) < PASSAGE:
            held += text.read(LARGE_FILE)


@dataclass(frozen=True)
class Corpus:
    """Documents, not read yet. name: for messages. identity: JSON-ready, differs for other contents. skipped: files by
    reason. read: the documents, counting rows without text in a counter."""

    name: str
    identity: Any
    skipped: Mapping[str, int]
    read: Callable[[Counter[str]], Iterator[Document]]


def open_corpus(path: Path, option: str, suffixes: tuple[str, ...], reader: Reader, subset: str | None) -> Corpus:
    """The documents of a file, a folder, a folder that `datasets` saved, or a data set of the Hugging Face hub. option:
    that named the path. reader: of texts and rows. subset: of a hub data set."""
    if path.is_file() and path.name.lower().removesuffix(".gz").endswith(".json"):
        raise DataError(
            f"{option}: expected a text or a file of rows, got {path}, a single JSON value: write an object a line "
            "into a .jsonl file, or name it .txt to train on its characters"
        )
    if path.exists() and not is_dataset(path):
        sources, skipped = find_files(path, suffixes if path.is_dir() else ("",))
        # the path in the source of a single file does not tell how it is read; that of others does
        identity = [reader.identity, sources, *filter(None, [path.is_file() and row_suffix(path)])]
        return Corpus(str(path), identity, skipped, lambda rows: _rows(path, sources, reader, rows))
    if not (path.exists() or HUB_NAME.fullmatch(str(path))):
        raise DataError(f"expected a file or folder of text, got {path}, which does not exist: check {option}")
    data = load_splits(path, option, subset)["train"]
    identity = [reader.identity, "datasets", str(data._fingerprint)]
    return Corpus(str(path), identity, {}, lambda rows: (each for row in data for each in reader.row(row, rows)))


def joined(corpora: Sequence[Corpus]) -> Corpus:
    """Several corpora as one."""
    return Corpus(
        " and ".join(corpus.name for corpus in corpora),
        [corpus.identity for corpus in corpora],
        dict(sum((Counter(corpus.skipped) for corpus in corpora), Counter())),
        lambda rows: chain.from_iterable(corpus.read(rows) for corpus in corpora),
    )


def is_dataset(folder: Path) -> bool:
    """Whether save_to_disk of Hugging Face's library `datasets` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def load_splits(path: Path, option: str, subset: str | None = None) -> dict[str, Any]:
    """The splits by name of a folder that `datasets` saved, or of a data set of the hub; one without splits is all
    "train". option: that named the path. Raises DataError if it cannot be loaded."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path)) if path.exists() else datasets.load_dataset(str(path), subset)
    except Exception as error:  # many kinds, from the network to Arrow
        raise DataError(
            f"{option}: expected a file, a folder or a data set of the Hugging Face hub, got {path}, which could not "
            f"be loaded ({type(error).__name__}: {' '.join(str(error).split())[:300]}): check {option} and the network"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise DataError(f"{option}: expected a data set with the split train, got {path} with {', '.join(splits)}")
    return splits


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
            with _Text(root / path) as text:
                digest, size = text.rest()
        except (OSError, EOFError, zlib.error):
            skipped["unreadable"] += 1
            continue
        except UnicodeDecodeError:
            skipped["not_utf8"] += 1
            continue
        if not size or digest in chosen:
            skipped["repeated" if size else "empty"] += 1
            continue
        chosen[digest] = Source(path, size, digest)
        left -= size
    return sorted(chosen.values()), skipped


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths of the files, relative to `root`, with forward slashes."""
    if root.is_file():
        yield "."
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        for name in files:
            if name.endswith(suffixes):
                yield (Path(folder) / name).relative_to(root).as_posix()


class _Text(io.TextIOWrapper):
    """The text of a file, unpacked, with its digest; only a newline ends a line."""

    def __init__(self, path: Path) -> None:
        raw: Any = gzip.open(path) if path.suffix.lower() == ".gz" else open(path, "rb")  # noqa: SIM115
        super().__init__(raw, "utf-8", newline="\n")
        self._digest, self._size = hashlib.blake2b(digest_size=16), 0

    def _noted(self, text: str) -> str:
        data = text.encode()  # the bytes of the file: UTF-8 is read strictly
        self._digest.update(data)
        self._size += len(data)
        return text

    def read(self, size: int | None = -1) -> str:
        return self._noted(super().read(size))

    def __next__(self) -> str:  # type: ignore[override]  # as TextIOWrapper
        return self._noted(super().__next__())

    def rest(self) -> tuple[str, int]:
        """Read to the end; the digest and size of all."""
        while self.read(LARGE_FILE):
            pass
        return self._digest.hexdigest(), self._size


@contextmanager
def _opened(root: Path, source: Source) -> Iterator[TextIO]:
    """The text of a file that `find_files` found. Raises DataError, at the end of it, if it has changed since."""
    try:
        with _Text(root / source.path) as text:
            yield text
            changed = text.rest()[0] != source.digest
    except UnicodeDecodeError:
        changed = True
    if changed:
        raise DataError(f"{root / source.path} changed while it was being read: run again")


def read(root: Path, source: Source) -> str:
    """All of it."""
    with _opened(root, source) as text:
        return text.read()


def _rows(root: Path, sources: list[Source], reader: Reader, rows: Counter[str]) -> Iterator[Document]:
    for source in sources:
        file = root / source.path
        with _opened(root, source) as text:
            if row_suffix(file):
                lines = (line if number else line.removeprefix("\ufeff") for number, line in enumerate(text))
                for row in parse_rows(file, lines):
                    yield from reader.row(row.values, rows)
            else:
                yield from reader.file(source.path, text)


def place(purpose: str, path: str) -> float:
    """A pseudorandom number in [0, 1] that depends on the path alone."""
    digest = hashlib.blake2b(os.fsencode(path), digest_size=8, person=purpose.encode()).digest()
    return int.from_bytes(digest, "big") / 2**64


def as_text(skipped: Mapping[str, int]) -> str:
    """Counts by reason, those that are not 0, such as "3 not_utf8, 1 empty"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in skipped.items() if count)


class Part:
    """Gathered documents: of the training or the held-out part. rows: a `datasets.Dataset` of them. bytes: of all."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.bytes = int(self.numbers("size").sum())

    def __len__(self) -> int:
        return len(self.rows)

    def numbers(self, column: str) -> np.ndarray[Any, Any]:
        """A column of numbers, one for each document."""
        return np.asarray(self.rows.select_columns(column).with_format("arrow")[:][column])

    def where(self, mask: np.ndarray[Any, Any]) -> "Part":
        """Those of the documents for which a mask is true, in the same order."""
        return Part(self.rows.select(np.flatnonzero(mask), keep_in_memory=True))

    def read(self, first: int = 0) -> Iterator[Document]:
        """The documents from number `first`, keys shortened to names."""
        left = self.rows.select(range(first, len(self))).iter(READ_ROWS) if first < len(self) else ()
        for chunk in left:
            yield from map(Document, chunk["name"], chunk["text"], chunk["docstring"])

    def sample(self, limit: int) -> "Part":
        """A random but fixed subset of about `limit` bytes: to train a tokenizer."""
        order, sizes = self.numbers("order"), self.numbers("size")
        ranked = np.lexsort((sizes, order))
        end = np.searchsorted(np.cumsum(sizes[ranked]), limit)
        return self.where(order <= order[ranked[min(int(end), len(self) - 1)]])


def _gathered(folder: Path, corpus: Corpus, skipped: Counter[str]) -> Part:
    rows = (
        {
            **{column: place(purpose, key) for column, purpose in _PLACES.items()},
            "name": key[:100].encode("utf-8", "replace").decode(),
            "text": text,
            "docstring": docstring,
            "size": len(text.encode()),
        }
        for key, text, docstring in corpus.read(skipped)
    )
    return Part(gather(folder, rows, _KINDS | dict.fromkeys(_PLACES, "float64")))


def split(
    folder: Path, corpus: Corpus, apart: Corpus | None, share: float, max_bytes: int | None, skipped: Counter[str]
) -> dict[str, Part]:
    """Gather the documents in `folder`, in the parts "train" and "held_out". A document keeps its side when others come
    and go. apart: the held-out documents, else a fraction `share` of all is. max_bytes: take only a random subset of
    about this size. Raises DataError if a part has no document."""
    whole = _gathered(folder, corpus, skipped)
    subset = 1.0 if max_bytes is None else max_bytes / max(1, whole.bytes)
    chosen, side = whole.numbers("subset") <= subset, whole.numbers("side")
    places = np.unique(side[chosen])
    if len(places) < (1 if apart else 2):
        raise DataError(
            f"expected at least {'one document' if apart else 'two documents, one to train on and one to hold out,'} "
            f"in {corpus.name}, got {len(places)} (skipped: {as_text(skipped) or 'none'}): check "
            f"data.path, data.suffixes and data.max_bytes ({max_bytes})"
            f"{'' if apart else ', or give data.held_out_path'}"
        )
    if apart:
        return {"train": whole.where(chosen), "held_out": _gathered(folder, apart, skipped)}
    border = min(max(share, math.nextafter(places[0], 2)), places[-1])  # at least one document on each side
    held_out = side < border
    return {"train": whole.where(chosen & ~held_out), "held_out": whole.where(chosen & held_out)}
