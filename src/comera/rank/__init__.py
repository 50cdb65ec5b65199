"""Rank adaptation: the two-stage controller, pruning, rounding to a target size."""

from comera.rank.budget import canonicalize_, round_
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.rank.prune import prune_
from comera.rank.report import RankReport, RankRow

__all__ = ["EarlyStage", "LateStage", "RankController", "RankReport", "RankRow", "canonicalize_", "prune_", "round_"]
