"""Byte-level tokenizers: each token stands for bytes, so that losses are comparable per byte, whatever the vocabulary.

Documents are joined by the byte 0, which the tokenizer's separator stands for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from comera.errors import ConfigError
from comera.recipes.data.tokenizer import FILE, byte_level, tokenizer_files

END_OF_TEXT = "<|endoftext|>"
BYTES = 256  # a vocabulary of this size is that of plain bytes: token ids are byte values
_SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # of known tokenizers
SEPARATOR_BYTE = b"\0"


def _byte_characters() -> dict[str, int]:
    """The printable character by which byte-level vocabularies write each byte (as in GPT-2) -> the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_characters()


def byte_tokenizer() -> Tokenizer:
    """The tokenizer of plain bytes; byte 0 separates documents."""
    return byte_level(models.BPE(vocab=dict(_BYTE_OF), merges=[]))


def read_tokenizer(path: Path, option: str = "data.tokenizer") -> Tokenizer:
    """A tokenizer from tokenizer.json, or from a folder that holds one; special tokens in a text are ordinary text.
    option: what named the path, for errors. Raises ConfigError for none, and for one that is not byte-level."""
    file = path / FILE if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_str(file.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{option}: expected {FILE} or a folder with one, got {path} ({error.strerror})") from None
    except Exception as error:  # the library raises no narrower type
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{option}: expected {FILE} of a tokenizer, got {file} ({reason})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        raise ConfigError(
            f"{option}: expected a byte-level tokenizer, as of GPT-2, Llama 3 and Qwen, got {file} with another "
            "decoder: its tokens stand for no certain bytes, and losses per byte could not be compared"
        )
    return tokenizer


def size_of(tokenizer: Tokenizer) -> int:
    """Rows that a table for all token ids needs."""
    return max(tokenizer.get_vocab().values()) + 1


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token stands for, by id; special tokens, which no text holds, stand for their name, and ids
    without a token for nothing."""
    added = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    table = [b""] * size_of(tokenizer)
    for token, id in tokenizer.get_vocab().items():
        known = id not in added and all(character in _BYTE_OF for character in token)
        table[id] = bytes(map(_BYTE_OF.__getitem__, token)) if known else token.encode()
    return table


def separator_of(tokenizer: Tokenizer) -> int:
    """The id of the token between documents: <|endoftext|> or what a tokenizer has in its place; for plain bytes 0.
    Raises ConfigError if there is none."""
    if size_of(tokenizer) == BYTES:
        return 0
    ids = [tokenizer.token_to_id(name) for name in _SEPARATORS]
    found = next((id for id in ids if id is not None), None)
    if found is None:
        raise ConfigError(
            f"data.tokenizer: expected a token between documents, one of {' '.join(_SEPARATORS)}, got a tokenizer "
            "without: add one to it"
        )
    return found


class ByteTable:
    """From token ids to bytes, in numpy. lengths: bytes of each token, (V,) int64. The separator counts as one byte."""

    def __init__(self, tokenizer: Tokenizer, separator: int) -> None:
        table = token_bytes(tokenizer)
        table[separator] = SEPARATOR_BYTE
        self.lengths = np.array([len(token) for token in table], np.int64)
        self._table = np.array(table, object)

    def bytes_of(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes that a row of tokens stands for, uint8."""
        return np.frombuffer(b"".join(self._table[ids.reshape(-1)]), np.uint8)


def run_files(tokenizer: Tokenizer, separator: int, longest: int) -> dict[str, str]:
    """The files by which transformers' AutoTokenizer and `comera generate` read a tokenizer. longest: tokens of a
    text."""
    if size_of(tokenizer) == BYTES:
        return tokenizer_files(tokenizer, longest)
    name = tokenizer.id_to_token(separator)
    assert name is not None  # `separator_of` found it
    return tokenizer_files(tokenizer, longest, bos_token=name, eos_token=name)
