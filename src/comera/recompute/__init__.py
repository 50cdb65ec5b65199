"""Low-rank recomputation: hidden activations are rebuilt in the backward instead of kept."""

from comera.recompute.blocks import RecomputeReport, find_blocks, recompute_

__all__ = ["RecomputeReport", "find_blocks", "recompute_"]
