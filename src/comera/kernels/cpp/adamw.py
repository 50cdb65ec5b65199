"""The step of adamw.cpp, called outside of torch's dispatcher, which would convert thousands of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int, c_long, c_void_p
from functools import cache
from operator import is_

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from comera.kernels.cpp.build import library
from comera.kernels.cpp.gradients import lie_plain
from comera.kernels.cpp.library import integers


@cache
def _adamw() -> Callable[..., None]:
    adamw = library().adamw
    adamw.argtypes, adamw.restype = [c_long, *[c_void_p] * 4, *[c_double] * 5, c_int], None
    return adamw


class Held:
    """Parameters and their state in AdamW, looked through once for many steps.

    params: their tensors; states: first moment, second moment and step count of the first parameter, of the second ...
    They may be replaced or get other memory between steps: `holds` is to be asked before each.
    """

    def __init__(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self._tensors = [*params, *states]
        self._params = list(params)
        self._sizes = list(map(Tensor.numel, params))
        sizes = [size for size in self._sizes for size in (size, size, 1)]
        self.fits = lie_plain(self._tensors) and list(map(Tensor.numel, states)) == sizes
        """Whether the kernel takes them: float32, the moments of their parameters' sizes."""
        self._addresses = list(map(Tensor.data_ptr, self._tensors)) if self.fits else []
        memory = (self._addresses[: len(params)], self._addresses[len(params) :], self._sizes)
        self._memory = list(map(integers, memory))

    def holds(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were looked through, in the same places and of the same sizes."""
        tensors = [*params, *states]
        return (
            self.fits
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(Tensor.numel, params)) == self._sizes
        )

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> bool:
        """Take a step of AdamW in place and say so; none where the kernel does not take such gradients."""
        if not lie_plain(gradients) or list(map(Tensor.numel, gradients)) != self._sizes:
            return False
        _at, at = integers(map(Tensor.data_ptr, gradients))
        rates = (lr, *betas, eps, weight_decay)
        held = (address for _, address in self._memory)
        _adamw()(len(gradients), at, *held, *rates, torch.get_num_threads())
        increment_version(self._params)
        return True
