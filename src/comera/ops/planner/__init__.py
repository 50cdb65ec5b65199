"""Contraction plans: which cores to merge before a product with the batch, chosen by estimated cost."""

from comera.ops.planner.groups import Group, Groups
from comera.ops.planner.plan import ContractionPlan, plan_linear, plan_lookup, plan_projection

__all__ = ["ContractionPlan", "Group", "Groups", "plan_linear", "plan_lookup", "plan_projection"]
