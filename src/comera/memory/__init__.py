"""Less memory for a step: hidden activations rebuilt in the backward instead of kept, and plans for a budget."""

from comera.memory.plan import MemoryPlan, StepMemory, plan_memory
from comera.memory.recompute import RecomputeReport, find_blocks, recompute_

__all__ = ["MemoryPlan", "RecomputeReport", "StepMemory", "find_blocks", "plan_memory", "recompute_"]
