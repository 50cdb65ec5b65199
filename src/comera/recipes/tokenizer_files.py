"""The tokenizer of a run, in its folder and in every export of it, as transformers' AutoTokenizer reads it."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from comera.errors import ConfigError

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"


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
