"""What a user would pick instead of compressing, each on the same model, data and batch: for comparisons.

A method is a frozen dataclass of its settings. Its `apply_` turns a dense model into the method's, in place, and
returns what a run needs besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, Protocol

from torch import nn

from comera.baselines.cola import CoLA, cola_
from comera.baselines.common import Applied, check_installed
from comera.baselines.galore import GaLore
from comera.baselines.lte import LTE, lte_, merge_
from comera.baselines.tensorly import Tensorly, tensorly_

Method = Literal["comera", "dense", "galore", "lte", "cola", "tensorly"]


class Baseline(Protocol):
    """The settings of a method."""

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Applied:
        """Turn a dense model into the method's, in place; skip: glob patterns of layers to leave as they are."""


@dataclass(frozen=True)
class BaselineConfig:
    """Settings of the methods that CoMERA is compared with; a run looks at its own method's alone."""

    galore: GaLore = field(default_factory=GaLore)
    """Dense weights, gradients projected to low rank for the optimizer (galore-torch)."""
    lte: LTE = field(default_factory=LTE)
    """Parallel low-rank adapters, merged every few steps (arXiv:2402.16828)."""
    cola: CoLA = field(default_factory=CoLA)
    """Low-rank layers with an activation in the middle (arXiv:2502.10940)."""
    tensorly: Tensorly = field(default_factory=Tensorly)
    """Tensor-train layers of fixed rank (tensorly-torch)."""

    def __getitem__(self, method: str) -> Baseline:
        """The settings of a method."""
        settings: Baseline = getattr(self, method)
        return settings

    def identity(self, method: str) -> dict[str, Any]:
        """The settings that decide what a run of this method learns, by their dotted names; empty for other methods."""
        settings = asdict(self).get(method, {})
        return {f"baselines.{method}.{name}": value for name, value in settings.items()}


METHODS = tuple(f.name for f in fields(BaselineConfig))

__all__ = [
    "LTE",
    "METHODS",
    "Applied",
    "Baseline",
    "BaselineConfig",
    "CoLA",
    "GaLore",
    "Method",
    "Tensorly",
    "check_installed",
    "cola_",
    "lte_",
    "merge_",
    "tensorly_",
]
