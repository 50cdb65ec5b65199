"""Reads MNLI's sentence pairs from its published files or through Hugging Face `datasets`."""

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from comera.errors import DataError
from comera.recipes.paths import typed_path

LABELS = ("entailment", "neutral", "contradiction")  # 0, 1, 2
PARTS = ("train", "dev")
SPLITS = {"train": "train", "dev": "validation_matched"}  # names of the parts in `datasets`
NO_LABEL, NO_PREMISE, NO_HYPOTHESIS = SKIPS = ("no label", "empty premise", "empty hypothesis")
FIELDS = ("premise", "hypothesis", "label")
PUBLISHED_FIELDS = ("sentence1", "sentence2", "gold_label")
DATASETS_MARK = "dataset_dict.json"  # written by DatasetDict.save_to_disk
DATASETS_ROWS = 4096  # read from `datasets` at a time
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Row(NamedTuple):
    """An unchecked pair as in its file, and its line number, from 1."""

    line: int
    premise: object
    hypothesis: object
    label: object


class Pair(NamedTuple):
    """A valid pair; label: index into LABELS."""

    premise: str
    hypothesis: str
    label: int


class Part(NamedTuple):
    """The training or development pairs: a name for messages, and a function that reads the rows from the start."""

    name: str
    rows: Callable[[], Iterator[Row]]


class Source(NamedTuple):
    """Both parts by name, and a digest that changes when they do."""

    digest: str
    parts: dict[str, Part]


def find_source(path: str) -> Source:
    """The pairs in the folder `path`, or in the data set of this name on the hub; nothing is parsed yet. Raises
    DataError for a file, a folder without MNLI, and a path that cannot name a data set."""
    folder = typed_path(path, "data.path")
    if folder.is_dir():
        return _saved(folder) if (folder / DATASETS_MARK).is_file() else _published(folder)
    if folder.exists() or not HUB_NAME.fullmatch(path):
        state = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"expected a folder with MNLI or a name on the hub, got {path}, which {state}: check data.path")
    # Does not ask the hub for changes, so that a second run works offline.
    return _datasets(path, _digest([f"hub {path}".encode()]), lambda datasets: datasets.load_dataset(path))


def read_pairs(part: Part, skipped: dict[str, int]) -> Iterator[Pair]:
    """The pairs of a part in order; those without a label or text are counted in `skipped`, by reason. Raises
    DataError, with file and line, for unreadable rows, missing fields and unknown labels."""
    for row in part.rows():
        where = f"{part.name}, line {row.line}"
        premise, hypothesis = _text(row.premise, "premise", where), _text(row.hypothesis, "hypothesis", where)
        label = _label(row.label, where)
        if label is None:
            skipped[NO_LABEL] += 1
        elif not premise.strip():
            skipped[NO_PREMISE] += 1
        elif not hypothesis.strip():
            skipped[NO_HYPOTHESIS] += 1
        else:
            yield Pair(premise, hypothesis, label)


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text as {name}, got {value!r}: check the file, or remove this line")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can encode
        raise DataError(f"{where}: expected text as {name}, got {value[:80]!r} ({error.reason})") from error
    return value


def _label(value: object, where: str) -> int | None:
    if value is None or value in ("", "-", -1):  # annotators disagreed, or a test set
        return None
    if isinstance(value, str) and value in LABELS:
        return LABELS.index(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(LABELS):
        return value
    expected = ", ".join(f"{name} ({number})" for number, name in enumerate(LABELS))
    raise DataError(f"{where}: expected as label {expected}, or '-' or -1 for none, got {value!r}: check the file")


def _published(folder: Path) -> Source:
    """The first of FORMS whose two files both exist, plain or gzipped."""
    for names, read in FORMS:
        both = ((part, folder / f"{name}{end}") for part, name in zip(PARTS, names, strict=True) for end in (".gz", ""))
        files = {part: file for part, file in both if file.is_file()}  # a plain file counts before a compressed one
        if len(files) == len(PARTS):
            digest = hashlib.blake2b(digest_size=16)
            for file in files.values():
                with open(file, "rb") as raw:
                    hashlib.file_digest(raw, lambda: digest)  # type: ignore[arg-type,return-value]  # noqa: B023
            parts = {part: Part(str(file), partial(read, file)) for part, file in files.items()}
            return Source(digest.hexdigest(), parts)
    forms = "; ".join(" and ".join(names) for names, _ in FORMS)
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise DataError(
        f"expected MNLI in {folder}: a folder saved by Hugging Face datasets, or {forms} (each may end in .gz), "
        f"got {present}: check data.path"
    )


def _tab_separated(file: Path) -> Iterator[Row]:
    """Rows of GLUE's tables: a header, then tab-separated columns in which quotes are ordinary characters."""
    lines = _lines(file)
    header = next(lines, (1, ""))[1].split("\t")
    missing = [name for name in PUBLISHED_FIELDS if name not in header]
    if missing:
        raise DataError(f"{file}, line 1: expected a header with the columns {', '.join(missing)}, got {header}")
    premise, hypothesis, label = (header.index(name) for name in PUBLISHED_FIELDS)
    for number, line in lines:
        columns = line.split("\t")
        if len(columns) != len(header):
            raise DataError(
                f"{file}, line {number}: expected {len(header)} tab-separated columns as in the header, "
                f"got {len(columns)}: is the file complete?"
            )
        yield Row(number, columns[premise], columns[hypothesis], columns[label])


def _json_lines(fields: tuple[str, ...], file: Path) -> Iterator[Row]:
    """Rows of a file with one JSON object per line."""
    for number, line in _lines(file):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}, line {number}: expected JSON, got {line[:80]!r} ({error})") from error
        if not isinstance(record, dict):
            raise DataError(f"{file}, line {number}: expected a JSON object, got {line[:80]!r}")
        missing = [name for name in fields[:2] if name not in record]
        if missing:
            raise DataError(
                f"{file}, line {number}: expected the fields {', '.join(fields)}, got {', '.join(record) or 'none'}"
            )
        yield Row(number, *(record.get(name) for name in fields))


FORMS: tuple[tuple[tuple[str, str], Callable[[Path], Iterator[Row]]], ...] = (
    (("train.tsv", "dev_matched.tsv"), _tab_separated),
    (("multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"), partial(_json_lines, PUBLISHED_FIELDS)),
    (("train.jsonl", "dev_matched.jsonl"), partial(_json_lines, FIELDS)),
)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Non-empty lines with their numbers; only a newline ends a line, since text may contain other separators."""
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as raw:
            for number, line in enumerate(raw, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        raise DataError(f"{file}, line {number}: expected UTF-8, got {error.object[:80]!r}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{file}, line {number + 1}: cannot be read ({error}): is the file complete? Fetch it again"
        ) from error


def _digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _saved(folder: Path) -> Source:
    """A folder written by DatasetDict.save_to_disk; its JSON files contain the fingerprint of its contents."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stamps = (
        file.read_bytes() if file.suffix == ".json" else f"{file.name} {file.stat().st_size}".encode() for file in files
    )
    return _datasets(str(folder), _digest(stamps), lambda datasets: datasets.load_from_disk(str(folder)))


def _datasets(name: str, digest: str, load: Callable[[Any], Any]) -> Source:
    loaded = cache(partial(_load, name, load))
    parts = {
        part: Part(f"{name} ({split})", partial(_dataset_rows, name, split, loaded)) for part, split in SPLITS.items()
    }
    return Source(digest, parts)


def _load(name: str, load: Callable[[Any], Any]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name} is read with the library `datasets`, which is not installed: pip install datasets, "
            "or set data.path to a folder with MNLI's own files"
        ) from error
    try:
        return load(datasets)
    except Exception as error:  # many kinds, from the network to Arrow
        raise DataError(
            f"expected MNLI as a folder or a data set on the hub that can be reached, got {name}, which could not be "
            f"loaded ({type(error).__name__}: {error}): check data.path and the network"
        ) from error


def _dataset_rows(name: str, split: str, loaded: Callable[[], Any]) -> Iterator[Row]:
    splits = loaded()
    if not isinstance(splits, dict) or split not in splits:
        present = ", ".join(splits) if isinstance(splits, dict) else "a single one"
        raise DataError(f"{name}: expected the splits {', '.join(SPLITS.values())}, got {present}")
    dataset = splits[split].with_format(None)  # plain Python values, whatever the saved format
    missing = [field for field in FIELDS if field not in dataset.column_names]
    if missing:
        raise DataError(f"{name} ({split}): expected the columns {', '.join(FIELDS)}, got {dataset.column_names}")
    names = getattr(dataset.features["label"], "names", LABELS)  # a data set may number its labels differently
    for first in range(0, len(dataset), DATASETS_ROWS):
        columns = dataset[first : first + DATASETS_ROWS]
        rows = zip(*(columns[field] for field in FIELDS), strict=True)
        for line, (premise, hypothesis, label) in enumerate(rows, first + 1):
            known = isinstance(label, int) and 0 <= label < len(names)
            yield Row(line, premise, hypothesis, names[label] if known else label)
