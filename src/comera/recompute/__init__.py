"""Less memory for a step: hidden activations rebuilt in the backward instead of kept, and plans for a budget."""

from comera.recompute.blocks import RecomputeReport, find_blocks, recompute_
from comera.recompute.plan import MemoryPlan, plan_memory
from comera.recompute.trial import StepMemory

__all__ = ["MemoryPlan", "RecomputeReport", "StepMemory", "find_blocks", "plan_memory", "recompute_"]
