"""What code a model learns from and in what form: the options of `data`."""

from dataclasses import dataclass
from typing import Literal

from comera.errors import ConfigError, check_fields
from comera.recipes.code_lm.vocabulary import SPECIAL_TOKENS, Special
from comera.recipes.corpus import SUFFIXES
from comera.recipes.paths import typed_path
from comera.recipes.tokenizers import TextTokenizer, given_tokenizer

SMALLEST_VOCABULARY = len(SPECIAL_TOKENS) + 256  # a byte-level BPE starts with the 256 bytes
FEWEST_TOKENS = {"files": 4, "functions": 8}  # of a sequence: a pair has three special ones
Form = Literal["files", "functions"]


@dataclass(frozen=True)
class CodeDataConfig:
    """The source code and how it becomes sequences of tokens."""

    form: Form = "files"
    """files: whole files, packed into blocks; functions: single functions and pairs of a docstring and its function,
    one in each sequence."""
    path: str | None = None
    """Folder of source code, including subfolders; a file of JSON lines, CSV or TSV (also .gz), a folder written by
    save_to_disk of Hugging Face's datasets, or the name of a data set on their hub, with a source file in each row, or
    of form functions a function; default: Python's own standard library, and for functions the installed packages."""
    suffixes: tuple[str, ...] = SUFFIXES
    """File name suffixes to read in a folder. Functions are mined from Python alone; .jsonl and .jsonl.gz hold rows."""
    text_field: str = "text"
    """Field of JSON lines, column of tables and data sets that holds the source code; form files."""
    code_field: str | None = None
    """The same for the function in a row of form functions; default: the first of original_string, whole_func_string,
    func_code_string and code that a row has."""
    docstring_field: str | None = None
    """And for its docstring; default: docstring or func_documentation_string. Without any, that in the code."""
    subset: str | None = None
    """Subset of a data set on the hub, for those that have several."""
    max_bytes: int | None = None
    """Read only a random subset of the files or rows, of at most about this many bytes; the same subset every time."""
    held_out: float = 0.05
    """Fraction of the files or rows held out of training, to measure the loss on."""
    tokenizer: str | None = None
    """Folder with RoBERTa's vocab.json and merges.txt, with vocab.txt or with tokenizer.json, or one of the latter two;
    default: trained on the training part."""
    vocab_size: int = 8192
    """Tokens of the vocabulary: of the byte-level BPE to train, including five special tokens and the 256 bytes, or of
    the given tokenizer."""
    tokenizer_bytes: int = 4_000_000
    """Bytes of training files to train the tokenizer on."""
    block_size: int = 128
    """Tokens in a block: the sequence length; longer functions are cut."""
    mask_share: float = 0.15
    """Fraction of the tokens that are masked and predicted."""
    cache: str | None = None
    """Folder for prepared data; default: $XDG_CACHE_HOME/comera, or ~/.cache/comera."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "suffixes", tuple(self.suffixes))
        fewest = FEWEST_TOKENS.get(self.form, 0)
        checks = {
            "form": (self.form in FEWEST_TOKENS, f"one of {', '.join(FEWEST_TOKENS)}"),
            "suffixes": (bool(self.suffixes), "at least one suffix, such as .py"),
            "max_bytes": (self.max_bytes is None or self.max_bytes > 0, "a number > 0, or none"),
            "held_out": (0 < self.held_out < 1, "a fraction between 0 and 1"),
            "vocab_size": (self.vocab_size >= SMALLEST_VOCABULARY, f"at least {SMALLEST_VOCABULARY}"),
            "tokenizer_bytes": (self.tokenizer_bytes > 0, "a number > 0"),
            "block_size": (self.block_size >= fewest, f"at least {fewest} tokens"),
            "mask_share": (0 < self.mask_share < 0.3, "a fraction between 0 and 0.3"),
        }
        check_fields(self, "data.", checks)
        named = {name for name in ("code_field", "docstring_field") if getattr(self, name) is not None}
        if self.form == "files" and named:
            raise ConfigError(f"data.{min(named)} is for data.form functions: set data.text_field, or data.form")
        if self.form == "functions" and self.text_field != CodeDataConfig.text_field:
            raise ConfigError("data.text_field is for data.form files: set data.code_field and data.docstring_field")

    def given_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer that is not to be trained. Raises ConfigError for one without the special tokens that masked
        language modeling needs, and of another size than `vocab_size`."""
        if self.tokenizer is None:
            return None
        found = given_tokenizer(typed_path(self.tokenizer, "data.tokenizer"), "data.tokenizer")
        Special.of(found)
        if found.size != self.vocab_size:
            raise ConfigError(
                f"data.vocab_size: expected the {found.size:,} tokens of {self.tokenizer}, got {self.vocab_size:,}: "
                f"set data.vocab_size to {found.size}"
            )
        return found
