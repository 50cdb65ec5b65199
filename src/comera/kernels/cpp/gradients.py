"""Gradient clipping by gradients.cpp, outside of torch's dispatcher, which would convert hundreds of small tensors."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from comera.kernels.cpp.library import call, words
from comera.kernels.cpp.memory import empty

_dtype, _layout, _is_cpu = map(attrgetter, ("dtype", "layout", "is_cpu"))


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are contiguous float32 tensors in CPU memory, without torch's negative bit."""
    return (
        set(map(type, tensors)) <= {Tensor, nn.Parameter}
        and set(map(_dtype, tensors)) <= {torch.float32}
        and set(map(_layout, tensors)) <= {torch.strided}
        and all(map(_is_cpu, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def clip_(tensors: Sequence[Tensor], limit: float) -> Tensor | None:
    """√Σ x² over all elements of all tensors, a float32 scalar; above a limit > 0, they are scaled down to that.

    None, and nothing is done, unless the tensors are plain.
    """
    if not are_plain(tensors):
        return None
    norm = empty()
    memory, counts = words(map(Tensor.data_ptr, tensors)), words(map(Tensor.numel, tensors))
    call("clip", len(tensors), memory, counts, limit, norm)
    if 0 < limit < norm.item():
        increment_version(tensors)
    return norm
