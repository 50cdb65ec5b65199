"""The step of adamw.cpp, outside of torch's dispatcher, which would convert thousands of small tensors."""

from collections.abc import Sequence
from operator import is_

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
        self._params = list(params)
        self._sizes = list(map(Tensor.numel, params))
        sizes = [size for size in self._sizes for size in (size, size, 1)]
        self.fits = are_plain(self._tensors) and list(map(Tensor.numel, states)) == sizes
        """Whether the kernel supports them: `are_plain`, and moments of their parameters' sizes."""
        self._addresses = list(map(Tensor.data_ptr, self._tensors)) if self.fits else []
        self._memory = [words(self._addresses[: len(params)]), words(self._addresses[len(params) :])]
        self._counts = words(self._sizes)

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

    def step(
        self,
        gradients: Sequence[Tensor],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> bool:
        """Take a step of AdamW in place. Returns False, and does nothing, if the kernel does not support the gradients.

        Raises RuntimeError unless `fits`.
        """
        if not self.fits:
            raise RuntimeError("expected plain float32 parameters with moments of their sizes: ask `fits` before")
        if not are_plain(gradients) or list(map(Tensor.numel, gradients)) != self._sizes:
            return False
        memory = words(map(Tensor.data_ptr, gradients)), *self._memory, self._counts
        call("adamw", len(gradients), *memory, lr, *betas, eps, weight_decay)
        increment_version(self._params)
        return True
