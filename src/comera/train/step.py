"""One definition of an optimisation step, whether it runs eager, compiled or as a CUDA graph.

It decides nothing on the host by what a tensor holds, and returns its numbers as tensors on the device, so a step
never waits for the GPU.

Processes average their gradients here, in one flat buffer between backward and the rank rule, and not through
DistributedDataParallel: DDP ties buckets and autograd hooks to the shapes that it saw when it wrapped the model, which
pruning changes under it, and it would have to be torn down and made anew at each cut. What DDP gains by overlapping
communication with the backward is small where the gradients are those of a compressed model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from comera.train.task import Batch

Loss = Callable[[nn.Module, Batch], Tensor]


class Observer(Protocol):
    """What a step needs of a RankController; its other half is a hook on the optimizer."""

    def observe(self, loss: Tensor) -> object:
        """Take note of the step's task loss, a scalar on the device."""


class StepResult(NamedTuple):
    """Scalars on the device: the step's mean loss, and the norm of its gradient before clipping."""

    loss: Tensor
    grad_norm: Tensor


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Context of forward passes: bfloat16 autocast for precision "bf16", nothing for "fp32"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class TrainStep:
    """forward and backward of every micro-batch → average → clip → rank rule → optimizer.

    loss: (model, micro-batch) -> its mean loss.
    controller: told the loss; its hook on `optimizer` scales the gradients and adds those of the size.
    clip: largest global norm of the task's gradient, 0 for none.
    average: mean of a flat tensor over all processes, None for one process.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        *,
        controller: Observer | None = None,
        clip: float = 0.0,
        precision: str = "fp32",
        average: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.controller = controller
        self.clip = clip
        self.precision = precision
        self.average = average
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, batches: Sequence[Batch]) -> StepResult:
        """Take one step on the mean loss of `batches`, at least one, already on the device."""
        # Set to None: gradients and activations are then never held together, and pruning may change the shapes.
        self.optimizer.zero_grad(set_to_none=True)
        share = 1 / len(batches)
        losses = []
        for batch in batches:
            with autocast(self.parameters[0].device, self.precision):
                loss = self.loss(self.model, batch)
            (loss * share).backward()
            losses.append(loss.detach().float())
        loss = torch.stack(losses).mean()
        if self.average is not None:
            loss = self._average(self.average, loss)
        grad_norm = get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.clip:
            clip_grads_with_norm_(self.parameters, self.clip, grad_norm)
        if self.controller is not None:
            self.controller.observe(loss)
        self.optimizer.step()
        return StepResult(loss, grad_norm)

    def _average(self, average: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over all processes; returns that of the loss, sent along with them."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = average(torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in grads)]))
        mean, *means = torch.split(flat, [1, *(grad.numel() for grad in grads)])
        for grad, value in zip(grads, means, strict=True):
            grad.copy_(value.view_as(grad))
        return mean.reshape(())
