"""The kernels as operations of torch, which profilers, counters of FLOPs and recomputation see as any other."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

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
        return (operation if _seen() else run)(*operands)

    return call


def _seen() -> bool:
    """Whether a mode (a counter of FLOPs, a replay, a trace) or a profiler looks at operations now."""
    return _get_current_dispatch_mode() is not None or torch._C._autograd._profiler_enabled()


def addresses(tensors: Sequence[Tensor | None]) -> array[int]:
    """Where the numbers of many contiguous tensors stand, 0 for None; C takes its buffer_info()[0] as long as it lives.

    An array of ctypes takes 0.1 µs for each.
    """
    return array("Q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def pointer(tensor: Tensor | None) -> c_void_p:
    """Where the numbers of a contiguous tensor stand; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())
