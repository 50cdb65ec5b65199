"""Tokenizers: a given one, or one trained on the training texts; and their files in the folder of a run and in every
export of it, as transformers' AutoTokenizer reads them."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from comera.errors import ConfigError, DataError
from comera.recipes.data.documents import Part, as_text

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
LONGEST_WORD = 256  # characters; training a byte-pair encoding takes time in proportion to its longest words
_KINDS = (r"[^\W\d_]", r"\d", r"[^\w\s]", "_", r"\s")  # of characters that make a word
LONG_WORD = re.compile("|".join(rf"{kind}{{{LONGEST_WORD + 1}}}" for kind in _KINDS))
SPECIAL_TOKENS = CLS, SEP, PAD, MASK, UNKNOWN = ("[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]")
ROLES = {"cls_token": CLS, "sep_token": SEP, "pad_token": PAD, "mask_token": MASK, "unk_token": UNKNOWN}
BYTE_ROLES = {role: f"<{name}>" for role, name in zip(ROLES, ("s", "/s", "pad", "mask", "unk"), strict=True)}
SHORTEST = 5  # [CLS] a [SEP] b [SEP]
VOCABULARY, MERGES, BYTE_VOCABULARY = "vocab.txt", "merges.txt", "vocab.json"
TOKENIZER_FILES = (FILE, VOCABULARY, BYTE_VOCABULARY)  # of which a folder with a tokenizer has one
TRAINING_BYTES = 16_000_000  # of texts that a tokenizer is trained on, at most


def tokenizer_files(tokenizer: Tokenizer, longest: int, **settings: Any) -> dict[str, str]:
    """The files of a tokenizer, text by name. longest: tokens of a text. settings: further ones, tokens by role, such
    as eos_token, among them."""
    stored = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest, **settings}
    stored |= {"clean_up_tokenization_spaces": False}
    return {FILE: tokenizer.to_str(pretty=True), SETTINGS: json.dumps(stored, indent=2) + "\n"}


def stored_tokenizer(run: Path) -> dict[str, str]:
    """Those files of a run's folder; raises ConfigError if they are missing."""
    try:
        return {name: (run / name).read_text("utf-8") for name in (FILE, SETTINGS)}
    except OSError as error:
        raise ConfigError(
            f"expected the run's tokenizer in {error.filename}, got none ({error.strerror}): put it back, it "
            "was written when the run started and is in every export of it"
        ) from None


def byte_level(model: models.BPE) -> Tokenizer:
    """A byte-level tokenizer, as in GPT-2 and RoBERTa."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, special ones first."""
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sample_texts(texts: Iterable[tuple[str, str]], limit: int, long_words: list[str]) -> Iterator[str]:
    """Texts to train a tokenizer on, of about `limit` bytes, out of (name, text) in this order; the names of those with
    long words, which are not among them, go to `long_words`."""
    for name, text in texts:
        if limit <= 0:
            return
        if LONG_WORD.search(text[:limit]):
            long_words.append(name)
            continue
        yield text[:limit]
        limit -= len(text.encode())


def train_on(train: Part, limit: int, vocab_size: int, special_tokens: Sequence[str]) -> tuple[Tokenizer, list[str]]:
    """A byte-level BPE tokenizer, trained on a random but fixed subset of the documents, of about `limit` bytes, and
    the names of those that it was not trained on for their long words."""
    long_words = list[str]()
    named = ((document.key, document.text) for document in train.sample(limit).read())
    return train_tokenizer(sample_texts(named, limit, long_words), vocab_size, special_tokens), long_words


def report_skipped(skipped: Mapping[str, int], long_words: Sequence[str]) -> list[str]:
    """Lines to print about files that were skipped, and about texts that the tokenizer was not trained on."""
    lines = [f"skipped files: {as_text(skipped)}"] if any(skipped.values()) else []
    if long_words:
        lines.append(
            f"the tokenizer was not trained on {len(long_words):,} files with words of more than {LONGEST_WORD} "
            f"characters, such as {long_words[0]}"
        )
    return lines


class TextTokenizer(NamedTuple):
    """A tokenizer that adds its special tokens and cuts nothing; roles: the special tokens by role, such as
    pad_token."""

    tokenizer: Tokenizer
    roles: Mapping[str, str]

    @classmethod
    def read(cls, file: Path, roles: Mapping[str, str]) -> "TextTokenizer":
        """One that was written to a tokenizer.json."""
        return cls(Tokenizer.from_file(str(file)), roles)

    @property
    def pad(self) -> int:
        """The id of the padding."""
        found = self.tokenizer.token_to_id(self.roles.get("pad_token", ""))
        return 0 if found is None else found

    @property
    def size(self) -> int:
        """Rows that a table for all token ids needs."""
        return max(self.tokenizer.get_vocab().values()) + 1

    def cutting(self, max_length: int) -> Tokenizer:
        """One that cuts examples to `max_length` tokens, the longer text of a pair first, and takes special tokens in a
        text for ordinary text."""
        tokenizer = Tokenizer.from_str(self.tokenizer.to_str())
        tokenizer.encode_special_tokens = True
        tokenizer.enable_truncation(max_length, strategy="longest_first")
        return tokenizer

    def files(self, longest: int, *inputs: str) -> dict[str, str]:
        """Its files for transformers' AutoTokenizer. longest: tokens of an example. inputs: arguments of the model."""
        about = {"model_input_names": list(inputs)} if inputs else {}
        return tokenizer_files(self.tokenizer, longest, **self.roles, **about)


def vocabulary_tokenizer(file: Path, option: str) -> TextTokenizer:
    """BERT's lower-case WordPiece tokenizer of the words in a vocab.txt. It recognizes no special tokens in text: a
    "[SEP]" in a sentence is ordinary text. Raises DataError for other files and missing special tokens."""
    try:
        lines = file.read_bytes().decode().rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: expected a vocabulary in UTF-8, got {error.object[:40]!r}: check {option}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}): check {option}") from error
    vocab = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    if missing := [token for token in SPECIAL_TOKENS if token not in vocab]:
        raise DataError(
            f"{file}: expected a WordPiece vocabulary with {', '.join(SPECIAL_TOKENS)}, got {len(lines):,} lines "
            f"without {', '.join(missing)}: set {option}"
        )
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing((SEP, vocab[SEP]), (CLS, vocab[CLS]))
    return TextTokenizer(tokenizer, ROLES)


def given_tokenizer(path: Path, option: str) -> TextTokenizer:
    """The tokenizer of a checkpoint, of a tokenizer.json, or of a vocabulary, in a folder or a file: WordPiece of a
    vocab.txt, byte-level BPE of vocab.json and merges.txt. Raises ConfigError for none, and for one without padding."""
    folder = path if path.is_dir() else path.parent
    has = {name: path.is_dir() and (folder / name).is_file() for name in (SETTINGS, *TOKENIZER_FILES)}
    if path.name == VOCABULARY or (has[VOCABULARY] and not has[FILE] and not has[SETTINGS]):
        return vocabulary_tokenizer(folder / VOCABULARY, option)
    try:
        if has[SETTINGS] or not path.exists():
            found = AutoTokenizer.from_pretrained(str(path))
            tokenizer = Tokenizer.from_str(found.backend_tokenizer.to_str())
            roles = {role: str(name) for role, name in found.special_tokens_map.items() if isinstance(name, str)}
        elif has[BYTE_VOCABULARY]:
            model = models.BPE.from_file(str(folder / BYTE_VOCABULARY), str(folder / MERGES))
            return _byte_level(byte_level(model))
        else:
            tokenizer = Tokenizer.from_str((path / FILE if path.is_dir() else path).read_text("utf-8"))
            known = [*ROLES.items(), *BYTE_ROLES.items()]
            roles = {role: name for role, name in known if tokenizer.token_to_id(name) is not None}
    except Exception as error:  # of many kinds, from the network to a missing file
        raise ConfigError(
            f"{option}: expected {FILE}, {VOCABULARY}, a folder with one or with {BYTE_VOCABULARY} and {MERGES}, or a "
            f"tokenizer that transformers reads, with a {FILE}, got {path} ({' '.join(str(error).split())[:200]}): set "
            "data.tokenizer"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if tokenizer.token_to_id(roles.get("pad_token", "")) is None:
        raise ConfigError(
            f"{option}: expected a tokenizer with a token for padding, got {path} with "
            f"{', '.join(roles.values()) or 'no special tokens'}: add one to it, or take another data.tokenizer"
        )
    return TextTokenizer(tokenizer, roles)


def _byte_level(tokenizer: Tokenizer) -> TextTokenizer:
    """A byte-level tokenizer with RoBERTa's special tokens; the second text of a pair is the second segment."""
    cls, sep = (BYTE_ROLES[role] for role in ("cls_token", "sep_token"))
    ids = tokenizer.get_vocab()
    if missing := [name for name in BYTE_ROLES.values() if name not in ids]:
        raise ConfigError(
            f"data.tokenizer: expected a vocabulary with {' '.join(BYTE_ROLES.values())}, got one without "
            f"{' '.join(missing)}: add them, or leave data.tokenizer out"
        )
    tokenizer.post_processor = processors.BertProcessing((sep, ids[sep]), (cls, ids[cls]))
    return TextTokenizer(tokenizer, BYTE_ROLES)


def trained_tokenizer(texts: Iterable[str], vocab_size: int, *, lowercase: bool) -> tuple[TextTokenizer, list[str]]:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens, and the texts that it was not trained on for their
    long words. The same texts give the same one; with WordPiece the library breaks ties differently each time."""
    steps = [normalizers.NFC(), *([normalizers.Lowercase()] if lowercase else [])]
    normalizer, long_words = normalizers.Sequence(steps), list[str]()  # type: ignore[arg-type]
    normal = ((text[:80], f" {normalizer.normalize_str(text)}") for text in texts)
    special = [BYTE_ROLES[role] for role in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")]
    tokenizer = train_tokenizer(sample_texts(normal, TRAINING_BYTES, long_words), vocab_size, special)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # a first word is like any other
    return _byte_level(tokenizer), long_words
