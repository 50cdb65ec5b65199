"""Rows of texts and labels: which columns hold them, which labels there are, and which rows are of no use.

Each file or split is passed over once; its examples are gathered in a memory-mapped Arrow file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from comera.errors import DataError
from comera.recipes.data.cache import gather
from comera.recipes.data.documents import place
from comera.recipes.data.tables import Bad, Row, open_rows, refuse

OPTIONS = "data.text, data.pair and data.label"
USUAL_LABELS = ("label", "labels", "class", "target", "category", "gold_label", "sentiment")
USUAL_TEXTS = ("text", "sentence", "review", "content", "document", "comment", "message", "tweet", "title", "question")
MOST_SHOWN = 10  # labels in a message
NO_LABEL, UNREADABLE = "no label", "unreadable row"  # reasons to leave a row out, beside empty texts
_KINDS = {"first": "large_string", "second": "large_string", "label": "string", "held_out": "bool"}


class Columns(NamedTuple):
    """Names of the columns of the texts, one or two, and of the label. roles: what messages call the texts. strict: a
    row that cannot be read is an error; else it is skipped and counted. missing: values that mean that there is no
    label. numbered: a number that is no label's name is its place. most: labels, at most."""

    texts: tuple[str, ...]
    label: str
    roles: tuple[str, ...]
    strict: bool = False
    missing: tuple[object, ...] = (None, "")
    numbered: bool = False
    most: int = 1000

    @property
    def all(self) -> tuple[str, ...]:
        """Those of the texts, then that of the label."""
        return (*self.texts, self.label)

    def check(self, found: Iterable[str], where: str, kind: str, option: str = OPTIONS) -> None:
        """Raise DataError if one is not among those found. kind: what these are, "fields" or "columns". option: to
        look at."""
        if not {*self.all} <= {*(found := list(found))}:
            raise DataError(
                f"{where}: expected the {kind} {', '.join(self.all)}, got {', '.join(found) or 'none'}: set {option} "
                "to names of columns, or take other data"
            )


def find_columns(
    found: Sequence[str], where: str, text: str | None, pair: str | None, label: str | None
) -> tuple[Columns, list[str]]:
    """The columns to read, and the roles of those that were guessed. found: all columns. where: they are, for messages.
    text, pair, label: as the user named them. A guess is the only column with a usual name, or the only one left.
    Raises DataError for a name that is no column, a column with two roles, and where a guess would be one of
    several."""
    named = {"data.text": text, "data.pair": pair, "data.label": label}
    for option, name in named.items():
        if name is not None and name not in found:
            raise DataError(f"{option}: expected one of the columns {', '.join(found)} of {where}, got {name!r}")
    given = [name for name in named.values() if name is not None]
    if len(set(given)) < len(given):
        raise DataError(f"expected different columns for {OPTIONS}, got {', '.join(given)}: name each once")
    guessed = [role for role, name in (("text", text), ("label", label)) if name is None]
    left = [name for name in found if name not in given]
    label = label or only_column(left, USUAL_LABELS, "data.label", "the label", where)
    left = [name for name in left if name != label]
    text = text or only_column(left, USUAL_TEXTS, "data.text (and data.pair for pairs)", "the text", where)
    if pair is None:
        return Columns((text,), label, ("text",)), guessed
    return Columns((text, pair), label, ("first text", "second text")), guessed


def only_column(left: Sequence[str], usual: Sequence[str], options: str, what: str, where: str) -> str:
    """The only one of the columns `left` with a usual name, or the only one; raises DataError for several. options:
    name it. what: it holds."""
    likely = [name for name in left if name.lower() in usual] or left
    if len(likely) != 1:
        raise DataError(
            f"{where}: expected one column that is likely to hold {what}, got {', '.join(likely) or 'none'}: set "
            f"{options}"
        )
    return likely[0]


class Table(NamedTuple):
    """The rows of a file or a split.

    name: for messages. open: takes the wanted columns and a callback for rows that do not parse; returns the names of
    all columns and a function that reads the rows, once. labels: the names of the labels in a column, if the data has
    them.
    """

    name: str
    open: Callable[[Iterable[str], Bad], tuple[list[str], Callable[[Columns], Iterator[Row]]]]
    labels: Callable[[str], tuple[str, ...]]


def file_table(file: Path, names: tuple[str, ...] = ()) -> Table:
    """The rows of a file. names: of the labels, if they are known."""

    def opened(wanted: Iterable[str], bad: Bad) -> tuple[list[str], Callable[[Columns], Iterator[Row]]]:
        found, rows = open_rows(file, wanted, bad)

        def read(columns: Columns) -> Iterator[Row]:
            lacking = [columns.label] if ".jsonl" in file.suffixes else []  # a JSON object may lack a label
            for row in rows:
                if columns.strict:
                    columns.check([*row.values, *lacking], f"{file}, line {row.line}", "fields")
                yield row

        return found, read

    return Table(str(file), opened, lambda column: names)


def split_table(name: str, split: Any, usual: tuple[str, ...] = ()) -> Table:
    """The rows of a split of a data set of `datasets`, labels by name where they have names. usual: names of the
    labels, where the data set has none."""

    def own(column: str) -> tuple[str, ...]:
        return tuple(getattr(split.features.get(column), "names", None) or ())

    def read(columns: Columns) -> Iterator[Row]:
        columns.check(split.column_names, name, "columns")
        names = own(columns.label)
        plain = split.select_columns(list(columns.all)).with_format(None)  # Python values, whatever the saved format
        for line, values in enumerate(plain, 1):
            label = values[columns.label]
            if names and isinstance(label, int):  # -1: unlabeled, as in test splits
                values[columns.label] = names[label] if 0 <= label < len(names) else None if label == -1 else label
            yield Row(line, values)

    return Table(name, lambda wanted, bad: (list(split.column_names), read), lambda column: own(column) or usual)


@dataclass
class Skipped:
    """Rows that are skipped: counts by reason, and where the first of each is, or what is wrong with it."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Count a row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, where)


class Gathered(NamedTuple):
    """The examples of one part. rows: a `datasets.Dataset` with the columns first, second and label, a name."""

    name: str
    rows: Any
    skipped: Skipped


class Gathering:
    """Passes over tables, of which the first decides about columns and labels. folder: for what is gathered. columns:
    None: as `named`, the columns of the text, of the second one and of the label, or else guessed. usual: names of the
    labels in their order, if no others occur. guessed: roles of the columns that were. names: of the labels."""

    names: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        columns: Columns | None,
        named: tuple[str | None, str | None, str | None],
        usual: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.columns, self.named, self.usual = folder, columns, named, usual
        self.guessed: list[str] = []

    def add(
        self, table: Table, option: str, share: float = 0, seed: int = 0, limit: int | None = None
    ) -> list[Gathered]:
        """The examples of a table; with a share two parts, those to train on and those that are held out, by a hash of
        the texts: a row keeps its side when others come and go, and no text is on both sides. option: named the table.
        seed: another one holds out other rows. limit: examples to train on, at most. Raises DataError, with file and
        line, for an unknown label, and as the columns say for rows that cannot be read."""
        parts = [Skipped(), Skipped()]  # to train on, held out
        strict = self.columns is not None and self.columns.strict
        bad: Bad = refuse if strict else lambda error: parts[0].add(UNREADABLE, str(error))
        found, read = table.open(self.columns.all if self.columns else filter(None, self.named), bad)
        if self.columns is None:
            self.columns, self.guessed = find_columns(found, table.name, *self.named)
        elif not strict:
            self.columns.check(found, table.name, "columns", option)
        columns = self.columns
        self.names = self.names or self._ordered(table.labels(columns.label))
        own = None if self.names else dict[str, None]()
        examples = self._examples(table.name, read(columns), columns, own, parts, share, seed)
        # where labels and held-out rows are known, a table need not be read to its end
        rows = gather(self.folder, examples if share or own is not None else islice(examples, limit), _KINDS)
        self.names = self.names or self._ordered(sorted(own or (), key=_by_number)) or self.usual
        if len(self.names) < 2:
            alone = f"{self.names[0]} alone" if self.names else "none"
            raise DataError(f"{table.name}: expected two labels or more, got {alone}: check data.label")
        if share:
            side = np.asarray(rows.select_columns("held_out").with_format("arrow")[:]["held_out"])
            sides = [rows.select(np.flatnonzero(side == k), keep_in_memory=True) for k in (False, True)]
        else:
            sides = [rows]
        if limit is not None:
            sides[0] = sides[0].select(range(min(limit, len(sides[0]))))
        names = (table.name, f"{table.name} (the {share:g} of it that is held out)")
        return list(map(Gathered, names, sides, parts))

    def _examples(
        self,
        name: str,
        rows: Iterable[Row],
        columns: Columns,
        own: dict[str, None] | None,
        parts: Sequence[Skipped],
        share: float,
        seed: int,
    ) -> Iterator[dict[str, Any]]:
        for line, values in rows:
            where, label = f"{name}, line {line}", values.get(columns.label)
            raw = [values.get(column) for column in columns.texts]
            key = "\n".join([*([str(seed)] if seed else []), *map(str, raw)])
            held_out = place("held-out", key.encode("utf-8", "replace").decode()) < share
            skipped = parts[held_out]
            if own is not None and label not in columns.missing:
                _collect(label, own, where, columns)
            try:
                texts = [text_of(text, role, where, columns) for text, role in zip(raw, columns.roles, strict=True)]
            except DataError as error:
                if columns.strict:
                    raise
                skipped.add(UNREADABLE, str(error))
                continue
            known = self._label(label, where, columns) if own is None else str(label)
            empty = next((role for text, role in zip(texts, columns.roles, strict=True) if not text.strip()), None)
            if label in columns.missing:
                skipped.add(NO_LABEL, where)
            elif empty is not None:
                skipped.add(f"empty {empty}", where)
            else:
                first, second = (*texts, None)[:2]
                yield {"first": first, "second": second, "label": known, "held_out": held_out}

    def _label(self, value: object, where: str, columns: Columns) -> str | None:
        """The name of a label, None for none."""
        names = self.names
        if value in columns.missing:
            return None
        if isinstance(value, str | int) and not isinstance(value, bool):
            if str(value) in names:
                return str(value)
            if columns.numbered and isinstance(value, int) and 0 <= value < len(names):
                return names[value]
        expected = ", ".join(f"{name} ({number})" for number, name in enumerate(names[:MOST_SHOWN]))
        more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
        none = " or ".join(repr(each) for each in columns.missing if each not in (None, "")) or "nothing"
        raise DataError(
            f"{where}: expected as label {expected}{more}, or {none} for none, got {value!r}: check the file; labels "
            "are those of the training rows"
        )

    def _ordered(self, names: Sequence[str]) -> tuple[str, ...]:
        """The usual names, if these are all among them; else these."""
        return self.usual if names and {*names} <= {*self.usual} else tuple(names)


def _collect(label: object, own: dict[str, None], where: str, columns: Columns) -> None:
    if not isinstance(label, str | int) or isinstance(label, bool):
        raise DataError(f"{where}: expected a name or whole number as label, got {label!r}")
    own[str(label)] = None
    if len(own) > columns.most:
        raise DataError(
            f"{where}: expected up to {columns.most:,} different labels, got more, such as {str(label)[:60]!r}: is "
            "data.label the column of the labels?"
        )


def _by_number(name: str) -> tuple[int, int, str]:
    """Orders numbers by value, and then names."""
    return (0, int(name), "") if name.removeprefix("-").isdecimal() else (1, 0, name)


def text_of(value: object, role: str, where: str, columns: Columns) -> str:
    """A value as text, empty without one; raises DataError for what is none, and where columns are strict for none."""
    if value is None and not columns.strict:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text as {role}, got {value!r}: check the file, or remove this line")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # a lone surrogate, which JSON can encode
        raise DataError(f"{where}: expected text as {role}, got {value[:80]!r} ({error.reason})") from error
    return value
