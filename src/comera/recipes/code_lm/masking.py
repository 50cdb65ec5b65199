"""Masked language modeling: the special tokens, their tokenizer as transformers reads it, which tokens are hidden, and
what stands in their places."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, processors

from comera.errors import ConfigError
from comera.recipes.data.tokenizer import TextTokenizer, tokenizer_files

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
START, PAD, END, UNKNOWN, MASK = range(len(SPECIAL_TOKENS))  # of a tokenizer that was trained here
ROLES = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token", "mask_token"), SPECIAL_TOKENS, strict=True))
HELD_OUT_SEED = 0x5EED  # the same held-out masks for every method and every training seed

Array = np.ndarray[Any, Any]


class Special(NamedTuple):
    """Ids of the special tokens; the defaults are those of a tokenizer that was trained here."""

    start: int = START
    pad: int = PAD
    end: int = END
    unknown: int = UNKNOWN
    mask: int = MASK

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "Special":
        """Those of a given tokenizer; raises ConfigError if it lacks one. Unknown tokens are optional."""
        start, end = _frame(tokenizer.roles)
        names = {"start": start, "pad": tokenizer.roles.get("pad_token"), "end": end}
        names["mask"] = tokenizer.roles.get("mask_token")
        ids = {role: tokenizer.tokenizer.token_to_id(name or "") for role, name in names.items()}
        found = {role: id for role, id in ids.items() if id is not None}
        if missing := [role for role in names if role not in found]:
            raise ConfigError(
                "data.tokenizer: expected a tokenizer with tokens for start, pad, end and mask, got one without "
                f"{', '.join(missing)}: add them to it, or leave data.tokenizer out to train one"
            )
        unknown = tokenizer.tokenizer.token_to_id(tokenizer.roles.get("unk_token", ""))
        return cls(**found, unknown=found["mask"] if unknown is None else unknown)


def _frame(roles: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The tokens before and after a text, which BERT and RoBERTa know by other roles than GPT."""
    return roles.get("cls_token", roles.get("bos_token")), roles.get("sep_token", roles.get("eos_token"))


def frame_(tokenizer: Tokenizer, roles: Mapping[str, str]) -> None:
    """Make a tokenizer write <s> text </s>, and of a pair <s> first </s> second </s>, as one segment."""
    start, end = _frame(roles)
    assert start is not None
    assert end is not None
    ids = [(name, tokenizer.token_to_id(name)) for name in (start, end)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}", pair=f"{start} $A {end} $B:0 {end}:0", special_tokens=ids
    )


def run_files(tokenizer: Tokenizer, longest: int, roles: Mapping[str, str] = ROLES) -> dict[str, str]:
    """The tokenizer for transformers' AutoTokenizer, which frames a text as training did. longest: tokens of a text."""
    frame_(tokenizer, roles)
    return tokenizer_files(tokenizer, longest, **roles, model_input_names=["input_ids", "attention_mask"])


class Masking:
    """Masks of a vocabulary: 80 % of the chosen tokens become <mask>, 10 % a random token, 10 % stay (BERT)."""

    def __init__(self, vocab_size: int, special: Special) -> None:
        self._mask = special.mask
        self._ordinary = np.setdiff1d(np.arange(vocab_size), special)
        self._chosen_from = np.isin(np.arange(vocab_size), self._ordinary)

    def candidates(self, ids: Array) -> Array:
        """Places in flat ids (N,) that may be masked: never special tokens."""
        return np.flatnonzero(self._chosen_from[ids])

    def mask_(self, ids: Array, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Mask `count` tokens of flat ids (N,) int64 in place; returns their places, sorted, and what stood there."""
        positions = np.sort(rng.choice(self.candidates(ids), count, replace=False))
        labels = ids[positions]
        kind = rng.random(count)
        random_ids = self._ordinary[rng.integers(0, len(self._ordinary), count)]
        ids[positions] = np.where(kind < 0.8, self._mask, np.where(kind < 0.9, random_ids, labels))
        return positions, labels
