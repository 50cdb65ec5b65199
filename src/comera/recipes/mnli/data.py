"""MNLI's sentence pairs as token ids: which files and vocabulary, how long; see `comera.recipes.classify.prepared`."""

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

from comera.errors import DataError, check_fields
from comera.recipes.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.classify.files import Columns, Skipped, Source
from comera.recipes.classify.prepared import PreparedExamples, read_manifest, write_manifest, write_part
from comera.recipes.mnli.files import FIELDS, PARTS, SHARE, SKIPS, fields, find_source
from comera.recipes.paths import typed_path
from comera.recipes.tokenizers import (
    PAD,
    ROLES,
    SHORTEST,
    SPECIAL_TOKENS,
    VOCABULARY,
    TextTokenizer,
    parse_vocabulary,
    wordpiece,
)

FORMAT = 1  # of the cache folder; raise it when its contents, or how they are made, change
USUAL_VOCABULARY = Path("vocab", "bert-base-uncased", VOCABULARY)  # beside the data's folder
PAIRS_AT = "https://dl.fbaipublicfiles.com/glue/data/MNLI.zip"  # for those who have none
VOCABULARY_AT = "https://huggingface.co/google-bert/bert-base-uncased"


@dataclass(frozen=True)
class MNLIDataConfig:
    """The sentence pairs and how they become batches of tokens."""

    path: str = "nyu-mll/multi_nli"
    """Folder with train.tsv and dev_matched.tsv (GLUE), with multinli_1.0_train.jsonl and
    multinli_1.0_dev_matched.jsonl, or with train.jsonl and dev_matched.jsonl (premise, hypothesis, label), any of them
    gzipped; a folder saved by Hugging Face `datasets`; the name of a data set on the hub; or a file of other pairs:
    JSON lines, CSV or TSV with a header (.jsonl, .csv, .tsv, also .gz)."""
    held_out_path: str | None = None
    """File of held-out pairs, if path is a file; default: a fraction of the pairs in path."""
    held_out: float = SHARE
    """Fraction of the pairs held out of training, where neither held_out_path nor the data set says which."""
    premise_field: str = FIELDS.texts[0]
    """Field or column of the first text, in a file or a data set."""
    hypothesis_field: str = FIELDS.texts[1]
    """Field or column of the second text."""
    label_field: str = FIELDS.label
    """Field or column of the label. Labels other than MNLI's become classes of their own."""
    vocab: str | None = None
    """Lower-case WordPiece vocabulary: a vocab.txt or a folder with one; default: the one in the data's folder, else
    ../vocab/bert-base-uncased/vocab.txt relative to it."""
    max_length: int = 128
    """Maximum tokens per pair, including special tokens; longer pairs are truncated, the longer sentence first."""
    max_examples: int | None = None
    """Train on the first pairs only, up to this number."""
    buckets: int = 8
    """Number of padded lengths, evenly spaced up to max_length: more buckets mean less padding, but more shapes."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        checks = {
            "path": (bool(self.path), "a file, a folder or a name on the hub"),
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "max_length": (self.max_length >= SHORTEST, f"at least {SHORTEST} tokens"),
            "max_examples": (self.max_examples is None or self.max_examples > 0, "a number > 0, or none"),
            "buckets": (self.buckets > 0, "a number > 0"),
        }
        check_fields(self, "data.", checks)


def prepare(config: MNLIDataConfig, *, quiet: bool = False) -> PreparedExamples:
    """Read and tokenize the pairs that `config` names; a second call with the same files opens what the first made. One
    process prepares while the others wait; a killed one leaves nothing that looks complete. Raises DataError for
    missing or malformed data or vocabulary, and for data without a single usable pair."""
    columns = fields(config.premise_field, config.hypothesis_field, config.label_field)
    source = find_source(config.path, columns, config.held_out_path, config.held_out)
    vocabulary = find_vocabulary(config)
    try:
        words = vocabulary.read_bytes()
    except OSError as error:
        raise DataError(f"{vocabulary}: cannot be read ({error.strerror}): check data.vocab") from error
    digest = settings_digest(
        [FORMAT, source.digest, hashlib.blake2b(words).hexdigest(), config.max_length, config.max_examples]
    )

    tokenizer = TextTokenizer(wordpiece(parse_vocabulary(words, vocabulary)), ROLES)

    def load(folder: Path) -> PreparedExamples:
        pad = read_manifest(folder)["special_tokens"][PAD]
        return PreparedExamples(folder, tokenizer, pad, config.max_length, config.buckets)

    return open_or_make(
        cache_folder(config.cache) / f"mnli-{digest}",
        load,
        lambda folder: _write(folder, source, columns, tokenizer, config, digest, quiet),
    )


def find_vocabulary(config: MNLIDataConfig) -> Path:
    """The vocabulary's file; raises DataError if there is none."""
    data = typed_path(config.path, "data.path").resolve()
    if config.vocab:
        given = typed_path(config.vocab, "data.vocab")
        candidates = [given / VOCABULARY if given.is_dir() else given]
    else:
        folder = data.parent if data.is_file() else data
        candidates = [folder / VOCABULARY, folder.parent / USUAL_VOCABULARY] if folder.is_dir() else []
    for file in candidates:
        if file.is_file():
            return file
    if not candidates:
        raise DataError(
            f"expected MNLI's sentence pairs and a vocabulary, got no folder at data.path ({config.path!r}) and no "
            f"data.vocab: unpack {PAIRS_AT}, of which train.tsv and dev_matched.tsv are read, put {VOCABULARY} of "
            f"{VOCABULARY_AT} beside them, and run `comera train mnli --data.path FOLDER`"
        )
    looked = " or ".join(map(str, candidates))
    raise DataError(
        f"expected a WordPiece vocabulary, one token a line, got nothing at {looked}: put {VOCABULARY} of "
        f"{VOCABULARY_AT} there, or give its place as data.vocab"
    )


def _write(
    folder: Path,
    source: Source,
    columns: Columns,
    tokenizer: TextTokenizer,
    config: MNLIDataConfig,
    digest: str,
    quiet: bool,
) -> None:
    limits = dict(zip(PARTS, (config.max_examples, None), strict=True))
    labels, cutting = source.labels(), tokenizer.cutting(config.max_length)
    vocab = tokenizer.tokenizer.get_vocab()
    parts = {
        name: write_part(
            *(folder, name, source.parts[name], columns, labels, cutting),
            Skipped(strict=True, counts=dict.fromkeys(SKIPS, 0)),
            limit=limits[name],
            title="preparing MNLI",
            quiet=quiet,
        )
        for name in PARTS
    }
    manifest = {
        "format": FORMAT,
        "digest": digest,
        "max_length": config.max_length,
        "max_examples": config.max_examples,
        "vocab_size": tokenizer.size,
        "special_tokens": {token: vocab[token] for token in SPECIAL_TOKENS},
        "label_names": labels,
        **parts,
    }
    write_manifest(folder, manifest)
    if not quiet:
        train, dev = (part["examples"] for part in parts.values())
        print(f"MNLI: {train:,} pairs to train on, {dev:,} held out", file=sys.stderr)
