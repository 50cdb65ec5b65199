"""Texts or pairs of texts with labels, as token ids: where they are, which are held out, which tokenizer reads them.

    rows -> training | held-out (a file of its own, a split, or a share by a hash) -> tokenizer
         -> [CLS] text [SEP] or [CLS] first [SEP] second [SEP], cut at max_length -> arrays and a manifest

They are tokenized once into a cache folder, then memory-mapped."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from comera.errors import ConfigError, DataError, check_fields
from comera.files import typed_path
from comera.recipes.classify.rows import OPTIONS, Columns, Gathered, Gathering, Table, file_table, split_table
from comera.recipes.data import prepared
from comera.recipes.data.cache import Progress, cache_folder, open_or_make, settings_digest
from comera.recipes.data.documents import HUB_NAME, is_dataset, load_splits
from comera.recipes.data.tables import ROW_SUFFIXES, row_suffix
from comera.recipes.data.tokenizer import (
    BYTE_VOCABULARY,
    FILE,
    SHORTEST,
    TOKENIZER_FILES,
    VOCABULARY,
    TextTokenizer,
    given_tokenizer,
    trained_tokenizer,
    vocabulary_tokenizer,
)

COLUMNS = "columns.json"  # of a run: the names of its texts and of its label
FORMAT = 1  # of the cache folders; raise it when their contents, or how they are made, change
MNLI_LABELS = ("entailment", "neutral", "contradiction")  # 0, 1, 2
SPLITS = {  # held-out ones by form: the first one that is there
    "rows": ("validation", "valid", "dev"),
    "mnli": ("validation_matched", "validation", "dev", "test"),
}
PUBLISHED = {  # files of MNLI's forms, and their columns
    ("train.tsv", "dev_matched.tsv"): ("sentence1", "sentence2", "gold_label"),
    ("multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"): ("sentence1", "sentence2", "gold_label"),
    ("train.jsonl", "dev_matched.jsonl"): ("premise", "hypothesis", "label"),
}
PAIRS_AT = "https://dl.fbaipublicfiles.com/glue/data/MNLI.zip"  # for those who have none
VOCABULARY_AT = "https://huggingface.co/google-bert/bert-base-uncased"
USUAL_VOCABULARY = Path("vocab", "bert-base-uncased", VOCABULARY)  # beside the data's folder
Form = Literal["rows", "mnli"]


@dataclass(frozen=True)
class ClassifyDataConfig:
    """Texts and labels, and how they become batches of tokens."""

    path: str | None = None
    """File of rows, JSON lines or a table with a header (.jsonl, .csv, .tsv, also .gz); a folder saved by Hugging Face
    `datasets`; the name of a data set on the hub; or with form mnli a folder with MNLI's files, as of GLUE (train.tsv),
    of MultiNLI 1.0, or train.jsonl and dev_matched.jsonl, also .gz."""
    form: Form = "rows"
    """mnli: labels are MNLI's if there are no others, - and -1 mean none, a row that cannot be read is an error, and
    vocab.txt beside the data is the tokenizer; rows: all labels that occur, and such rows are skipped and counted."""
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
    model.checkpoint or model.config, if it has one, else byte-level BPE trained on the training texts, for form mnli
    vocab.txt in the data's folder, or ../vocab/bert-base-uncased/vocab.txt relative to it."""
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
            "path": (self.path != "", "a file, a folder or a name on the hub"),
            "form": (self.form in SPLITS, f"one of {', '.join(SPLITS)}"),
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "split_seed": (self.split_seed >= 0, "a number >= 0"),
            "vocab_size": (self.vocab_size >= 300, "at least 300, as 256 bytes and special tokens are among them"),
            "max_length": (self.max_length >= SHORTEST, f"at least {SHORTEST} tokens"),
            "max_examples": (self.max_examples is None or self.max_examples > 0, "a number > 0, or none"),
            "buckets": (self.buckets > 0, "a number > 0"),
        }
        check_fields(self, "data.", checks)

    @property
    def named(self) -> tuple[str | None, str | None, str | None]:
        """The columns that the user named: text, pair and label."""
        return self.text, self.pair, self.label


MNLI = ClassifyDataConfig(
    "nyu-mll/multi_nli", "mnli", "premise", "hypothesis", "label", held_out=0.05, vocab_size=30_522
)
"""MNLI's pairs; vocab_size: that of BERT, for estimates before they are there."""


class PreparedExamples:
    """Prepared texts, memory-mapped. train, dev: the arrays of the training and the held-out part; test: of the test
    part, None without one. folder: where they lie, named after everything they depend on. tokenizer: that made them.
    manifest: where they come from. label_names: names of the labels 0, 1, ... skipped, cut: examples of all parts that
    were skipped, by reason, and that were longer than `max_length`."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, max_length: int, buckets: int) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.manifest = prepared.read_manifest(folder)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.label_names: tuple[str, ...] = tuple(self.manifest["label_names"])
        parts = {part: self.manifest[part] for part in ("train", "dev", "test") if part in self.manifest}
        reasons = dict.fromkeys(reason for part in parts.values() for reason in part["skipped"])
        self.skipped = {reason: sum(part["skipped"].get(reason, 0) for part in parts.values()) for reason in reasons}
        self.cut = sum(part.get("cut", 0) for part in parts.values())
        arrays = {part: prepared.Examples(folder, part, max_length, buckets, tokenizer.pad) for part in parts}
        self.train, self.dev, self.test = arrays["train"], arrays["dev"], arrays.get("test")
        self.train_size, self.dev_size = len(self.train), len(self.dev)

    @property
    def label_counts(self) -> dict[str, dict[str, int]]:
        """Number of examples by part ("train", "dev") and label."""
        parts = {"train": self.train, "dev": self.dev}
        counts = {name: np.bincount(part.labels, minlength=len(self.label_names)) for name, part in parts.items()}
        return {name: dict(zip(self.label_names, each.tolist(), strict=True)) for name, each in counts.items()}

    @property
    def most_frequent(self) -> tuple[str, float]:
        """The most frequent label of the held-out examples, and its share of them: what a model that ignores its input
        reaches, the score to beat."""
        counts = self.label_counts["dev"]
        label = max(counts, key=counts.__getitem__)
        return label, counts[label] / self.dev_size

    def steps_per_epoch(self, batch_size: int, processes: int = 1) -> int:
        """Steps that cover all training examples, with `processes` batches per step."""
        return -(-self.train.batches_per_epoch(batch_size) // processes)

    def train_batch(self, index: int, batch_size: int, seed: int) -> prepared.ExampleBatch:
        """The `index`-th batch, see `Examples.shuffled`."""
        return self.train.shuffled(index, batch_size, seed)


@dataclass(frozen=True)
class Found:
    """Where the rows are; of a data set nothing is loaded yet. digest: changes when they do. tables: "train", and if
    they are asked for or there, "dev" and "test". columns: None: to be guessed."""

    digest: str
    tables: Callable[[], dict[str, Table]]
    columns: Columns | None = None


def find_rows(config: ClassifyDataConfig) -> Found:
    """The rows that `config` names. Raises ConfigError without a path, and DataError for one that cannot be."""
    if config.path is None:
        raise ConfigError(
            "data.path: expected a file of rows, a folder saved by Hugging Face datasets, or a data set's name on "
            "their hub, got none: run `comera train classify --data.path FILE`"
        )
    path, columns = typed_path(config.path, "data.path"), _columns(config, *config.named)
    if path.is_file():
        files = {"train": path} | _others(config)
        for part, file in files.items():
            if not (file.is_file() and row_suffix(file)):
                what = "is another file" if file.is_file() else "is no file"
                raise DataError(
                    f"{_option(part)}: expected a file of rows ({' '.join(ROW_SUFFIXES)}), got {file}, which {what}"
                )
        digest = _contents(files)
        return Found(
            _mnli_digest([digest.encode()], config, config.split_seed) if columns else digest,
            partial(_tables, files),
            columns,
        )
    if path.is_dir() and config.form == "mnli" and not is_dataset(path):
        return _published(path, config)
    if (path.exists() and not is_dataset(path)) or not (path.exists() or HUB_NAME.fullmatch(config.path)):
        what = "another folder" if path.exists() else "nothing"
        raise DataError(
            f"data.path: expected a file of rows ({' '.join(ROW_SUFFIXES)}), a folder saved by Hugging Face datasets, "
            f"or a name on their hub, got {path}, where {what} is"
        )
    if path.exists():
        stamped = [*_stamps(path)]
    else:  # does not ask for changes: a second run works offline
        stamped = [f"hub {config.path}{'' if columns else f' {config.subset}'}".encode()]
    digest = settings_digest([each.decode("utf-8", "replace") for each in stamped])
    if columns:
        digest = _mnli_digest(stamped, config, config.valid, config.test, config.subset, config.split_seed)
    return Found(digest, lambda: _splits(path, config), columns)


def _columns(config: ClassifyDataConfig, text: str | None, pair: str | None, label: str | None) -> Columns | None:
    """Those of form mnli; None for others."""
    if config.form == "rows":
        return None
    return Columns(
        (text or "premise", pair or "hypothesis"),
        label or "label",
        roles=("premise", "hypothesis"),
        strict=True,
        missing=(None, "", "-", -1, "-1"),
        numbered=True,
        most=100,
    )


def _others(config: ClassifyDataConfig) -> dict[str, Path]:
    """Files of held-out and test rows."""
    named = {"dev": config.valid, "test": config.test}
    return {part: typed_path(name, _option(part)) for part, name in named.items() if name}


def _option(part: str) -> str:
    return {"dev": "data.valid", "test": "data.test"}.get(part, "data.path")


def _published(folder: Path, config: ClassifyDataConfig) -> Found:
    """The first of MNLI's forms whose two files both exist, plain or gzipped."""
    if config.valid or config.test:
        raise DataError(f"data.valid and data.test: expected data.path to be a file, too, got {folder}: name the file")
    for names, columns in PUBLISHED.items():
        both = ((part, folder / f"{name}{end}") for part, name in zip(("train", "dev"), names, strict=True)
                for end in (".gz", ""))  # fmt: skip
        files = {part: file for part, file in both if file.is_file()}  # a plain file counts before a compressed one
        if len(files) == 2:
            tables = partial(_tables, files, MNLI_LABELS)
            return Found(_contents(files), tables, _columns(config, *columns))
    forms = "; ".join(" and ".join(names) for names in PUBLISHED)
    present = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
    raise DataError(
        f"expected MNLI in {folder}: a folder saved by Hugging Face datasets, or {forms} (each may end in .gz), "
        f"got {present}: check data.path, which may also name a file of pairs"
    )


def _tables(files: dict[str, Path], names: tuple[str, ...] = ()) -> dict[str, Table]:
    return {part: file_table(file, names) for part, file in files.items()}


def _splits(path: Path, config: ClassifyDataConfig) -> dict[str, Table]:
    loaded = load_splits(path, "data.path", config.subset)
    usual = next((split for split in SPLITS[config.form] if split in loaded), None)
    wanted = {"train": "train", "dev": config.valid or usual, "test": config.test}
    tables = {}
    for part, split in ((part, split) for part, split in wanted.items() if split):
        if split not in loaded:
            raise DataError(f"{_option(part)}: expected one of the splits {', '.join(loaded)} of {path}, got {split!r}")
        names = MNLI_LABELS if config.form == "mnli" else ()
        tables[part] = split_table(f"{path} ({split})", loaded[split], names)
    return tables


def _contents(files: dict[str, Path]) -> str:
    """A digest of the contents of files, of which part each one is and how it is read."""
    found: list[object] = []
    for part, file in files.items():
        with open(file, "rb") as raw:
            digest = hashlib.file_digest(raw, partial(hashlib.blake2b, digest_size=16))  # type: ignore[arg-type]
        found.append([part, row_suffix(file), digest.hexdigest()])
    return settings_digest(found)


def _stamps(folder: Path) -> Iterator[bytes]:
    """What changes when a folder does that save_to_disk of `datasets` wrote: its JSON files contain the fingerprint of
    the contents."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        yield file.read_bytes() if file.suffix == ".json" else f"{file.name} {file.stat().st_size}".encode()


def _mnli_digest(stamped: Iterable[bytes], config: ClassifyDataConfig, *later: object) -> str:
    """A digest for form mnli, the same as before it was a form of this recipe: of what names the contents, and of
    settings where they are not the default ones. later: settings that there were not then."""
    columns = tuple(map(str, config.named))
    digest = hashlib.blake2b(b"".join(stamped), digest_size=16)
    if (columns, config.held_out) != (MNLI.named, MNLI.held_out):
        digest.update(repr((columns, config.held_out)).encode())
    if any(later):
        digest.update(repr(later).encode())
    return digest.hexdigest()


def find_tokenizer(config: ClassifyDataConfig, beside: str | None) -> TextTokenizer | None:
    """The tokenizer that is not to be trained: that of data.tokenizer, else of a checkpoint or config, else for form
    mnli the vocabulary beside the data; None without."""
    if config.tokenizer is None and beside is not None:
        option = "model.config or model.checkpoint"
        path = typed_path(beside, option)
        folder = path.parent if path.is_file() else path  # its config.json
        if not folder.is_dir() or any((folder / name).is_file() for name in TOKENIZER_FILES):
            return given_tokenizer(folder, option)
    if config.form == "mnli":
        file = _vocabulary(config)
        if file.suffix != ".json":
            return vocabulary_tokenizer(file, "data.tokenizer")
        return given_tokenizer(file.parent if file.name == BYTE_VOCABULARY else file, "data.tokenizer")
    if config.tokenizer is not None:
        return given_tokenizer(typed_path(config.tokenizer, "data.tokenizer"), "data.tokenizer")
    return None


def _vocabulary(config: ClassifyDataConfig) -> Path:
    """The vocabulary or tokenizer of form mnli; raises DataError if there is none."""
    data = typed_path(str(config.path), "data.path").resolve()
    if config.tokenizer:
        candidates = [typed_path(config.tokenizer, "data.tokenizer")]
    else:
        folder = data.parent if data.is_file() else data
        candidates = [folder / VOCABULARY, folder.parent / USUAL_VOCABULARY] if folder.is_dir() else []
    for path in candidates:
        found = [path, *(path / name for name in (VOCABULARY, *TOKENIZER_FILES))]
        if file := next((file for file in found if file.is_file()), None):
            return file
    if not candidates:
        raise DataError(
            f"expected MNLI's sentence pairs and a vocabulary, got no folder at data.path ({config.path!r}) and no "
            f"data.tokenizer: unpack {PAIRS_AT}, of which train.tsv and dev_matched.tsv are read, put {VOCABULARY} of "
            f"{VOCABULARY_AT} beside them, and run `comera train mnli --data.path FOLDER`"
        )
    looked = " or ".join(map(str, candidates))
    raise DataError(
        f"expected a WordPiece vocabulary, one token a line, got nothing at {looked}: put {VOCABULARY} of "
        f"{VOCABULARY_AT} there, or give its place as data.tokenizer"
    )


def prepare(config: ClassifyDataConfig, beside: str | None = None, *, quiet: bool = False) -> PreparedExamples:
    """Read and tokenize the rows that `config` names; a second call with the same contents opens what the first made.
    One process prepares while the others wait; a killed one leaves nothing that looks complete. beside: folder or name
    of a checkpoint or config, whose tokenizer is taken if data.tokenizer names none. Says which columns were guessed,
    and what was skipped or cut. Raises DataError for rows that are missing or of no use, ConfigError for such a
    tokenizer."""
    found, given = find_rows(config), find_tokenizer(config, beside)
    lengths = [config.max_length, config.max_examples]
    if config.form == "mnli":
        words = hashlib.blake2b(_vocabulary(config).read_bytes()).hexdigest()
        name = f"mnli-{settings_digest([FORMAT, found.digest, words, *lengths])}"
    else:
        tokens = [given.tokenizer.to_str(), dict(given.roles)] if given else [config.vocab_size, config.lowercase]
        named = [*config.named, config.valid, config.test, config.held_out, config.split_seed]
        name = f"classify-{settings_digest([FORMAT, found.digest, tokens, named, *lengths])}"

    def load(folder: Path) -> PreparedExamples:
        tokenizer = given or TextTokenizer.read(folder / FILE, prepared.read_manifest(folder)["roles"])
        return PreparedExamples(folder, tokenizer, config.max_length, config.buckets)

    folder = cache_folder(config.cache) / name
    data = open_or_make(folder, load, lambda folder: _write(folder, found, given, config, quiet))
    if not quiet:
        print(*(f"{name.partition('-')[0]}: {line}" for line in _about(data, config)), sep="\n", file=sys.stderr)
    return data


def _write(folder: Path, found: Found, given: TextTokenizer | None, config: ClassifyDataConfig, quiet: bool) -> None:
    tables = found.tables()
    gathering = Gathering(folder, found.columns, config.named, MNLI_LABELS if config.form == "mnli" else ())
    share = 0 if "dev" in tables else config.held_out
    train = gathering.add(tables.pop("train"), "data.path", share, config.split_seed, config.max_examples)
    gathered = dict(zip(("train", "dev"), train, strict=False))
    gathered |= {part: gathering.add(table, _option(part))[0] for part, table in tables.items()}
    long_words, tokenizer = list[str](), given
    if tokenizer is None:
        texts = (text for row in gathered["train"].rows for text in (row["first"], row["second"]) if text is not None)
        tokenizer, long_words = trained_tokenizer(texts, config.vocab_size, lowercase=config.lowercase)
    (folder / FILE).write_text(tokenizer.tokenizer.to_str(pretty=True), "utf-8")
    cutting, columns, names = tokenizer.cutting(config.max_length), gathering.columns, gathering.names
    assert columns is not None
    with Progress(quiet) as progress:
        progress.start("preparing the texts", sum(len(part.rows) for part in gathered.values()))
        written = {
            name: _write_part(folder, name, part, columns, names, cutting, progress) for name, part in gathered.items()
        }
    manifest = {"format": FORMAT, "vocab_size": tokenizer.size, "roles": dict(tokenizer.roles), "label_names": names}
    about = {"texts": columns.texts, "label": columns.label, "guessed": gathering.guessed}
    where = {"names": {name: part.name for name, part in gathered.items()}}
    prepared.write_manifest(folder, {**manifest, **about, **where, "long_words": len(long_words), **written})


def _write_part(
    folder: Path,
    name: str,
    part: Gathered,
    columns: Columns,
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    progress: Progress,
) -> dict[str, Any]:
    """Tokenize a part and write its arrays; returns what the manifest says of it: numbers of examples and tokens, and
    how many were skipped, by reason, or cut. tokenizer: which cuts long texts. Raises DataError if none remains."""
    written, cut, skipped, pairs = list[prepared.Example](), 0, part.skipped, len(columns.texts) > 1
    number = {label: k for k, label in enumerate(labels)}
    for chunk in part.rows.iter(prepared.ENCODE_EXAMPLES):
        texts: list[Any] = list(zip(chunk["first"], chunk["second"], strict=True)) if pairs else chunk["first"]
        for text, label, encoding in zip(texts, chunk["label"], tokenizer.encode_batch_fast(texts), strict=True):
            ids, sequences = encoding.ids, set(encoding.sequence_ids)
            empty = next((k for k in range(len(columns.texts)) if k not in sequences), None)
            if empty is not None:  # text, but only characters that the tokenizer drops
                shown = text[empty] if pairs else text
                skipped.add(f"empty {columns.roles[empty]}", f"{part.name}, {shown!r:.80}")
                continue
            cut += bool(encoding.overflowing)
            segments = encoding.type_ids
            boundary = segments.index(1) if 1 in segments else len(ids)
            written.append((np.array(ids, np.int32), boundary, number[label]))
        progress.add(len(texts))
    if not written:
        raise DataError(
            f"{part.name}: expected labeled {'sentence pairs' if pairs else 'texts'}, got none "
            f"(skipped: {skipped.counts}): check data.path, {OPTIONS} and data.held_out"
        )
    return {
        **prepared.write_examples(folder, name, written),
        "skipped": skipped.counts,
        "first": skipped.first,
        "cut": cut,
    }


def columns(data: PreparedExamples, config: ClassifyDataConfig) -> dict[str, Any]:
    """The columns that were read: of "texts" and of the "label". mnli, before it was a form of classify, did not note
    them in what it prepared; they are those that it reads."""
    noted = {"texts": config.named[:2], "label": config.label} | data.manifest
    return {name: noted[name] for name in ("texts", "label")}


def _about(data: PreparedExamples, config: ClassifyDataConfig) -> Iterator[str]:
    """What was read, guessed, skipped and cut."""
    parts = {name: name for name in ("train", "dev", "test")}
    before: dict[str, Any] = {"guessed": [], "names": parts, "long_words": 0}  # of data that mnli prepared
    manifest = before | data.manifest
    read = columns(data, config)
    named = [*(f"text {name!r}" for name in read["texts"]), f"label {read['label']!r}"]
    guessed = " and ".join(manifest["guessed"])
    note = f" ({guessed} guessed; data.text and data.label name others)" if guessed else ""
    yield f"columns: {', '.join(named)}{note}"
    sizes = [f"{data.train_size:,} examples to train on", f"{data.dev_size:,} held out"]
    sizes += [f"{len(data.test):,} to test on"] if data.test else []
    names = ", ".join(data.label_names[:10]) + (", ..." if len(data.label_names) > 10 else "")
    yield f"{', '.join(sizes)}; {len(data.label_names)} labels: {names}; {data.vocab_size:,} different tokens"
    for part in parts:
        for reason, count in manifest.get(part, {}).get("skipped", {}).items():
            if count:
                first = manifest[part].get("first", {}).get(reason, "")
                yield f"skipped {count:,} rows of {manifest['names'][part]}: {reason} (the first: {first})"
    if data.cut:
        yield f"cut {data.cut:,} examples to {config.max_length} tokens (data.max_length)"
    if manifest["long_words"]:
        yield f"the tokenizer was not trained on {manifest['long_words']:,} texts with very long words"
