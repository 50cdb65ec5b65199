"""Reads sentence pairs: MNLI's published files, data sets of Hugging Face `datasets`, and files of one's own."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from comera.errors import DataError
from comera.recipes.corpus import place
from comera.recipes.paths import typed_path
from comera.recipes.rows import ROW_SUFFIXES, read_rows
from comera.recipes.sources import is_dataset

LABELS = ("entailment", "neutral", "contradiction")  # 0, 1, 2
PARTS = ("train", "dev")
HELD_OUT_SPLITS = ("validation_matched", "validation", "dev", "test")  # in `datasets`: the first one that is there
NO_LABEL, NO_PREMISE, NO_HYPOTHESIS = SKIPS = ("no label", "empty premise", "empty hypothesis")
MOST_LABELS = 100
SHARE = 0.05  # of pairs that is held out where nothing else says which
DATASETS_ROWS = 4096  # read from `datasets` at a time
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Fields(NamedTuple):
    """Names of the columns of both texts and the label."""

    premise: str
    hypothesis: str
    label: str


FIELDS = Fields("premise", "hypothesis", "label")
PUBLISHED_FIELDS = Fields("sentence1", "sentence2", "gold_label")


class RawPair(NamedTuple):
    """An unchecked pair as in its file, and its line number, from 1."""

    line: int
    premise: object
    hypothesis: object
    label: object


class Pair(NamedTuple):
    """A valid pair; label: index into the names of the labels."""

    premise: str
    hypothesis: str
    label: int


class Part(NamedTuple):
    """The training or development pairs: a name for messages, and a function that reads the rows from the start."""

    name: str
    rows: Callable[[], Iterator[RawPair]]


class Source(NamedTuple):
    """Both parts by name, and a digest that changes when they do. labels: the names of the labels."""

    digest: str
    parts: dict[str, Part]
    labels: Callable[[], tuple[str, ...]]


def find_source(path: str, fields: Fields = FIELDS, held_out_path: str | None = None, share: float = SHARE) -> Source:
    """The pairs at `path`: a file of one's own, a folder, or the data set of this name on the hub; nothing is parsed
    yet. fields: columns of the texts and labels of a file or data set. held_out_path: a file of held-out pairs.
    share: of the pairs that is held out where neither that nor the data set says. Raises DataError for other files, a
    folder without pairs, and a path that cannot name a data set."""
    folder = typed_path(path, "data.path")
    if folder.is_file():
        apart = typed_path(held_out_path, "data.held_out_path") if held_out_path else None
        return _own(folder, apart, fields, share)
    if held_out_path:
        raise DataError(f"data.held_out_path: expected data.path to be a file, too, got {path}: name the file of pairs")
    if folder.is_dir():
        return _saved(folder, fields, share) if is_dataset(folder) else _published(folder)
    if folder.exists() or not HUB_NAME.fullmatch(path):
        raise DataError(f"expected pairs in a file, a folder or on the hub, got {path}, which does not exist: check "
                        "data.path")  # fmt: skip
    # Does not ask the hub for changes, so that a second run works offline.
    digest = _digest([f"hub {path}".encode()], fields, share)
    return _datasets(path, digest, lambda datasets: datasets.load_dataset(path), fields, share)


def read_pairs(part: Part, names: Sequence[str], skipped: dict[str, int]) -> Iterator[Pair]:
    """The pairs of a part in order; those without a label or text are counted in `skipped`, by reason. names: of the
    labels. Raises DataError, with file and line, for unreadable rows, missing fields and unknown labels."""
    for row in part.rows():
        where = f"{part.name}, line {row.line}"
        premise, hypothesis = _text(row.premise, "premise", where), _text(row.hypothesis, "hypothesis", where)
        label = _label(row.label, names, where)
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


def _label(value: object, names: Sequence[str], where: str) -> int | None:
    if _unlabeled(value):
        return None
    if isinstance(value, str) and value in names:
        return names.index(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if str(value) in names:
            return names.index(str(value))
        if 0 <= value < len(names):
            return value
    expected = ", ".join(f"{name} ({number})" for number, name in enumerate(names))
    raise DataError(f"{where}: expected as label {expected}, or '-' or -1 for none, got {value!r}: check the file")


def _unlabeled(value: object) -> bool:
    """Whether annotators disagreed, or the row is of a test set."""
    return value is None or value in ("", "-", -1, "-1")


def _own_labels(part: Part) -> tuple[str, ...]:
    """The labels of a file of one's own: MNLI's, if it has no others, else all that occur, in order."""
    found: set[str] = set()
    for row in part.rows():
        if not _unlabeled(row.label):
            if not isinstance(row.label, str | int) or isinstance(row.label, bool):
                raise DataError(f"{part.name}, line {row.line}: expected a name or number as label, got {row.label!r}")
            found.add(str(row.label))
        if len(found) > MOST_LABELS:
            raise DataError(
                f"{part.name}, line {row.line}: expected up to {MOST_LABELS} different labels, got more, such as "
                f"{str(row.label)[:60]!r}: is data.label_field the column of the labels?"
            )
    if found <= {*LABELS}:
        return LABELS
    if len(found) < 2:
        raise DataError(
            f"{part.name}: expected two labels or more, got {', '.join(found)} alone: check data.label_field"
        )
    return tuple(sorted(found, key=lambda name: (int(name), "") if name.isdecimal() else (MOST_LABELS + 1, name)))


def _own(file: Path, apart: Path | None, fields: Fields, share: float) -> Source:
    """Pairs in a file, and held-out ones in another or a fraction of the same."""
    for path in (file, apart):
        if path is not None and not (path.is_file() and path.name.endswith(ROW_SUFFIXES)):
            what = "is another file" if path.is_file() else "is no file"
            raise DataError(f"expected a file of pairs ({' '.join(ROW_SUFFIXES)}), got {path}, which {what}")
    files = [path for path in (file, apart) if path is not None]
    parts = {
        "train": Part(str(file), partial(_pairs, file, fields)),
        "dev": Part(str(files[-1]), partial(_pairs, files[-1], fields)),
    }
    if apart is None:
        parts = _divided(parts["train"], share)
    digest = _digest([_contents(files).encode()], fields, share)
    return Source(digest, parts, partial(_own_labels, Part(str(file), partial(_pairs, file, fields))))


def _divided(part: Part, share: float) -> dict[str, Part]:
    """A part divided by a hash of both texts: a pair keeps its side when others come and go."""

    def rows(held_out: bool) -> Iterator[RawPair]:
        for row in part.rows():
            text = f"{row.premise}\n{row.hypothesis}".encode("utf-8", "replace").decode()
            if (place("held-out", text) < share) == held_out:
                yield row

    return {
        "train": Part(part.name, partial(rows, False)),
        "dev": Part(f"{part.name} (the {share:g} of it that is held out)", partial(rows, True)),
    }


def _published(folder: Path) -> Source:
    """The first of FORMS whose two files both exist, plain or gzipped."""
    for names, fields in FORMS:
        both = ((part, folder / f"{name}{end}") for part, name in zip(PARTS, names, strict=True) for end in (".gz", ""))
        files = {part: file for part, file in both if file.is_file()}  # a plain file counts before a compressed one
        if len(files) == len(PARTS):
            parts = {part: Part(str(file), partial(_pairs, file, fields)) for part, file in files.items()}
            return Source(_contents(files.values()), parts, lambda: LABELS)
    forms = "; ".join(" and ".join(names) for names, _ in FORMS)
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise DataError(
        f"expected MNLI in {folder}: a folder saved by Hugging Face datasets, or {forms} (each may end in .gz), "
        f"got {present}: check data.path, which may also name a file of pairs"
    )


def _pairs(file: Path, fields: Fields) -> Iterator[RawPair]:
    """The pairs in the rows of a file; a JSON object may lack a label."""
    for line, values in read_rows(file):
        needed = fields[:2] if ".jsonl" in file.suffixes else fields
        if any(name not in values for name in needed):
            raise DataError(
                f"{file}, line {line}: expected the fields {', '.join(fields)}, got {', '.join(values) or 'none'}: set "
                "data.premise_field, data.hypothesis_field and data.label_field to names of columns"
            )
        yield RawPair(line, *(values.get(name) for name in fields))


FORMS: tuple[tuple[tuple[str, str], Fields], ...] = (
    (("train.tsv", "dev_matched.tsv"), PUBLISHED_FIELDS),
    (("multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"), PUBLISHED_FIELDS),
    (("train.jsonl", "dev_matched.jsonl"), FIELDS),
)


def _contents(files: Iterable[Path]) -> str:
    """A digest of the contents of files."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        with open(file, "rb") as raw:
            hashlib.file_digest(raw, lambda: digest)  # type: ignore[arg-type,return-value]
    return digest.hexdigest()


def _digest(chunks: Iterable[bytes], fields: Fields, share: float) -> str:
    """A digest of what names the contents, and of the settings where they are not the default ones."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    if (fields, share) != (FIELDS, SHARE):
        digest.update(repr((tuple(fields), share)).encode())
    return digest.hexdigest()


def _saved(folder: Path, fields: Fields, share: float) -> Source:
    """A folder written by save_to_disk of `datasets`; its JSON files contain the fingerprint of its contents."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    stamps = (
        file.read_bytes() if file.suffix == ".json" else f"{file.name} {file.stat().st_size}".encode() for file in files
    )
    digest = _digest(stamps, fields, share)
    return _datasets(str(folder), digest, lambda datasets: datasets.load_from_disk(str(folder)), fields, share)


def _datasets(name: str, digest: str, load: Callable[[Any], Any], fields: Fields, share: float) -> Source:
    """The splits of a data set: "train" and the first of HELD_OUT_SPLITS, or else a fraction of "train"."""
    loaded = cache(partial(_load, name, load))

    def part(wanted: str) -> Iterator[RawPair]:
        splits = loaded()
        splits = splits if isinstance(splits, dict) else {"train": splits}
        if "train" not in splits:
            raise DataError(f"{name}: expected the split train, got {', '.join(splits)}")
        apart = next((split for split in HELD_OUT_SPLITS if split in splits), None)
        if apart is None:
            divided = _divided(Part(name, partial(_dataset_rows, f"{name} (train)", splits["train"], fields)), share)
            return divided[wanted].rows()
        split = "train" if wanted == "train" else apart
        return _dataset_rows(f"{name} ({split})", splits[split], fields)

    def labels() -> tuple[str, ...]:
        splits = loaded()
        train = splits.get("train", next(iter(splits.values()))) if isinstance(splits, dict) else splits
        names = _feature_names(train, fields)
        return LABELS if not names or set(names) == set(LABELS) else tuple(names)

    parts = {wanted: Part(f"{name} ({split})", partial(part, wanted))
             for wanted, split in zip(PARTS, ("train", "held out"), strict=True)}  # fmt: skip
    return Source(digest, parts, labels)


def _load(name: str, load: Callable[[Any], Any]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{name} is read with the library `datasets`, which is not installed: pip install datasets, "
            "or set data.path to a file or folder of pairs"
        ) from error
    try:
        return load(datasets)
    except Exception as error:  # many kinds, from the network to Arrow
        raise DataError(
            f"expected pairs in a file, a folder or a data set on the hub that can be reached, got {name}, which could "
            f"not be loaded ({type(error).__name__}: {error}): check data.path and the network"
        ) from error


def _feature_names(dataset: Any, fields: Fields) -> Sequence[str]:
    """The names of a data set's labels; none if they are plain values."""
    return getattr(dataset.features.get(fields.label), "names", None) or ()


def _dataset_rows(name: str, split: Any, fields: Fields) -> Iterator[RawPair]:
    dataset = split.with_format(None)  # plain Python values, whatever the saved format
    if any(field not in dataset.column_names for field in fields):
        raise DataError(
            f"{name}: expected the columns {', '.join(fields)}, got {', '.join(dataset.column_names)}: set "
            "data.premise_field, data.hypothesis_field and data.label_field to names of columns"
        )
    names = _feature_names(dataset, fields) or LABELS  # a data set may number its labels differently
    for first in range(0, len(dataset), DATASETS_ROWS):
        columns = dataset[first : first + DATASETS_ROWS]
        rows = zip(*(columns[field] for field in fields), strict=True)
        for line, (premise, hypothesis, label) in enumerate(rows, first + 1):
            known = isinstance(label, int) and 0 <= label < len(names)
            yield RawPair(line, premise, hypothesis, names[label] if known else label)
