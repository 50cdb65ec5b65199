"""A synthetic click log: rows in Criteo's format whose clicks follow a planted model, so the lowest loss is known.

    logit = bias + Σ_i w_i log(1 + x_i) + Σ_f a_f[c_f] + Σ_{f < 13} ⟨u_f[c_f], u_{f+13}[c_{f+13}]⟩,    click ~ Bernoulli

x_i: integers, log-normal, some missing or negative. c_f: categories, distributed by a power law, the k-th about 1/k as
frequent as the first, some missing (these add nothing). A model thus needs the integers, the categories and products of
their embeddings, exactly what DLRM has. A longer log starts with the shorter one of the same seed.
R rows of a chunk."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from comera.recipes.dlrm.criteo.config import CATEGORIES, INTEGERS
from comera.recipes.dlrm.criteo.rows import MISSING, Array, log_integers

CHUNK = 32_768  # rows drawn from one random generator
# Categories of each feature, distributed like the real data: from a handful to many that occur once.
# fmt: off
TABLES = (
    1460, 583, 250000, 120000, 305, 24, 12517, 633, 3, 30000, 5683, 200000, 3194, 27, 14992, 150000, 10, 5652, 2173, 4,
    200000, 18, 15, 60000, 105, 40000,
)
# fmt: on
FACTORS = 4  # of the planted embeddings
DEVIATIONS = {"integers": 0.7, "categories": 0.9, "products": 0.8}  # standard deviations of the terms of the logit
CLICK_RATE = 0.2562  # of the Kaggle data
NO_INTEGER = np.iinfo(np.int32).min  # marks an empty field
CALIBRATION = 2**32 - 1  # index of the chunk that sets the bias; no log reaches it


@dataclass(frozen=True)
class Clicks:
    """Rows of the log. labels: (R,) uint8. integers: (13, R) int32, NO_INTEGER if missing. values: (26, R) uint32, 0 if
    missing. probabilities: (R,) of the planted model."""

    labels: Array
    integers: Array
    values: Array
    probabilities: Array

    def dense(self) -> Array:
        """log(1 + x), 0 for missing and negative x: (13, R) float32."""
        return log_integers(self.integers)

    def losses(self) -> Array:
        """Log loss of the planted probabilities in each row: no model can do better on average."""
        losses: Array = -np.log(np.where(self.labels, self.probabilities, 1 - self.probabilities))
        return losses

    def text(self) -> str:
        """The rows in Criteo's format, one per line."""
        columns = [[str(x) for x in self.labels.tolist()]]
        columns += [["" if x == NO_INTEGER else str(x) for x in column] for column in self.integers.tolist()]
        columns += [["" if x == MISSING else f"{x:08x}" for x in column] for column in self.values.tolist()]
        return "".join(f"{line}\n" for line in map("\t".join, zip(*columns, strict=True)))


class ClickLog:
    """The planted model of a seed, and the rows drawn from it."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        rng = np.random.default_rng([seed, 0])
        self._shapes = rng.uniform([0.3, 0.6, 0.0], [3.0, 1.6, 0.3], (INTEGERS, 3))  # mean, deviation, share missing
        self._missing = rng.uniform(0, 0.3, CATEGORIES) * (rng.random(CATEGORIES) < 0.5)
        self._weights = rng.standard_normal(INTEGERS)
        self._weights *= DEVIATIONS["integers"] / np.linalg.norm(self._weights * self._shapes[:, 1])
        main = DEVIATIONS["categories"] / math.sqrt(CATEGORIES)
        factor = math.sqrt(DEVIATIONS["products"]) / (CATEGORIES / 2 * FACTORS) ** 0.25
        # a_f, then u_f, for each category; the last row stands for a missing one and is 0
        scales = np.array([main, *[factor] * FACTORS])
        self._effects = [np.vstack([rng.standard_normal((size, 1 + FACTORS)) * scales, 0 * scales]) for size in TABLES]
        self._bias = 0.0
        self._bias = _bias_for(CLICK_RATE, self._chunk(CALIBRATION)[0])

    def chunks(self, rows: int) -> Iterator[Clicks]:
        """The first `rows` rows, in chunks."""
        for first in range(0, rows, CHUNK):
            logits, integers, values, draws = self._chunk(first // CHUNK)
            probabilities = 1 / (1 + np.exp(-logits))
            part = slice(0, rows - first)
            labels = (draws < probabilities).astype(np.uint8)
            yield Clicks(labels[part], integers[:, part], values[:, part], probabilities[part])

    def write(self, path: Path, rows: int) -> Path:
        """Write the log in Criteo's format; returns `path`."""
        with open(path, "w", encoding="ascii", newline="\n") as file:
            for clicks in self.chunks(rows):
                file.write(clicks.text())
        return path

    def _chunk(self, number: int) -> tuple[Array, Array, Array, Array]:
        """Logits, integers, values and uniform draws of CHUNK rows."""
        rng = np.random.default_rng([self.seed, 1, number])
        means, deviations, missing = self._shapes.T[:, :, None]
        integers = np.expm1(means + deviations * rng.standard_normal((INTEGERS, CHUNK)))
        integers = np.clip(np.floor(integers), -2, 2**31 - 1).astype(np.int32)
        integers[rng.random((INTEGERS, CHUNK)) < missing] = NO_INTEGER
        logits = self._bias + self._weights @ log_integers(integers)

        values = np.empty((CATEGORIES, CHUNK), np.uint32)
        effects = []
        for feature, size in enumerate(TABLES):
            # P(k) = log_{V+1}((k + 2) / (k + 1)), k from 0
            ranks = np.minimum(np.exp(rng.random(CHUNK) * math.log(size + 1)).astype(np.int64) - 1, size - 1)
            ranks[rng.random(CHUNK) < self._missing[feature]] = size
            values[feature] = np.where(ranks == size, MISSING, _scramble(feature, ranks))
            effects.append(self._effects[feature][ranks])
            logits += effects[-1][:, 0]
        for left, right in zip(effects[: CATEGORIES // 2], effects[CATEGORIES // 2 :], strict=True):
            logits += np.einsum("rk,rk->r", left[:, 1:], right[:, 1:])
        return logits, integers, values, rng.random(CHUNK)


def _scramble(feature: int, ranks: Array) -> Array:
    """A value above 0 for each category of each feature: a permutation of 32-bit integers (MurmurHash3's finalizer)."""
    mixed: Array = (ranks + (feature << 20) + 1).astype(np.uint32)
    mixed ^= mixed >> np.uint32(16)
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed


def _bias_for(rate: float, logits: Array) -> float:
    """The bias that gives the logits this mean probability."""
    low, high = -30.0, 30.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-logits - middle))).mean() < rate else (low, middle)
    return low
