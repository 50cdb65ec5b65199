"""The public names of `comera.memory` under the name that this room had."""

from comera.memory import MemoryPlan, RecomputeReport, StepMemory, find_blocks, plan_memory, recompute_

__all__ = ["MemoryPlan", "RecomputeReport", "StepMemory", "find_blocks", "plan_memory", "recompute_"]
