"""Rank adaptation: the two-stage controller, pruning, rounding to a target size, and size accounting."""

from comera.rank.budget import canonicalize_, round_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.rank.report import RankReport, RankRow
from comera.rank.size import ModelSize, model_size

__all__ = [
    "EarlyStage",
    "LateStage",
    "ModelSize",
    "RankController",
    "RankReport",
    "RankRow",
    "canonicalize_",
    "model_size",
    "prune_",
    "round_",
]
