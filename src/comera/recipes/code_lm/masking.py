"""Masked language modeling: which tokens are hidden, and what stands in their places."""

from typing import Any

import numpy as np

from comera.recipes.code_lm.vocabulary import Special

HELD_OUT_SEED = 0x5EED  # the same held-out masks for every method and every training seed

Array = np.ndarray[Any, Any]


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
