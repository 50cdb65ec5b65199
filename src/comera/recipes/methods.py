"""What a recipe derives from its method: members of its task, and memory estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from comera.baselines import METHODS, Applied, Conversion, Method, installed
from comera.trainer.memory import MemoryEstimate
from comera.trainer.memory import estimate as estimate_step

__all__ = ["estimates_by_method", "follow"]


def follow(task: Any, report: Conversion) -> None:
    """Set the members of a task that its method decides: rows of the layer table, parameters of the dense model, and
    for a baseline its optimizer and what it does after a step. report: of the conversion."""
    task.report_rows = [row.to_dict() for row in report.rows] if report else []
    task.dense_total = report.dense_total if report else None
    if isinstance(report, Applied):
        task.optimizer, task.after_step = report.optimizer, report.after_step


def estimates_by_method(
    build: Callable[[Method], tuple[nn.Module, Conversion, Callable[[], Tensor]]],
) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method.

    build: makes a method's model, the report of its conversion, and a closure that returns the loss; it is called on
    the meta device.
    """
    estimates: dict[str, MemoryEstimate] = {}
    for method in filter(installed, METHODS):
        with torch.device("meta"):
            model, report, loss = build(method)
            estimate = report.estimate(model, loss) if isinstance(report, Applied) else estimate_step(model, loss)
        estimates[method] = estimate
    return estimates
