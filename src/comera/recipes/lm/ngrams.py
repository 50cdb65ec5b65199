"""What byte n-grams reach: the losses that a language model must get below to have learned more than frequencies.

Interpolated Witten-Bell smoothing: a history h that was seen c(h) times, with T(h) different bytes after it, gives

    p_n(w | h) = (c(h w) + T(h) p_{n-1}(w | h')) / (c(h) + T(h)),    p_0 = 1 / 256,    h' = h without its first byte.
"""

from typing import Any, TypeAlias

import numpy as np

NAMES = ("unigrams", "bigrams", "trigrams")
_NONE = np.int32(256**3)  # above the code of every n-gram
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int_ | np.int32]]


def _probabilities(order: int, train: Bytes, codes: Integers, lower: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Of n-grams of one order, given those of the lower one."""
    known, often = np.unique(_codes(train, order), return_counts=True)
    seen = np.bincount(known >> 8, often, 256 ** (order - 1))[codes >> 8]
    kinds = np.bincount(known >> 8, minlength=256 ** (order - 1))[codes >> 8]
    known, often = np.append(known, _NONE), np.append(often, 0)
    at = np.searchsorted(known, codes)
    counts = np.where(known[at] == codes, often[at], 0)
    return np.where(seen > 0, (counts + kinds * lower) / np.maximum(seen + kinds, 1), lower)


def _codes(data: Bytes, order: int) -> Integers:
    """The n-grams that end at each byte but the first order - 1, as integers."""
    length = len(data) - order + 1
    codes = np.zeros(max(0, length), np.int32)  # sorts several times faster than int64
    for k in range(order):
        codes = (codes << 8) | data[k : k + max(0, length)]
    return codes


def ngram_losses(train: Bytes, blocks: Bytes, lengths: Integers, given: Integers) -> dict[str, float]:
    """Mean loss of unigrams, bigrams and trigrams, in nats per byte.

    Args:
        train: bytes to count.
        blocks: bytes of the held-out blocks, one after the other; no history reaches back into another block.
        lengths: bytes of each block.
        given: leading bytes of each block that are history only and not scored.

    Returns:
        Losses by name.

    Example:
        >>> import numpy as np
        >>> from comera.recipes.lm.ngrams import ngram_losses
        >>> ab = np.frombuffer(b"ab" * 500, np.uint8)
        >>> losses = ngram_losses(ab, ab, np.array([1000]), np.array([1]))
        >>> {name: round(loss, 2) for name, loss in losses.items()}
        {'unigrams': 0.7, 'bigrams': 0.0, 'trigrams': 0.0}
    """
    places = np.arange(len(blocks)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    scored = places >= np.repeat(given, lengths)
    losses, lower = {}, np.full(len(blocks), 1 / 256)
    for order, name in enumerate(NAMES, 1):
        codes = _codes(np.concatenate([np.zeros(order - 1, np.uint8), blocks]), order)
        found = _probabilities(order, train, codes, lower)
        lower = np.where(places >= order - 1, found, lower)  # without so long a history: the lower order
        losses[name] = float(-np.log(lower[scored]).mean())
    return losses
