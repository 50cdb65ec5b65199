"""The step of adamw.cpp, outside of torch's dispatcher, which would convert thousands of small tensors."""

from array import array
from collections.abc import Sequence
from operator import is_
from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from comera.kernels.cpp.gradients import are_plain
from comera.kernels.cpp.library import call, words


class Held:
    """Parameters and their state in AdamW, examined once for many steps.

    params: their tensors; states: first moment, second moment and step count of the first parameter, of the second ...
    All may be replaced or get other memory between steps: ask `holds` before each.
    """

    def __init__(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> None:
        self._tensors = [*params, *states]
        self.params = list(params)
        self._sizes = list(map(Tensor.numel, params))
        sizes = [size for size in self._sizes for size in (size, size, 1)]
        self.fits = are_plain(self._tensors) and list(map(Tensor.numel, states)) == sizes
        """Whether the kernel supports them: `are_plain`, and moments of their parameters' sizes."""
        self._addresses = list(map(Tensor.data_ptr, self._tensors)) if self.fits else []
        self.memory = words(self._addresses[: len(params)]), words(self._addresses[len(params) :]), words(self._sizes)
        """Addresses of the parameters and of their states, and elements of each parameter, as the kernel reads them."""

    def holds(self, params: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
        """Whether these are the tensors that were examined, in the same memory and of the same sizes."""
        tensors = [*params, *states]
        return (
            self.fits
            and len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and list(map(Tensor.numel, params)) == self._sizes
        )

    def group(self, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> "Group | None":
        """What `step` takes; None if the kernel does not support the parameters with these gradients."""
        fits = self.fits and are_plain(gradients) and list(map(Tensor.numel, gradients)) == self._sizes
        return Group(self, gradients, lr, weight_decay) if fits else None


class Group(NamedTuple):
    """Parameters of one rate, and gradients that fit them: made by `Held.group` alone."""

    held: Held
    gradients: Sequence[Tensor]
    lr: float
    weight_decay: float


def step(groups: Sequence[Group], *, betas: tuple[float, float], eps: float) -> None:
    """Take a step of AdamW in place, as one call for all groups."""
    gradients = words(g.data_ptr() for group in groups for g in group.gradients)
    memory = (b"".join(parts) for parts in zip(*(group.held.memory for group in groups), strict=True))
    rates = b"".join(array("d", (group.lr, group.weight_decay)).tobytes() * len(group.gradients) for group in groups)
    call("adamw", sum(len(group.gradients) for group in groups), gradients, *memory, rates, *betas, eps)
    for group in groups:
        increment_version(group.held.params)
