"""Rows of texts and labels: from files of rows and from data sets of Hugging Face's library `datasets`.

A recipe says which columns hold what, and whether a row that cannot be used is an error or is skipped and counted."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from comera.errors import DataError
from comera.recipes.corpus import place
from comera.recipes.rows import Bad, read_rows

MOST_LABELS = 1000
MOST_SHOWN = 10  # labels in a message
NO_LABEL, UNREADABLE = "no label", "unreadable row"  # reasons to leave a row out, beside empty texts
DATASETS_ROWS = 4096  # read from `datasets` at a time


class Columns(NamedTuple):
    """Names of the columns of the texts, one or two, and of the label. roles: what messages call the texts. options:
    that name the columns, for messages. strict: a row that cannot be read is an error; else it is skipped and counted.
    missing: values that mean that there is no label. numbered: a number that is no label's name is its place."""

    texts: tuple[str, ...]
    label: str
    roles: tuple[str, ...]
    options: str
    strict: bool = False
    missing: tuple[object, ...] = (None, "")
    numbered: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Those of the texts, then that of the label."""
        return (*self.texts, self.label)


class RawExample(NamedTuple):
    """An unchecked row as in its file, and its line number, from 1."""

    line: int
    texts: tuple[object, ...]
    label: object


class Example(NamedTuple):
    """A valid row; label: index into the names of the labels."""

    texts: tuple[str, ...]
    label: int


class Part(NamedTuple):
    """The rows of one part of the data: a name for messages, and a function that reads them from the start, and hands
    the errors of rows that do not parse to its argument."""

    name: str
    rows: Callable[[Bad], Iterator[RawExample]]


class Source(NamedTuple):
    """All parts by name, and a digest that changes when they do. labels: the names of the labels."""

    digest: str
    parts: dict[str, Part]
    labels: Callable[[], tuple[str, ...]]


@dataclass
class Skipped:
    """Rows that are skipped: counts by reason, and where the first of each is, or what is wrong with it. strict: a row
    that cannot be read is an error."""

    strict: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count a row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)

    def unreadable(self, error: DataError) -> None:
        """Count a row that cannot be read, or raise its error."""
        if self.strict:
            raise error
        self.add(UNREADABLE, str(error))


def read_examples(part: Part, columns: Columns, names: Sequence[str], skipped: Skipped) -> Iterator[Example]:
    """The examples of a part in order; rows without a label or a text are counted in `skipped`. names: of the labels.
    Raises DataError, with file and line, for an unknown label, and as `columns` say for rows that cannot be read."""
    for row in part.rows(skipped.unreadable):
        where = f"{part.name}, line {row.line}"
        try:
            texts = [_text(text, role, where, columns) for text, role in zip(row.texts, columns.roles, strict=True)]
        except DataError as error:
            skipped.unreadable(error)
            continue
        label = _label(row.label, names, where, columns)
        empty = next((role for text, role in zip(texts, columns.roles, strict=True) if not text.strip()), None)
        if label is None:
            skipped.add(NO_LABEL, where)
        elif empty is not None:
            skipped.add(f"empty {empty}", where)
        else:
            yield Example(tuple(texts), label)


def _text(value: object, role: str, where: str, columns: Columns) -> str:
    if value is None and not columns.strict:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text as {role}, got {value!r}: check the file, or remove this line")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can encode
        raise DataError(f"{where}: expected text as {role}, got {value[:80]!r} ({error.reason})") from error
    return value


def _label(value: object, names: Sequence[str], where: str, columns: Columns) -> int | None:
    if value in columns.missing:
        return None
    if isinstance(value, str | int) and not isinstance(value, bool):
        if str(value) in names:
            return names.index(str(value))
        if columns.numbered and isinstance(value, int) and 0 <= value < len(names):
            return value
    expected = ", ".join(f"{name} ({number})" for number, name in enumerate(names[:MOST_SHOWN]))
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    none = " or ".join(repr(each) for each in columns.missing if each not in (None, "")) or "nothing"
    raise DataError(
        f"{where}: expected as label {expected}{more}, or {none} for none, got {value!r}: check the file; labels are "
        "those of the training rows"
    )


def own_labels(part: Part, columns: Columns, most: int = MOST_LABELS) -> tuple[str, ...]:
    """All labels that occur in a part, numbers in their order, then names in theirs. Raises DataError for values that
    cannot be labels, and for more than `most`."""
    found: set[str] = set()
    for row in part.rows(Skipped(columns.strict).unreadable):
        if row.label not in columns.missing:
            if not isinstance(row.label, str | int) or isinstance(row.label, bool):
                raise DataError(
                    f"{part.name}, line {row.line}: expected a name or whole number as label, got {row.label!r}"
                )
            found.add(str(row.label))
        if len(found) > most:
            raise DataError(
                f"{part.name}, line {row.line}: expected up to {most:,} different labels, got more, such as "
                f"{str(row.label)[:60]!r}: is {columns.options.split()[-1]} the column of the labels?"
            )
    return tuple(sorted(found, key=lambda name: (0, int(name), "") if _is_integer(name) else (1, 0, name)))


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def two_or_more(names: Sequence[str], part: Part, columns: Columns) -> None:
    """Raise DataError unless there are two labels."""
    if len(names) < 2:
        raise DataError(
            f"{part.name}: expected two labels or more, got {f'{names[0]} alone' if names else 'none'}: check "
            f"{columns.options.split()[-1]}"
        )


def file_rows(file: Path, columns: Columns, bad: Bad) -> Iterator[RawExample]:
    """The rows of a file; a JSON object may lack a label. Raises DataError for a row without one of the columns, if
    `columns` are strict."""
    needed = columns.texts if ".jsonl" in file.suffixes else columns.all
    for line, values in read_rows(file, bad):
        if columns.strict and any(name not in values for name in needed):
            raise DataError(f"{file}, line {line}: {without(values, columns, 'fields')}")
        yield RawExample(line, tuple(values.get(name) for name in columns.texts), values.get(columns.label))


def without(found: Iterable[str], columns: Columns, kind: str) -> str:
    """What to say of rows without one of the columns. kind: what they have, "fields" or "columns"."""
    return (
        f"expected the {kind} {', '.join(columns.all)}, got {', '.join(found) or 'none'}: set {columns.options} to "
        "names of columns"
    )


def divided(part: Part, share: float, seed: int = 0) -> tuple[Part, Part]:
    """The training and the held-out rows of a part, by a hash of the texts: a row keeps its side when others come and
    go, and no text is on both sides. seed: another one holds out other rows."""

    def rows(held_out: bool, bad: Bad) -> Iterator[RawExample]:
        for row in part.rows((lambda error: None) if held_out else bad):  # counted once
            text = "\n".join([*([str(seed)] if seed else []), *map(str, row.texts)])
            text = text.encode("utf-8", "replace").decode()
            if (place("held-out", text) < share) == held_out:
                yield row

    return (
        Part(part.name, partial(rows, False)),
        Part(f"{part.name} (the {share:g} of it that is held out)", partial(rows, True)),
    )


def contents(files: Iterable[Path]) -> str:
    """A digest of the contents of files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as raw:
            hashlib.file_digest(raw, lambda: digest)  # type: ignore[arg-type,return-value]
    return digest.hexdigest()


def stamps(folder: Path) -> Iterator[bytes]:
    """What changes when a folder does that save_to_disk of `datasets` wrote: its JSON files contain the fingerprint of
    the contents."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        yield file.read_bytes() if file.suffix == ".json" else f"{file.name} {file.stat().st_size}".encode()


def load_splits(name: str, load: Callable[[Any], Any]) -> dict[str, Any]:
    """The splits of a data set by name; one without splits is all "train". load: from the library `datasets`. Raises
    DataError if it is not installed or the data set cannot be loaded."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name} is read with the library `datasets`, which is not installed: pip install datasets, "
            "or set data.path to a file or folder of rows"
        ) from error
    try:
        loaded = load(datasets)
    except Exception as error:  # many kinds, from the network to Arrow
        raise DataError(
            f"expected rows in a file, a folder or a data set on the hub that can be reached, got {name}, which could "
            f"not be loaded ({type(error).__name__}: {error}): check data.path and the network"
        ) from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    if "train" not in splits:
        raise DataError(f"{name}: expected the split train, got {', '.join(splits)}")
    return splits


def feature_names(split: Any, label: str) -> tuple[str, ...]:
    """The names of a data set's labels; none if they are plain values."""
    return tuple(getattr(split.features.get(label), "names", None) or ())


def dataset_rows(name: str, split: Any, columns: Columns, names: Sequence[str] = ()) -> Iterator[RawExample]:
    """The rows of a split, labels by name. names: of the labels where the data set has none. Raises DataError for one
    without these columns."""
    dataset = split.with_format(None)  # plain Python values, whatever the saved format
    if any(each not in dataset.column_names for each in columns.all):
        raise DataError(f"{name}: {without(dataset.column_names, columns, 'columns')}")
    own = feature_names(dataset, columns.label)
    names = own or names  # a data set may number its labels differently
    for first in range(0, len(dataset), DATASETS_ROWS):
        chunk = dataset[first : first + DATASETS_ROWS]
        rows = zip(*(chunk[each] for each in columns.all), strict=True)
        for line, (*texts, label) in enumerate(rows, first + 1):
            known = isinstance(label, int) and 0 <= label < len(names)
            unlabeled = own and label == -1  # as in test splits
            yield RawExample(line, tuple(texts), names[label] if known else None if unlabeled else label)
