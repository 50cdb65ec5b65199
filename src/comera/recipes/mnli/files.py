"""Where MNLI's sentence pairs are: published files, data sets of Hugging Face `datasets`, and files of one's own."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from comera.errors import DataError
from comera.recipes.classify.files import (
    Columns,
    Part,
    RawExample,
    Source,
    contents,
    dataset_rows,
    divided,
    feature_names,
    file_rows,
    load_splits,
    own_labels,
    stamps,
    two_or_more,
)
from comera.recipes.paths import typed_path
from comera.recipes.rows import ROW_SUFFIXES, Bad
from comera.recipes.sources import HUB_NAME, is_dataset

LABELS = ("entailment", "neutral", "contradiction")  # 0, 1, 2
PARTS = ("train", "dev")
HELD_OUT_SPLITS = ("validation_matched", "validation", "dev", "test")  # in `datasets`: the first one that is there
SKIPS = ("no label", "empty premise", "empty hypothesis")
MOST_LABELS = 100
SHARE = 0.05  # of pairs that is held out where nothing else says which


def fields(premise: str, hypothesis: str, label: str) -> Columns:
    """The columns of pairs; a row that cannot be read is an error, "-" and -1 stand where annotators disagreed or the
    row is of a test set."""
    return Columns(
        (premise, hypothesis),
        label,
        roles=("premise", "hypothesis"),
        options="data.premise_field, data.hypothesis_field and data.label_field",
        strict=True,
        missing=(None, "", "-", -1, "-1"),
        numbered=True,
    )


FIELDS = fields("premise", "hypothesis", "label")
PUBLISHED_FIELDS = fields("sentence1", "sentence2", "gold_label")


def find_source(path: str, columns: Columns = FIELDS, held_out_path: str | None = None, share: float = SHARE) -> Source:
    """The pairs at `path`: a file of one's own, a folder, or the data set of this name on the hub; nothing is parsed
    yet. columns: texts and labels of a file or data set. held_out_path: a file of held-out pairs. share: of the pairs
    that is held out where neither that nor the data set says. Raises DataError for other files, a folder without pairs,
    and a path that cannot name a data set."""
    folder = typed_path(path, "data.path")
    if folder.is_file():
        apart = typed_path(held_out_path, "data.held_out_path") if held_out_path else None
        return _own(folder, apart, columns, share)
    if held_out_path:
        raise DataError(f"data.held_out_path: expected data.path to be a file, too, got {path}: name the file of pairs")
    if folder.is_dir():
        return _saved(folder, columns, share) if is_dataset(folder) else _published(folder)
    if folder.exists() or not HUB_NAME.fullmatch(path):
        raise DataError(f"expected pairs in a file, a folder or on the hub, got {path}, which does not exist: check "
                        "data.path")  # fmt: skip
    # Does not ask the hub for changes, so that a second run works offline.
    digest = _digest([f"hub {path}".encode()], columns, share)
    return _datasets(path, digest, lambda datasets: datasets.load_dataset(path), columns, share)


def _own(file: Path, apart: Path | None, columns: Columns, share: float) -> Source:
    """Pairs in a file, and held-out ones in another or a fraction of the same."""
    for path in (file, apart):
        if path is not None and not (path.is_file() and path.name.endswith(ROW_SUFFIXES)):
            what = "is another file" if path.is_file() else "is no file"
            raise DataError(f"expected a file of pairs ({' '.join(ROW_SUFFIXES)}), got {path}, which {what}")
    whole = Part(str(file), partial(file_rows, file, columns))
    if apart is None:
        train, dev = divided(whole, share)
    else:
        train, dev = whole, Part(str(apart), partial(file_rows, apart, columns))
    digest = _digest([contents([path for path in (file, apart) if path]).encode()], columns, share)
    return Source(digest, {"train": train, "dev": dev}, partial(_labels, whole, columns))


def _labels(part: Part, columns: Columns) -> tuple[str, ...]:
    """The labels of a file of one's own: MNLI's, if it has no others, else all that occur."""
    found = own_labels(part, columns, MOST_LABELS)
    if {*found} <= {*LABELS}:
        return LABELS
    two_or_more(found, part, columns)
    return found


def _published(folder: Path) -> Source:
    """The first of FORMS whose two files both exist, plain or gzipped."""
    for names, columns in FORMS:
        both = ((part, folder / f"{name}{end}") for part, name in zip(PARTS, names, strict=True) for end in (".gz", ""))
        files = {part: file for part, file in both if file.is_file()}  # a plain file counts before a compressed one
        if len(files) == len(PARTS):
            parts = {part: Part(str(file), partial(file_rows, file, columns)) for part, file in files.items()}
            return Source(contents(files.values()), parts, lambda: LABELS)
    forms = "; ".join(" and ".join(names) for names, _ in FORMS)
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise DataError(
        f"expected MNLI in {folder}: a folder saved by Hugging Face datasets, or {forms} (each may end in .gz), "
        f"got {present}: check data.path, which may also name a file of pairs"
    )


FORMS: tuple[tuple[tuple[str, str], Columns], ...] = (
    (("train.tsv", "dev_matched.tsv"), PUBLISHED_FIELDS),
    (("multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"), PUBLISHED_FIELDS),
    (("train.jsonl", "dev_matched.jsonl"), FIELDS),
)


def _digest(chunks: Iterable[bytes], columns: Columns, share: float) -> str:
    """A digest of what names the contents, and of the settings where they are not the default ones."""
    digest = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        digest.update(chunk)
    if (columns, share) != (FIELDS, SHARE):
        digest.update(repr((columns.all, share)).encode())
    return digest.hexdigest()


def _saved(folder: Path, columns: Columns, share: float) -> Source:
    """A folder written by save_to_disk of `datasets`."""
    digest = _digest(stamps(folder), columns, share)
    return _datasets(str(folder), digest, lambda datasets: datasets.load_from_disk(str(folder)), columns, share)


def _datasets(name: str, digest: str, load: Callable[[Any], Any], columns: Columns, share: float) -> Source:
    """The splits of a data set: "train" and the first of HELD_OUT_SPLITS, or else a fraction of "train"."""
    loaded = cache(partial(load_splits, name, load))

    def part(held_out: bool, bad: Bad) -> Iterator[RawExample]:
        splits = loaded()
        apart = next((split for split in HELD_OUT_SPLITS if split in splits), None)
        if apart is None:
            whole = Part(name, lambda _: dataset_rows(f"{name} (train)", splits["train"], columns, LABELS))
            return divided(whole, share)[held_out].rows(bad)
        split = apart if held_out else "train"
        return dataset_rows(f"{name} ({split})", splits[split], columns, LABELS)

    def labels() -> tuple[str, ...]:
        names = feature_names(loaded()["train"], columns.label)
        return LABELS if not names or {*names} == {*LABELS} else names

    parts = {
        wanted: Part(f"{name} ({shown})", partial(part, wanted == "dev"))
        for wanted, shown in zip(PARTS, ("train", "held out"), strict=True)
    }
    return Source(digest, parts, labels)
