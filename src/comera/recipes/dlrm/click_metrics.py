"""How well scores separate clicks from the rest, over all rows at once: none of these is a mean over batches.

R rows."""

from math import log, nan

import torch
import torch.nn.functional as F
from torch import Tensor


def click_metrics(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """The metrics "auc" and "nce" of logits (R,) and labels 0 or 1 (R,)."""
    return {"auc": auc(scores, labels), "nce": normalized_entropy(scores, labels)}


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve: how often a click scores above another row, ties counting one half; exact. From the
    ranks of the scores, ties sharing their mean rank (Mann and Whitney): with P clicks and N others, (Σ ranks of clicks
    − P(P+1)/2) / (P·N). NaN if all labels are equal."""
    clicked = labels > 0.5
    clicks, others = int(clicked.sum()), int((~clicked).sum())
    if not clicks or not others:
        return nan
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    ranks = (last - (counts - 1) / 2)[places]
    return (float(ranks[clicked].sum()) - clicks * (clicks + 1) / 2) / (clicks * others)


def normalized_entropy(scores: Tensor, labels: Tensor) -> float:
    """Log loss relative to always predicting the rows' own click rate; below 1 beats that. NaN if all labels are equal.
    Source: He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook"."""
    rate = float(labels.double().mean())
    if not 0 < rate < 1:
        return nan
    entropy = -(rate * log(rate) + (1 - rate) * log(1 - rate))
    return float(F.binary_cross_entropy_with_logits(scores.double(), labels.double())) / entropy
