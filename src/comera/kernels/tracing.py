"""Marks that torch.compile reads while it traces, set without importing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def constant_when_traced(function: F) -> F:
    """Mark a function of Python values so that torch.compile calls it while tracing and keeps its result.

    The mark of `torch.compiler.assume_constant_result`, which would import torch._dynamo (over a second) with comera.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
