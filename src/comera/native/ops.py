"""The kernels as operations of torch, which profilers, counters of FLOPs and recomputation see as any other."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("comera", "FRAGMENT")


def define(schema: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The operation torch.ops.comera.NAME of a schema "NAME(Tensor x, ...) -> ..."; `run` makes its outputs on the CPU.

    Without a derivative: autograd functions call it.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, run, "CPU")
    operation: Callable[..., Any] = getattr(torch.ops.comera, name).default
    return operation


def pointer(tensor: Tensor | None) -> c_void_p:
    """Where the numbers of a contiguous tensor stand; null for None."""
    return c_void_p(None if tensor is None else tensor.data_ptr())
