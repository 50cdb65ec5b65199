"""The mean of the last losses, which the stages weigh against the size.

It lives on the device and is written in place: recording losses never synchronizes, and a CUDA graph, which knows
tensors by their memory, can capture it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_HORIZON = 100  # steps: a single batch says little


class LossMean:
    """Mean loss of the last optimizer steps, each the mean over its micro-batches; losses that are not finite are
    skipped and counted.

    mean, steps, skipped: where to go on: the mean, how many steps are in it, and how many losses were skipped.
    """

    def __init__(self, mean: float | None = None, steps: int = 0, skipped: int = 0) -> None:
        self._start = 0.0 if mean is None else mean, min(steps, _HORIZON) if mean is not None else 0, 0, 0, skipped
        self._values: Tensor | None = None  # mean, steps in it, sum and count of this step's losses, skipped
        self._pending = False

    @property
    def observed(self) -> bool:
        """Whether there was any loss, finite or not."""
        return self._values is not None or self._start[1] > 0

    @property
    def address(self) -> int | None:
        """Where the values lie; None before the first loss."""
        return None if self._values is None else self._values.data_ptr()

    @property
    def mean(self) -> Tensor | None:
        """The mean as a scalar on its device, 0 while no loss was finite; None before the first loss."""
        return None if self._values is None else self._values[0]

    def host(self) -> tuple[float | None, int, int]:
        """The mean, None while no loss was finite, its steps and how many losses were skipped. Synchronizes."""
        mean, steps, _, _, skipped = self._start if self._values is None else self._values.tolist()
        return (mean if steps else None), int(steps), int(skipped)

    @torch.no_grad()
    def add(self, loss: Tensor) -> None:
        """Record the loss of a micro-batch, a scalar."""
        loss = loss.detach().reshape(()).float()
        if self._values is None:
            self._values = torch.tensor(self._start, dtype=torch.float32, device=loss.device)
        finite = loss.isfinite()
        _, _, total, count, skipped = self._values
        total.add_(torch.where(finite, loss, 0.0))
        count.add_(finite)
        skipped.add_(~finite)
        self._pending = True

    @torch.no_grad()
    def end_step(self, sum_: Callable[[Tensor], None] | None = None) -> None:
        """Fold the losses since the last step into the mean. sum_: adds a tensor up over all processes, in place."""
        if self._values is None or not self._pending:
            return
        self._pending = False
        mean, steps, total, count, _ = self._values
        if sum_ is not None:
            sum_(self._values[2:4])
        found = count > 0
        steps.add_(found).clamp_(max=_HORIZON)
        mean.add_(torch.where(found, (total / count - mean) / steps, 0.0))
        self._values[2:4].zero_()
