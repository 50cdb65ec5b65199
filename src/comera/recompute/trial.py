"""What a training step takes, found by running one: on a copy of the model, whose every tensor is followed.

Formulas would have to know each operation's buffers and when they are freed; a step knows. It runs on the model's own
device, with the kernels that training will use. The original is not touched: the copy has its own weights, gradients,
buffers, modes and hooks, and random states are restored.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from comera.errors import ConfigError
from comera.kernels.cpp.library import dry_run
from comera.recompute.budget import batch_tensors
from comera.recompute.live_memory import FusedAttention, LiveMemory, run_backward, stored_parts

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
"""(model, batch) -> mean loss of the batch, a scalar."""
MakeOptimizer: TypeAlias = Callable[[nn.Module], Optimizer]
"""Model -> optimizer over its parameters."""


@dataclass(frozen=True)
class StepMemory:
    """Bytes of tensors at the peak of a training step, by part.

    weights: parameters and buffers. activations: whatever the peak takes besides the other parts, the batch included.
    Gradients grow while activations are freed, so it is less than all that a backward needs. Scratch memory that a
    single operation takes and frees again is not in it.

    See `plan_memory`.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in fields(StepMemory)}

    @property
    def peak(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def measure_step(
    model: nn.Module,
    batch: Sequence[Any],
    loss: Loss,
    make_optimizer: MakeOptimizer,
    prepare_: Callable[[nn.Module], None],
) -> StepMemory:
    """The peak of a step that trains a copy of `model` on one part of the batch after the other, and of the next one.

    From the second part on, gradients are there while activations are. prepare_: changes the copy before. On the meta
    device nothing is computed.

    Raises whatever the step raises, and ConfigError for a loss that is none, or that does not come from the copy.
    """
    with _nothing_drawn(model):
        model = deepcopy(model)
        prepare_(model)
        optimizer = make_optimizer(model.train())
        stored, given = [*model.parameters(), *model.buffers()], batch_tensors(batch)
        with ExitStack() as stack:
            if any(tensor.is_meta for tensor in stored):
                stack.enter_context(dry_run())
                stack.enter_context(FusedAttention())
            live = stack.enter_context(LiveMemory([*stored, *given]))
            _step(model, batch[:1], loss, optimizer)  # makes the optimizer's state
            gradients = _step(model, batch, loss, optimizer)
        weights, optimizer_state = _nbytes(stored), _nbytes(tree_leaves(list(optimizer.state.values())))
        total = weights + _nbytes(given) + live.peak
    return StepMemory(weights, gradients, optimizer_state, total - weights - gradients - optimizer_state)


def _step(model: nn.Module, batch: Sequence[Any], loss: Loss, optimizer: Optimizer) -> int:
    """Take a step; returns the bytes of its gradients."""
    for part in batch:
        value = loss(model, part)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"expected a loss that is one number with a gradient, got {came}")
        run_backward(value if len(batch) == 1 else value / len(batch))
        del value
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not grads:
        raise ConfigError("expected loss(model, batch) to use the model that it is given, got no gradient in it")
    gradients = _nbytes(grads)
    del grads
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return gradients


def _nbytes(tensors: Sequence[Any]) -> int:
    """Bytes of the storages of tensors, each counted once."""
    each = [part for t in tensors if isinstance(t, Tensor) for part in stored_parts(t)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in each}.values())


@contextmanager
def _nothing_drawn(model: nn.Module) -> Iterator[None]:
    """A context after which the random states of Python, torch and the model's GPUs are what they were."""
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    before = random.getstate()
    try:
        with torch.random.fork_rng(sorted(gpus)):
            yield
    finally:
        random.setstate(before)
