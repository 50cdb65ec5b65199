"""AUC and normalised cross-entropy against their definitions, pair by pair and row by row."""

import math

import pytest
import torch
from torch import Tensor

from comera.recipes.dlrm.click_metrics import auc, click_metrics, normalized_entropy


def auc_by_pairs(scores: Tensor, labels: Tensor) -> float:
    clicks, others = scores[labels == 1], scores[labels == 0]
    above = (clicks[:, None] > others).double() + (clicks[:, None] == others).double() / 2
    return float(above.mean())


@pytest.mark.parametrize("levels", [1, 2, 7, 10_000])
def test_auc_counts_the_pairs_that_are_in_order(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    scores = torch.randint(levels, (301,), generator=generator).float()
    labels = (torch.rand(301, generator=generator) < 0.3).float()
    assert auc(scores, labels) == pytest.approx(auc_by_pairs(scores, labels), abs=1e-12)
    assert auc(-scores, labels) == pytest.approx(1 - auc(scores, labels), abs=1e-12)


def test_auc_of_perfect_reversed_and_constant_scores() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0])
    for scores, expected in ((labels, 1.0), (-labels, 0.0), (torch.zeros(5), 0.5)):
        assert auc(scores, labels) == expected


def test_auc_is_exact_for_many_rows() -> None:
    """Sums of ranks are far above what float32 counts."""
    rows = 300_000
    labels = torch.zeros(rows)
    labels[rows // 2 :] = 1
    assert auc(torch.arange(rows).float(), labels) == 1.0


def test_normalized_entropy_is_relative_to_the_click_rate_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(500, generator=generator) < 0.2).float()
    rate = float(labels.mean())
    constant = torch.full((500,), math.log(rate / (1 - rate)))
    assert normalized_entropy(constant, labels) == pytest.approx(1.0, abs=1e-6)
    scores = torch.randn(500, generator=generator)
    losses = [
        -math.log(1 / (1 + math.exp(-s if y else s))) for s, y in zip(scores.tolist(), labels.tolist(), strict=True)
    ]
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert normalized_entropy(scores, labels) == pytest.approx(sum(losses) / 500 / entropy, rel=1e-6)
    assert click_metrics(scores, labels) == {"auc": auc(scores, labels), "nce": normalized_entropy(scores, labels)}


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_without_both_labels_neither_is_defined(label: float) -> None:
    assert all(math.isnan(value) for value in click_metrics(torch.randn(4), torch.full((4,), label)).values())
