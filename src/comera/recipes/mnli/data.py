"""MNLI's sentence pairs as token ids: read and tokenized once, then memory-mapped.

    files -> pairs -> [CLS] premise [SEP] hypothesis [SEP], truncated longest-first -> arrays and a manifest -> batches

The arrays lie in a cache folder named by a digest of the files, the vocabulary and the settings. Batches are pure
functions of their place in the run, so a resumed run sees the same ones."""

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from comera.errors import DataError, check_fields
from comera.recipes.cache import cache_folder, open_or_make, settings_digest
from comera.recipes.mnli.files import FIELDS, PARTS, SHARE, SKIPS, Fields, Part, Source, find_source, read_pairs
from comera.recipes.mnli.pairs import PairBatch, Pairs, PairWriter
from comera.recipes.paths import typed_path
from comera.recipes.progress import Progress
from comera.recipes.tokenizer_files import tokenizer_files

FORMAT = 1  # of the cache folder; raise it when its contents, or how they are made, change
SPECIAL_TOKENS = CLS, SEP, PAD, MASK, UNKNOWN = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")
SHORTEST = 5  # [CLS] a [SEP] b [SEP]
VOCABULARY = "vocab.txt"
USUAL_VOCABULARY = Path("vocab", "bert-base-uncased", VOCABULARY)  # beside the data's folder
PAIRS_AT = "https://dl.fbaipublicfiles.com/glue/data/MNLI.zip"  # for those who have none
VOCABULARY_AT = "https://huggingface.co/google-bert/bert-base-uncased"
_, NO_PREMISE, NO_HYPOTHESIS = SKIPS
ENCODE_PAIRS = 4096  # per call of the tokenizer: bounds memory, and keeps all cores busy


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
    premise_field: str = FIELDS.premise
    """Field or column of the first text, in a file or a data set."""
    hypothesis_field: str = FIELDS.hypothesis
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


class MNLIData:
    """Prepared MNLI: training and matched development pairs, memory-mapped. train, dev: the arrays. folder: where they
    lie, named after everything they depend on. tokenizer: that made them. manifest: where they come from. label_names:
    names of the labels 0, 1, ... skipped: skipped pairs of both parts, by reason."""

    def __init__(self, folder: Path, config: MNLIDataConfig, tokenizer: Tokenizer) -> None:
        self.config, self.folder, self.tokenizer = config, folder, tokenizer
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self.vocab_size: int = self.manifest["vocab_size"]
        self.label_names: tuple[str, ...] = tuple(self.manifest["label_names"])
        self.skipped: dict[str, int] = {w: sum(self.manifest[part]["skipped"][w] for part in PARTS) for w in SKIPS}
        pad = self.manifest["special_tokens"][PAD]
        self.train, self.dev = (Pairs(folder, part, config.max_length, config.buckets, pad) for part in PARTS)
        self.train_size, self.dev_size = len(self.train), len(self.dev)

    @property
    def label_counts(self) -> dict[str, dict[str, int]]:
        """Number of pairs by part ("train", "dev") and label."""
        counts = [np.bincount(pairs.labels, minlength=len(self.label_names)) for pairs in (self.train, self.dev)]
        return {
            part: dict(zip(self.label_names, c.tolist(), strict=True)) for part, c in zip(PARTS, counts, strict=True)
        }

    def steps_per_epoch(self, batch_size: int, processes: int = 1) -> int:
        """Steps that cover all training pairs, with `processes` batches per step."""
        return -(-self.train.batches_per_epoch(batch_size) // processes)

    def train_batch(self, index: int, batch_size: int, seed: int) -> PairBatch:
        """The `index`-th batch, counted over all epochs: a pure function of its arguments. Each epoch contains every
        pair once, in a new order; its last batch may be smaller. The pairs of a batch have near-equal length."""
        return self.train.shuffled(index, batch_size, seed)

    def dev_batches(self, batch_size: int) -> Iterator[PairBatch]:
        """All development pairs once, sorted by length: the same batches every time."""
        return self.dev.sorted(batch_size)


def prepare(config: MNLIDataConfig, *, quiet: bool = False) -> MNLIData:
    """Read and tokenize the pairs that `config` names; a second call with the same files opens what the first made. One
    process prepares while the others wait; a killed one leaves nothing that looks complete. Raises DataError for
    missing or malformed data or vocabulary, and for data without a single usable pair."""
    fields = Fields(config.premise_field, config.hypothesis_field, config.label_field)
    source = find_source(config.path, fields, config.held_out_path, config.held_out)
    vocabulary = find_vocabulary(config)
    try:
        words = vocabulary.read_bytes()
    except OSError as error:
        raise DataError(f"{vocabulary}: cannot be read ({error.strerror}): check data.vocab") from error
    digest = settings_digest(
        [FORMAT, source.digest, hashlib.blake2b(words).hexdigest(), config.max_length, config.max_examples]
    )

    vocab = parse_vocabulary(words, vocabulary)
    tokenizer = build_tokenizer(vocab, config.max_length)
    return open_or_make(
        cache_folder(config.cache) / f"mnli-{digest}",
        lambda folder: MNLIData(folder, config, tokenizer),
        lambda folder: _write(folder, source, vocab, tokenizer, config, digest, quiet),
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


def parse_vocabulary(words: bytes, file: Path) -> dict[str, int]:
    """Token ids from the lines of a vocab.txt; raises DataError for other files and missing special tokens."""
    try:
        lines = words.decode().rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file}: expected a vocabulary in UTF-8, got {error.object[:40]!r}: check data.vocab"
        ) from error
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    missing = [token for token in SPECIAL_TOKENS if token not in vocab]
    if missing:
        raise DataError(
            f"{file}: expected a WordPiece vocabulary with {', '.join(SPECIAL_TOKENS)}, got {len(lines):,} lines "
            f"without {', '.join(missing)}: set data.vocab"
        )
    return vocab


def build_tokenizer(vocab: dict[str, int], max_length: int) -> Tokenizer:
    """BERT's lower-case WordPiece tokenizer for pairs, truncating longest-first. It recognizes no special tokens in
    text: a "[SEP]" in a sentence is ordinary text."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing((SEP, vocab[SEP]), (CLS, vocab[CLS]))
    tokenizer.enable_truncation(max_length, strategy="longest_first")
    return tokenizer


def run_files(tokenizer: Tokenizer, longest: int) -> dict[str, str]:
    """The tokenizer for transformers' AutoTokenizer. longest: tokens of a pair."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    roles = {"cls_token": CLS, "sep_token": SEP, "pad_token": PAD, "mask_token": MASK, "unk_token": UNKNOWN}
    return tokenizer_files(plain, longest, **roles)


def _write(
    folder: Path,
    source: Source,
    vocab: dict[str, int],
    tokenizer: Tokenizer,
    config: MNLIDataConfig,
    digest: str,
    quiet: bool,
) -> None:
    limits = dict(zip(PARTS, (config.max_examples, None), strict=True))
    labels = source.labels()
    parts = {name: _tokenize(tokenizer, source.parts[name], labels, limits[name], quiet) for name in PARTS}
    manifest = {
        "format": FORMAT,
        "digest": digest,
        "max_length": config.max_length,
        "max_examples": config.max_examples,
        "vocab_size": max(vocab.values()) + 1,
        "special_tokens": {token: vocab[token] for token in SPECIAL_TOKENS},
        "label_names": labels,
        **{name: {**pairs.write(folder, name), "skipped": skipped} for name, (pairs, skipped) in parts.items()},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if not quiet:
        train, dev = (len(pairs) for pairs, _ in parts.values())
        print(f"MNLI: {train:,} pairs to train on, {dev:,} held out", file=sys.stderr)


def _tokenize(
    tokenizer: Tokenizer, part: Part, labels: Sequence[str], limit: int | None, quiet: bool
) -> tuple[PairWriter, dict[str, int]]:
    """The pairs of a part, at most `limit`, as token ids, and how many were skipped, by reason. labels: their names.
    Raises DataError if none remains."""
    writer, skipped = PairWriter(), dict.fromkeys(SKIPS, 0)
    with Progress(quiet) as progress:
        progress.start("preparing MNLI", None, "pairs")
        pairs = islice(read_pairs(part, labels, skipped), limit)
        while chunk := list(islice(pairs, ENCODE_PAIRS)):
            encodings = tokenizer.encode_batch_fast([(pair.premise, pair.hypothesis) for pair in chunk])
            for pair, encoding in zip(chunk, encodings, strict=True):
                ids, boundary = encoding.ids, encoding.type_ids.index(1)
                if boundary == len((CLS, SEP)):  # text, but only characters that BERT drops
                    skipped[NO_PREMISE] += 1
                elif boundary == len(ids) - len((SEP,)):
                    skipped[NO_HYPOTHESIS] += 1
                else:
                    writer.add(ids, boundary, pair.label)
            progress.to(len(writer), len(writer))
    if not len(writer):
        raise DataError(
            f"{part.name}: expected labeled sentence pairs, got none (skipped: {skipped}): check data.path, "
            "data.label_field and data.held_out"
        )
    return writer, skipped
