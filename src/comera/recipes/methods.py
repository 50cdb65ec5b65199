"""Memory estimates of a recipe by method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from comera.baselines import METHODS, Applied, Conversion, Method, installed
from comera.trainer.memory import MemoryEstimate
from comera.trainer.memory import estimate as estimate_step

__all__ = ["estimates_by_method"]


def estimates_by_method(
    build: Callable[[Method], tuple[nn.Module, Conversion, Callable[[], Tensor]]],
) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every installed method. build: makes a method's model, the report of its
    conversion, and a closure that returns the loss; it is called on the meta device."""
    estimates: dict[str, MemoryEstimate] = {}
    for method in filter(installed, METHODS):
        with torch.device("meta"):
            model, report, loss = build(method)
            estimate = report.estimate(model, loss) if isinstance(report, Applied) else estimate_step(model, loss)
        estimates[method] = estimate
    return estimates
