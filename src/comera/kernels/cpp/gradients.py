"""What gradients.cpp does, called outside of torch's dispatcher, which would convert hundreds of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_float, c_int, c_long, c_void_p
from functools import cache
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import integers

_dtype, _layout, _is_cpu = map(attrgetter, ("dtype", "layout", "is_cpu"))


def lie_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are float32 in the CPU's memory, with their numbers side by side."""
    return (
        set(map(type, tensors)) <= {Tensor, nn.Parameter}
        and set(map(_dtype, tensors)) <= {torch.float32}
        and set(map(_layout, tensors)) <= {torch.strided}
        and all(map(_is_cpu, tensors))
        and all(map(Tensor.is_contiguous, tensors))
    )


@cache
def _clip() -> Callable[..., float]:
    clip = library().clip
    clip.argtypes, clip.restype = [c_long, c_void_p, c_void_p, c_double, c_int], c_float
    return clip


def clip_(tensors: Sequence[Tensor], limit: float) -> Tensor:
    """√Σ x² over all numbers of all tensors, a float32 scalar; where it is above a limit > 0, they are scaled to that.

    tensors: such that `lie_plain`.
    """
    _at, at = integers(map(Tensor.data_ptr, tensors))
    _counts, counts = integers(map(Tensor.numel, tensors))
    norm = _clip()(len(tensors), at, counts, limit, torch.get_num_threads())
    if 0 < limit < norm:
        increment_version(tensors)
    return torch.tensor(norm)
