"""The step of adamw.cpp, called outside of torch's dispatcher, which would convert thousands of small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_double, c_int, c_long, c_void_p
from functools import cache
from operator import is_

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from comera.native.build import library
from comera.native.gradients import integers, lie_plain


@cache
def _adamw() -> Callable[..., None]:
    adamw = library().adamw
    adamw.argtypes, adamw.restype = [c_long, *[c_void_p] * 3, *[c_double] * 5, c_int], None
    return adamw


class Held:
    """Parameters, their first and second moments and step counts, all in a row: looked through once for many steps.

    They may be replaced or get other memory between steps: `holds` is to be asked before each.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self._params = tensors[: len(tensors) // 4]
        self._sizes = list(map(Tensor.numel, self._params))
        sizes = [*self._sizes * 3, *[1] * len(self._params)]
        self.fits = lie_plain(tensors) and list(map(Tensor.numel, tensors)) == sizes
        """Whether the kernel takes them: float32, the moments of their parameters' sizes."""
        self._addresses = list(map(Tensor.data_ptr, tensors)) if self.fits else []
        self._at, self._counts = integers(self._addresses), integers(self._sizes)

    def holds(self, tensors: list[Tensor]) -> bool:
        """Whether these are the tensors that were looked through, in the same places and of the same sizes."""
        return (
            self.fits
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(Tensor.numel, self._params)) == self._sizes
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
        """Take a step of AdamW in place, where the gradients are such that the kernel takes them; whether they were."""
        if not lie_plain(gradients) or list(map(Tensor.numel, gradients)) != self._sizes:
            return False
        _at, at = integers(map(Tensor.data_ptr, gradients))
        rates = (lr, *betas, eps, weight_decay)
        _adamw()(len(gradients), at, self._at[1], self._counts[1], *rates, torch.get_num_threads())
        increment_version(self._params)
        return True
