"""The kernels as operations of torch, which profilers, counters of FLOPs and recomputation see as any other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from comera.kernels.flops import register_formulas

_LIBRARY = torch.library.Library("comera", "FRAGMENT")


def define(schema: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The operation torch.ops.comera.NAME of a schema "NAME(Tensor x, ...) -> ..."; `run` makes its outputs on the CPU.

    Without a derivative: autograd functions call it. It goes through torch's dispatcher, which takes lists of tensors
    apart and puts them together again, only where someone is there to see it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    operation: Callable[..., Any] = getattr(torch.ops.comera, name).default

    def call(*operands: Any) -> Any:
        if not _seen():
            return run(*operands)
        register_formulas()
        return operation(*operands)

    return call


def _seen() -> bool:
    """Whether a mode (a counter of FLOPs, a replay, a trace) or a profiler looks at operations now."""
    return _get_current_dispatch_mode() is not None or torch._C._autograd._profiler_enabled()


def integers(values: Iterable[int]) -> tuple[array[int], c_void_p]:
    """Numbers of 64 bits in memory, as long as it is kept, and where: addresses or counts for a kernel."""
    memory = array("q", list(values))  # faster than one by one
    return memory, c_void_p(memory.buffer_info()[0])


def pointer(tensor: Tensor | None) -> c_void_p:
    """Where the numbers of a contiguous tensor stand; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())
