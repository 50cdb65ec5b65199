"""Where documents come from: files of text and code, JSON lines, and data sets of Hugging Face's library `datasets`."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from comera.errors import ConfigError, DataError
from comera.recipes.corpus import SUFFIXES, Source, find_files, read

ROW_SUFFIXES = (".jsonl", ".jsonl.gz")
TEXT_SUFFIXES = (".txt", ".md", ".rst", *SUFFIXES, *ROW_SUFFIXES)
LARGE_FILE = 1_000_000  # characters: a larger file is read as passages, so that a part of it can be held out
PASSAGE = 65_536
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class Document(NamedTuple):
    """A text and a key by which it keeps its side, training or held-out, when others come and go."""

    key: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again in the same order. name: for messages. identity: JSON-ready, differs
    for other contents. skipped: files by reason. read: the documents, counting rows without text in a counter."""

    name: str
    identity: list[Any]
    skipped: dict[str, int]
    read: Callable[[Counter[str]], Iterator[Document]]


def open_corpus(path: Path, option: str, suffixes: tuple[str, ...], field: str, subset: str | None) -> Corpus:
    """The documents of a file, a folder, a folder that `datasets` saved, or a data set of the Hugging Face hub. option:
    that named the path. field: of rows, that holds the text. subset: of a hub data set."""
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _dataset(_datasets(path, option).load_from_disk(str(path)), path, field, option)
    if path.exists():
        sources, skipped = find_files(path, suffixes if path.is_dir() else ("",))
        return Corpus(str(path), [field, sources], skipped, lambda rows: _documents(path, sources, field, rows))
    if not _HUB_NAME.fullmatch(str(path)):
        raise DataError(f"expected a file or folder of text, got {path}, which does not exist: check {option}")
    library = _datasets(path, option)
    try:
        return _dataset(library.load_dataset(str(path), subset), path, field, option)
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


def _documents(root: Path, sources: list[Source], field: str, rows: Counter[str]) -> Iterator[Document]:
    for source in sources:
        text = read(root, source)
        if (root / source.path).name.endswith(ROW_SUFFIXES):
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield from _row(_parsed(line, f"{root / source.path}, line {number}"), field, rows)
        elif len(text) > LARGE_FILE:
            yield from (Document(f"{source.path}#{n}", part) for n, part in enumerate(_passages(text)))
        else:
            yield Document(source.path, text)


def _passages(text: str) -> Iterator[str]:
    """A text cut at line ends into passages of about PASSAGE characters."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + PASSAGE) + 1 or start + PASSAGE
        yield text[start:end]
        start = end


def _parsed(line: str, where: str) -> Any:
    with suppress(ValueError):
        if isinstance(row := json.loads(line), dict):
            return row
    raise DataError(f'{where}: expected a JSON object, such as {{"text": "..."}}, got {line[:60]!r}')


def _row(row: Any, field: str, rows: Counter[str]) -> Iterator[Document]:
    """The document of a row, if it has text."""
    text = row.get(field)
    if not isinstance(text, str):
        raise DataError(
            f"expected rows with a text in the field {field!r}, got one with {', '.join(map(repr, row))}: set "
            "data.text_field"
        )
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold
        rows["rows not_utf8"] += 1
        return
    if text:
        yield Document(text, text)
    else:
        rows["rows empty"] += 1


def _dataset(data: Any, path: Path, field: str, option: str) -> Corpus:
    """The rows of a data set of the library `datasets`; of several splits, those of "train"."""
    if isinstance(data, dict):
        if "train" not in data:
            raise DataError(f"{option}: expected a data set with the split train, got {path} with {', '.join(data)}")
        data = data["train"]

    def documents(rows: Counter[str]) -> Iterator[Document]:
        for row in data:
            yield from _row(row, field, rows)

    return Corpus(str(path), [field, "datasets", str(data._fingerprint)], {}, documents)
