"""How a recipe takes a method: the one place that knows dense, comera and the baselines side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from comera.baselines import Applied, Method, check_installed
from comera.convert import TensorizeReport
from comera.errors import ConfigError
from comera.trainer.memory import MemoryEstimate
from comera.trainer.memory import estimate as estimate_step

METHODS: tuple[Method, ...] = get_args(Method)
Parts = Callable[[Method], tuple[nn.Module, TensorizeReport | Applied | None, Callable[[], Tensor]]]


def check_method(method: str) -> None:
    """Raise ConfigError for an unknown method, or one whose package is not installed."""
    if method not in METHODS:
        raise ConfigError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    check_installed(method)


def follow(task: Any, report: TensorizeReport | Applied | None) -> None:
    """Give a task what its method brings: the rows of the layers' table, numbers of the dense original, and for a
    baseline its optimizer and what it does after a step. report: of the conversion, None for dense."""
    task.report_rows = [row.to_dict() for row in report.rows] if report else []
    task.dense_total = report.dense_total if report else None
    if isinstance(report, Applied):
        task.optimizer, task.after_step = report.optimizer, report.after_step


def estimates_by_method(parts: Parts) -> dict[str, MemoryEstimate]:
    """Memory and FLOPs of a training step for every method that is installed; parts: of a method, its model, what its
    conversion returned, and a closure that gives the loss, made on the meta device."""
    estimates: dict[str, MemoryEstimate] = {}
    for method in METHODS:
        try:
            check_installed(method)
        except ConfigError:
            continue
        with torch.device("meta"):
            model, report, loss = parts(method)
            made = report.estimate(model, loss) if isinstance(report, Applied) else estimate_step(model, loss)
        estimates[method] = made
    return estimates
