"""Texts or pairs of texts with labels, as token ids: where they are, which are held out, which tokenizer reads them.

    rows -> training | held-out (a file of its own, a split, or a share by a hash) -> tokenizer -> arrays and a manifest

See `comera.recipes.classify.prepared`."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from comera.errors import ConfigError, DataError, check_fields
from comera.recipes.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.classify.columns import find_columns
from comera.recipes.classify.files import (
    Columns,
    Part,
    Skipped,
    contents,
    dataset_rows,
    divided,
    feature_names,
    file_rows,
    load_splits,
    own_labels,
    read_examples,
    stamps,
    two_or_more,
)
from comera.recipes.classify.prepared import PreparedExamples, read_manifest, write_manifest, write_part
from comera.recipes.paths import typed_path
from comera.recipes.rows import ROW_SUFFIXES, Bad, column_names
from comera.recipes.sources import HUB_NAME, is_dataset
from comera.recipes.tokenizer_files import FILE
from comera.recipes.tokenizers import (
    SHORTEST,
    TOKENIZER_FILES,
    TextTokenizer,
    given_tokenizer,
    trained_tokenizer,
)

FORMAT = 1  # of the cache folders; raise it when their contents, or how they are made, change
HELD_OUT_SPLITS = ("validation", "valid", "dev")  # in `datasets`: the first one that is there


@dataclass(frozen=True)
class ClassifyDataConfig:
    """Texts and labels, and how they become batches of tokens."""

    path: str | None = None
    """File of rows, JSON lines or a table with a header (.jsonl, .csv, .tsv, also .gz); a folder saved by Hugging Face
    `datasets`; or the name of a data set on the hub."""
    text: str | None = None
    """Column of the text, of the first one for pairs; default: the only one that is likely to hold it."""
    pair: str | None = None
    """Column of the second text, for pairs."""
    label: str | None = None
    """Column of the label, names or whole numbers; default: the only one that is likely to hold it."""
    valid: str | None = None
    """File of held-out rows, with the same columns, or a split of the data set; default: its split validation or dev,
    or else a fraction of the rows in path."""
    held_out: float = 0.1
    """Fraction of the rows held out of training, where nothing else says which; rows of equal text stay together."""
    split_seed: int = 0
    """Which rows this fraction is: another seed holds out others."""
    test: str | None = None
    """File of test rows, with the same columns, or a split of the data set, for one evaluation at the end of a run."""
    subset: str | None = None
    """Subset of a data set on the hub, for those that have several."""
    tokenizer: str | None = None
    """A tokenizer.json or vocab.txt, or a folder with one, or with vocab.json and merges.txt; default: that of
    model.checkpoint or model.config, if it has one, else byte-level BPE trained on the training texts."""
    vocab_size: int = 8192
    """Tokens of a trained tokenizer, at most."""
    lowercase: bool = True
    """Whether a trained tokenizer reads all texts in lower case."""
    max_length: int = 128
    """Maximum tokens of an example, including special tokens; longer ones are cut, the longer text of a pair first, and
    counted."""
    max_examples: int | None = None
    """Train on the first examples only, up to this number."""
    buckets: int = 8
    """Number of padded lengths, evenly spaced up to max_length: more buckets mean less padding, but more shapes."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        checks = {
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "split_seed": (self.split_seed >= 0, "a number >= 0"),
            "vocab_size": (self.vocab_size >= 300, "at least 300, as 256 bytes and special tokens are among them"),
            "max_length": (self.max_length >= SHORTEST, f"at least {SHORTEST} tokens"),
            "max_examples": (self.max_examples is None or self.max_examples > 0, "a number > 0, or none"),
            "buckets": (self.buckets > 0, "a number > 0"),
        }
        check_fields(self, "data.", checks)


class Rows(NamedTuple):
    """Where the rows are. digest: changes when they do. columns: all of the training rows, and where they are, for
    messages. parts: makes "train", "dev", both as "whole", and if asked for "test" out of the columns to read. names:
    of the labels, where the data set has them."""

    digest: str
    columns: Callable[[], tuple[list[str], str]]
    parts: Callable[[Columns], dict[str, Part]]
    names: Callable[[Columns], tuple[str, ...]]


def find_rows(config: ClassifyDataConfig) -> Rows:
    """The rows that `config` names; of a data set nothing is loaded yet. Raises ConfigError without a path, and
    DataError for one that cannot be."""
    if config.path is None:
        raise ConfigError(
            "data.path: expected a file of rows, a folder saved by Hugging Face datasets, or a data set's name on "
            "their hub, got none: run `comera train classify --data.path FILE`"
        )
    path = typed_path(config.path, "data.path")
    if path.is_file():
        return _files(path, config)
    if path.is_dir() and is_dataset(path):
        return _splits(config, stamps(path), lambda library: library.load_from_disk(str(path)))
    if path.exists() or not HUB_NAME.fullmatch(config.path):
        what = "another folder" if path.exists() else "nothing"
        raise DataError(
            f"data.path: expected a file of rows ({' '.join(ROW_SUFFIXES)}), a folder saved by Hugging Face datasets, "
            f"or a name on their hub, got {path}, where {what} is"
        )
    named = [f"hub {config.path} {config.subset}".encode()]  # does not ask for changes: a second run works offline
    return _splits(config, named, lambda library: library.load_dataset(config.path, config.subset))


def _files(path: Path, config: ClassifyDataConfig) -> Rows:
    others = {"dev": ("data.valid", config.valid), "test": ("data.test", config.test)}
    files = {"train": path} | {part: typed_path(name, option) for part, (option, name) in others.items() if name}
    for part, file in files.items():
        option = others[part][0] if part in others else "data.path"
        if not (file.is_file() and file.name.endswith(ROW_SUFFIXES)):
            what = "is another file" if file.is_file() else "is no file"
            raise DataError(f"{option}: expected a file of rows ({' '.join(ROW_SUFFIXES)}), got {file}, which {what}")

    def columns() -> tuple[list[str], str]:
        return column_names(path, filter(None, (config.text, config.pair, config.label))), str(path)

    def parts(chosen: Columns) -> dict[str, Part]:
        found = {part: Part(str(file), partial(file_rows, file, chosen)) for part, file in files.items()}
        for part in (each for each in others if each in found):
            names = column_names(files[part], chosen.all)
            if any(name not in names for name in chosen.all):
                raise DataError(
                    f"{files[part]}: expected the columns {', '.join(chosen.all)} as in {path}, got "
                    f"{', '.join(names)}: check {others[part][0]}"
                )
        return _with_held_out(found, config)

    return Rows(contents(files.values()), columns, parts, lambda chosen: ())


def _splits(config: ClassifyDataConfig, stamped: Any, load: Callable[[Any], Any]) -> Rows:
    name = str(config.path)
    loaded = cache(partial(load_splits, name, load))

    def split(option: str, wanted: str) -> str:
        if wanted not in loaded():
            raise DataError(f"{option}: expected one of the splits {', '.join(loaded())} of {name}, got {wanted!r}")
        return wanted

    def parts(chosen: Columns) -> dict[str, Part]:
        splits = {"train": "train"}
        usual = next((each for each in HELD_OUT_SPLITS if each in loaded()), None)
        if config.valid or usual:
            splits["dev"] = split("data.valid", config.valid or str(usual))
        if config.test:
            splits["test"] = split("data.test", config.test)

        def rows(wanted: str, bad: Bad) -> Iterator[Any]:
            return dataset_rows(f"{name} ({wanted})", loaded()[wanted], chosen)

        found = {part: Part(f"{name} ({wanted})", partial(rows, wanted)) for part, wanted in splits.items()}
        return _with_held_out(found, config)

    digest = settings_digest([each.decode("utf-8", "replace") for each in stamped])
    return Rows(
        digest,
        lambda: (list(loaded()["train"].column_names), name),
        parts,
        lambda chosen: feature_names(loaded()["train"], chosen.label),
    )


def _with_held_out(parts: dict[str, Part], config: ClassifyDataConfig) -> dict[str, Part]:
    """All parts, with the held-out one divided from the training one if it has none of its own, and "whole", both."""
    parts["whole"] = parts["train"]
    if "dev" not in parts:
        parts["train"], parts["dev"] = divided(parts["train"], config.held_out, config.split_seed)
    return {name: parts[name] for name in ("whole", "train", "dev", "test") if name in parts}


def prepare(config: ClassifyDataConfig, beside: str | None = None, *, quiet: bool = False) -> PreparedExamples:
    """Read and tokenize the rows that `config` names; a second call with the same contents opens what the first made.
    One process prepares while the others wait; a killed one leaves nothing that looks complete. beside: folder or name
    of a checkpoint or config, whose tokenizer is taken if data.tokenizer names none. Says which columns were guessed,
    and what was skipped or cut. Raises DataError for rows that are missing or of no use, ConfigError for such a
    tokenizer."""
    rows, given = find_rows(config), find_tokenizer(config, beside)
    tokens = [given.tokenizer.to_str(), dict(given.roles)] if given else [config.vocab_size, config.lowercase]
    named = [config.text, config.pair, config.label, config.valid, config.test, config.held_out, config.split_seed]
    digest = settings_digest([FORMAT, rows.digest, tokens, named, config.max_length, config.max_examples])

    def load(folder: Path) -> PreparedExamples:
        tokenizer = TextTokenizer.read(folder / FILE, read_manifest(folder)["roles"])
        return PreparedExamples(folder, tokenizer, tokenizer.pad, config.max_length, config.buckets)

    data = open_or_make(
        cache_folder(config.cache) / f"classify-{digest}",
        load,
        lambda folder: _write(folder, rows, given, config, quiet),
    )
    if not quiet:
        print(*(f"classify: {line}" for line in _about(data, config)), sep="\n", file=sys.stderr)
    return data


def find_tokenizer(config: ClassifyDataConfig, beside: str | None) -> TextTokenizer | None:
    """The tokenizer that is not to be trained: that of data.tokenizer, else of a checkpoint or config; None without."""
    if config.tokenizer is not None:
        return given_tokenizer(typed_path(config.tokenizer, "data.tokenizer"), "data.tokenizer")
    if beside is None:
        return None
    option = "model.config or model.checkpoint"
    path = typed_path(beside, option)
    folder = path.parent if path.is_file() else path  # its config.json
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return given_tokenizer(folder, option)


def _write(folder: Path, rows: Rows, given: TextTokenizer | None, config: ClassifyDataConfig, quiet: bool) -> None:
    columns, guessed = find_columns(*rows.columns(), config.text, config.pair, config.label)
    parts = rows.parts(columns)
    whole = parts.pop("whole")
    labels = rows.names(columns) or own_labels(whole, columns)
    two_or_more(labels, whole, columns)
    long_words: list[str] = []
    tokenizer = given
    if tokenizer is None:
        examples = read_examples(parts["train"], columns, labels, Skipped())
        texts = (text for example in islice(examples, config.max_examples) for text in example.texts)
        tokenizer, long_words = trained_tokenizer(texts, config.vocab_size, lowercase=config.lowercase)
    (folder / FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), "utf-8")
    cutting = tokenizer.cutting(config.max_length)
    written = {
        name: write_part(
            *(folder, name, part, columns, labels, cutting, Skipped()),
            limit=config.max_examples if name == "train" else None,
            title="preparing the texts",
            quiet=quiet,
        )
        for name, part in parts.items()
    }
    about = {"texts": columns.texts, "label": columns.label, "guessed": guessed, "names": {}}
    about["names"] = {name: part.name for name, part in parts.items()}
    manifest = {"format": FORMAT, "vocab_size": tokenizer.size, "roles": dict(tokenizer.roles), "label_names": labels}
    write_manifest(folder, {**manifest, **about, "long_words": len(long_words), **written})


def _about(data: PreparedExamples, config: ClassifyDataConfig) -> Iterator[str]:
    """What was read, guessed, skipped and cut."""
    manifest = data.manifest
    columns = [*(f"text {name!r}" for name in manifest["texts"]), f"label {manifest['label']!r}"]
    guessed = " and ".join(manifest["guessed"])
    note = f" ({guessed} guessed; data.text and data.label name others)" if guessed else ""
    yield f"columns: {', '.join(columns)}{note}"
    sizes = [f"{data.train_size:,} examples to train on", f"{data.dev_size:,} held out"]
    sizes += [f"{len(data.test):,} to test on"] if data.test else []
    names = ", ".join(data.label_names[:10]) + (", ..." if len(data.label_names) > 10 else "")
    yield f"{', '.join(sizes)}; {len(data.label_names)} labels: {names}; {data.vocab_size:,} different tokens"
    for part in ("train", "dev", "test"):
        for reason, count in manifest.get(part, {}).get("skipped", {}).items():
            first = manifest[part]["first"].get(reason, "")
            yield f"skipped {count:,} rows of {manifest['names'][part]}: {reason} (the first: {first})"
    if data.cut:
        yield f"cut {data.cut:,} examples to {config.max_length} tokens (data.max_length)"
    if manifest["long_words"]:
        yield f"the tokenizer was not trained on {manifest['long_words']:,} texts with very long words"
