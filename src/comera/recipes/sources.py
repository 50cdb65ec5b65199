"""Where documents come from: files of text and code, rows of JSON lines and tables, and data sets of Hugging Face's
library `datasets`; and which of them are held out."""

import io
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from comera.errors import ConfigError, DataError
from comera.recipes.corpus import SUFFIXES, Source, as_text, find_files, place, read
from comera.recipes.rows import ROW_SUFFIXES, parse_rows

TEXT_SUFFIXES = (".txt", ".md", ".rst", *SUFFIXES, ".jsonl", ".jsonl.gz")  # tables in a folder are seldom text
LARGE_FILE = 1_000_000  # characters: a larger file is read as passages, so that a part of it can be held out
PASSAGE = 65_536
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # of a data set


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
    def file(self, path: str, text: str) -> Iterator[Document]: ...
    def row(self, row: Any, rows: Counter[str]) -> Iterator[Document]: ...


class TextReader(NamedTuple):
    """Files are documents, large ones several; in rows, a field holds the text."""

    field: str

    @property
    def identity(self) -> str:
        return self.field

    def file(self, path: str, text: str) -> Iterator[Document]:
        if len(text) > LARGE_FILE:
            yield from (Document(f"{path}#{n}", part) for n, part in enumerate(_passages(text)))
        else:
            yield Document(path, text)

    def row(self, row: Any, rows: Counter[str]) -> Iterator[Document]:
        text = text_of(row, self.field, "data.text_field", rows)
        if text:
            yield Document(text, text)
        elif text is not None:
            rows["rows empty"] += 1


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again in the same order. name: for messages. identity: JSON-ready, differs
    for other contents. skipped: files by reason. read: the documents, counting rows without text in a counter."""

    name: str
    identity: list[Any]
    skipped: dict[str, int]
    read: Callable[[Counter[str]], Iterator[Document]]


def is_dataset(folder: Path) -> bool:
    """Whether save_to_disk of Hugging Face's library `datasets` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def open_corpus(path: Path, option: str, suffixes: tuple[str, ...], reader: Reader, subset: str | None) -> Corpus:
    """The documents of a file, a folder, a folder that `datasets` saved, or a data set of the Hugging Face hub. option:
    that named the path. reader: of texts and rows. subset: of a hub data set."""
    if is_dataset(path):
        return _dataset(_datasets(path, option).load_from_disk(str(path)), path, reader, option)
    if path.exists():
        sources, skipped = find_files(path, suffixes if path.is_dir() else ("",))
        identity = [reader.identity, sources]
        return Corpus(str(path), identity, skipped, lambda rows: _documents(path, sources, reader, rows))
    if not HUB_NAME.fullmatch(str(path)):
        raise DataError(f"expected a file or folder of text, got {path}, which does not exist: check {option}")
    library = _datasets(path, option)
    try:
        return _dataset(library.load_dataset(str(path), subset), path, reader, option)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{option}: expected a file, a folder or a data set of the Hugging Face hub, got {path} ({reason})"
        ) from error


def _datasets(path: Path, option: str) -> Any:
    """The library `datasets`, which is optional."""
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        found = "is a folder of the library datasets, which" if path.exists() else "does not exist; the hub's data sets"
        raise ConfigError(f"{option}: {path} {found} need{'s' * path.exists()} `pip install datasets`") from None
    return datasets


def joined(corpora: Sequence[Corpus]) -> Corpus:
    """Several corpora as one."""
    return Corpus(
        " and ".join(corpus.name for corpus in corpora),
        [corpus.identity for corpus in corpora],
        dict(sum((Counter(corpus.skipped) for corpus in corpora), Counter())),
        lambda rows: chain.from_iterable(corpus.read(rows) for corpus in corpora),
    )


def _documents(root: Path, sources: list[Source], reader: Reader, rows: Counter[str]) -> Iterator[Document]:
    for source in sources:
        text = read(root, source)
        if (root / source.path).name.endswith(ROW_SUFFIXES):
            for row in parse_rows(root / source.path, io.StringIO(text.removeprefix("\ufeff"), newline="\n")):
                yield from reader.row(row.values, rows)
        else:
            yield from reader.file(source.path, text)


def _passages(text: str) -> Iterator[str]:
    """A text cut at line ends into passages of about PASSAGE characters."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + PASSAGE) + 1 or start + PASSAGE
        yield text[start:end]
        start = end


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


def _dataset(data: Any, path: Path, reader: Reader, option: str) -> Corpus:
    """The rows of a data set of the library `datasets`; of several splits, those of "train"."""
    if isinstance(data, dict):
        if "train" not in data:
            raise DataError(f"{option}: expected a data set with the split train, got {path} with {', '.join(data)}")
        data = data["train"]

    def documents(rows: Counter[str]) -> Iterator[Document]:
        for row in data:
            yield from reader.row(row, rows)

    return Corpus(str(path), [reader.identity, "datasets", str(data._fingerprint)], {}, documents)


class Part(NamedTuple):
    """The documents of the training or the held-out part. read: all of them; documents, bytes: how many."""

    read: Callable[[], Iterator[Document]]
    documents: int
    bytes: int


def split(
    corpus: Corpus, apart: Corpus | None, share: float, max_bytes: int | None, skipped: Counter[str]
) -> dict[str, Part]:
    """The parts "train" and "held_out". A document keeps its side when others come and go. apart: the held-out
    documents, else a fraction `share` of all is. max_bytes: take only a random subset of about this size. Raises
    DataError if a part has no document."""
    sizes = [(place("subset", d.key), place("held-out", d.key), len(d.text.encode())) for d in corpus.read(skipped)]
    total = sum(size for *_, size in sizes)
    subset = 1.0 if max_bytes is None else max_bytes / max(1, total)
    chosen = [(where, size) for random, where, size in sizes if random <= subset]
    places = {where for where, _ in chosen}
    if len(places) < (1 if apart else 2):
        raise DataError(
            f"expected at least {'one document' if apart else 'two documents, one to train on and one to hold out,'} "
            f"in {corpus.name}, got {len(places)} (skipped: {as_text(skipped) or 'none'}): check "
            f"data.path, data.suffixes and data.max_bytes ({max_bytes})"
            f"{'' if apart else ', or give data.held_out_path'}"
        )
    # at least one document on each side
    border = 0.0 if apart else min(max(share, math.nextafter(min(places), 2)), max(places))

    def part(held_out: bool) -> Part:
        def documents() -> Iterator[Document]:
            for d in corpus.read(Counter()):
                if place("subset", d.key) <= subset and (place("held-out", d.key) < border) == held_out:
                    yield d

        mine = [size for where, size in chosen if (where < border) == held_out]
        return Part(documents, len(mine), sum(mine))

    if apart is None:
        return {"train": part(False), "held_out": part(True)}
    others = [len(d.text.encode()) for d in apart.read(skipped)]
    return {"train": part(False), "held_out": Part(lambda: apart.read(Counter()), len(others), sum(others))}


def sample(train: Part, limit: int) -> Iterator[tuple[str, str]]:
    """Names and texts of a random but fixed subset of the documents, of about `limit` bytes: to train a tokenizer."""
    sizes = sorted((place("tokenizer", d.key), len(d.text.encode())) for d in train.read())
    ends = list(accumulate(size for _, size in sizes))
    last, _ = sizes[min(bisect_left(ends, limit), len(sizes) - 1)]
    return ((d.key[:100], d.text) for d in train.read() if place("tokenizer", d.key) <= last)
