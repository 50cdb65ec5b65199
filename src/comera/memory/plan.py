"""A training step in a given number of bytes: how cores are contracted, what is recomputed, and micro-batches.

The step runs, on a copy, in one way after the other, from the fastest to the smallest, until it fits:

    all samples at once      as planned → low rank → recomputing → recomputing and low rank
    in micro-batches         as large as any of the four allows; of these again the first that fits

"As planned" is the fastest contraction of each layer for its number of rows; "low rank" merges the cores of every
tensor train from both ends to A and B, whose product with the batch leaves r elements a row (ops/merge.py).

A step runs on the model's own device, with the kernels that training will use, and every tensor is followed. The copy
has its own weights, gradients, buffers, modes and hooks, and random states are restored.

Rejected: bytes from formulas. `memory/estimate.py` needs them for models that are not there yet; here the model is.
They would have to know each operation's buffers and when they are freed; a step knows.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, product
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from comera.errors import ConfigError
from comera.kernels.cpp.library import dry_run
from comera.memory.budget import balanced, batch_size, batch_tensors, megabytes, parse_bytes, parts
from comera.memory.live import FusedAttention, LiveMemory, run_backward, stored_parts
from comera.memory.recompute import elements, find_blocks, recompute_, saves
from comera.nn.linear import TTLinear
from comera.ops.linear import Contraction
from comera.optim.names import Rates, optimizer_named

# Micro-batches of a step that is tried. From the second on they differ only where memory depends on values, as that of
# distinct ids does; on the meta device there are none.
_MOST_PARTS = 16
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_CONTRACTIONS: dict[Contraction, str] = {"planned": "as planned for the rows", "low_rank": "low rank, from both ends"}


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


@dataclass(frozen=True)
class MemoryPlan(StepMemory):
    """A training step that fits a budget, in bytes by part; prints itself.

    model: its class. samples: of the batch. micro_batch: samples at once. recompute, contraction: what `apply_` sets.
    budget: bytes. notes: what differs from a step on all samples at once.

    See `plan_memory`.
    """

    model: str
    samples: int
    micro_batch: int
    recompute: bool
    contraction: Contraction
    budget: int
    notes: tuple[str, ...] = ()

    @property
    def headroom(self) -> int:
        """Bytes of the budget that are left at the peak."""
        return self.budget - self.peak

    def apply_(self, model: nn.Module) -> None:
        """Set recomputation and contraction as planned, in place; a plan without recomputation removes it.

        Raises ConversionError for a model without the blocks that are to recompute; it is unchanged.
        """
        _set(model, self.recompute, self.contraction)

    def micro_batches(self, batch: Any) -> Iterator[tuple[Any, float]]:
        """The micro-batches of a batch, without a copy, each with its share of the samples.

        The gradient of a mean loss is the sum of share · gradient over the micro-batches. A batch may have other sizes
        than the planned one. Raises ConfigError for a batch whose tensors differ in their first dimension.
        """
        return parts(batch, self.micro_batch)

    def __str__(self) -> str:
        rows = [(name, megabytes(nbytes)) for name, nbytes in self.parts.items()]
        rows += [("peak", megabytes(self.peak)), ("budget", megabytes(self.budget))]
        rows += [("headroom", megabytes(self.headroom))]
        width = max(len(value) for _, value in rows)
        lines = [f"  {name:<13}{value:>{width}}" for name, value in rows]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([f"a step of {self.model} on {self.samples:,} samples: {self.how}", *lines])

    @property
    def how(self) -> str:
        """What was chosen, in words."""
        count = -(-self.samples // self.micro_batch)
        batches = f"{count} micro-batches of {self.micro_batch:,}" if count > 1 else "all at once"
        recompute = "recomputing" if self.recompute else "nothing recomputed"
        return f"{batches}, {recompute}, contraction {_CONTRACTIONS[self.contraction]}"


def plan_memory(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    *,
    optimizer: str | MakeOptimizer = "adamw",
    loss: Loss | None = None,
) -> MemoryPlan:
    """The fastest training step of a model that stays within a budget of bytes, its tensors counted all together.

    Steps are tried on copies of the model, one at a time, on its own device; the model and random states stay as they
    are. If the whole batch may be too much even for the machine that plans, put model and batch on the meta device,
    where nothing is computed and nothing allocated (and no layer may look at values, as compressed embeddings do).

    Counted are weights, gradients, optimizer state, the batch, and everything that is alive between operations. The
    process itself and scratch memory inside an operation are not. Where memory depends on values, as that of a
    compressed embedding does on distinct ids, the peak is that of this batch (of its first 16 micro-batches): other
    batches may take a few percent more.

    Args:
        model: on its device, converted and fused as it is to be trained.
        batch: a tensor, or tuple, list or mapping of tensors (samples, ...), as large as those of training.
        budget: bytes, or "28.5MB" (millions) or "24MiB" (2^20).
        optimizer: a name, as `--train.optimizer` takes it, or a function from a model to its optimizer.
        loss: (model, batch) -> mean loss. Default: `model(**batch)`, `model(*batch)` or `model(batch)`, if that is a
            number or has one as its `loss`.

    Returns:
        The plan: print it, `apply_` it to the model, and loop over its `micro_batches`.

    Raises:
        ConfigError: a budget that no way of taking the step stays within (the message has the smallest that would do,
            and what takes it); a budget, batch or optimizer that cannot be read; a step that fails.

    Example:
        >>> import torch, comera
        >>> from comera.memory import plan_memory
        >>> def block():
        ...     return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(block(), block(), block())
        >>> _ = comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=4)))
        >>> x = torch.randn(128, 64)
        >>> plan = plan_memory(model, x, "500kB", loss=lambda model, x: (model(x) - x).square().mean())
        >>> plan.recompute, plan.peak <= 500_000
        (True, True)
        >>> plan.apply_(model)
        >>> optimizer = comera.optim.AdamW(comera.param_groups(model, lr=1e-3))
        >>> for part, share in plan.micro_batches(x):
        ...     (share * (model(part) - part).square().mean()).backward()
        >>> optimizer.step()

    Source: docs/method.md §8; arXiv:2501.06663 for the budget and the order from both ends.
    """
    nbytes, samples = parse_bytes(budget), batch_size(batch)
    search = _Search(model, batch, samples, nbytes, loss or _own_loss, _maker(optimizer))
    found = search.first_that_fits()
    if found is None:
        raise search.too_small()
    return found


def _maker(optimizer: str | MakeOptimizer) -> MakeOptimizer:
    if not isinstance(optimizer, str):
        return optimizer
    named = optimizer_named(optimizer)
    return lambda model: named.make(model, Rates())


@dataclass
class _Search:
    """Steps tried so far, and how the next one is. ways: (recompute, contraction), the fastest first."""

    model: nn.Module
    batch: Any
    samples: int
    budget: int
    loss: Loss
    make_optimizer: MakeOptimizer

    def __post_init__(self) -> None:
        choices: list[Contraction] = ["planned"]
        if any(isinstance(module, TTLinear) for module in self.model.modules()):
            choices.append("low_rank")
        smaller = any(saves(elements([block])) for block in find_blocks(self.model).values())
        self.ways = list(product([False, True] if smaller else [False], choices))
        self.tried: dict[tuple[int, bool, Contraction], MemoryPlan | None] = {}
        self.refused = ""
        normed = any(isinstance(module, _BATCH_NORMS) for module in self.model.modules())
        self.notes = ("batch norm takes its statistics from micro-batches",) if normed else ()

    def first_that_fits(self) -> MemoryPlan | None:
        """The first plan within the budget: all samples at once, else in the largest micro-batches that fit."""
        whole = self._fitting(self.samples)
        if whole is not None or self.samples == 1:
            return whole
        low, high = 0, self.samples  # samples that fit, and that do not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fitting(middle) else (low, middle)
        return self._fitting(low) if low else None

    def too_small(self) -> ConfigError:
        """The error for a budget that nothing fits, with the smallest step that was found."""
        least = min((plan for plan in self.tried.values() if plan is not None), key=lambda plan: plan.peak)
        taken = ", ".join(f"{name} {megabytes(nbytes)}" for name, nbytes in least.parts.items())
        advice = "raise the budget, compress further, or use an optimizer with less state, such as smmf"
        advice += f" (smaller micro-batches fail: {self.refused})" if self.refused else ""
        return ConfigError(
            f"expected a budget of at least {least.peak:,} bytes ({megabytes(least.peak)}) for a step of {least.model} "
            f"on {self.samples:,} samples, got {self.budget:,}; the smallest step, {least.how}, takes {taken}: {advice}"
        )

    def _fitting(self, micro_batch: int) -> MemoryPlan | None:
        size = balanced(self.samples, micro_batch)
        plans = (self._try(size, *way) for way in self.ways)
        return next((plan for plan in plans if plan is not None and plan.headroom >= 0), None)

    def _try(self, size: int, recompute: bool, contraction: Contraction) -> MemoryPlan | None:
        """The plan of a step; None for micro-batches that the model refuses, as batch norm does single samples."""
        key = size, recompute, contraction
        if key not in self.tried:
            meta = any(tensor.is_meta for tensor in batch_tensors(self.batch))
            tried = islice(parts(self.batch, size), 2 if meta else _MOST_PARTS)
            batch = [self.batch] if size == self.samples else [part for part, _ in tried]
            prepare_ = partial(_set, recompute=recompute, contraction=contraction)
            try:
                step = measure_step(self.model, batch, self.loss, self.make_optimizer, prepare_)
            except Exception as error:
                if size == self.samples:
                    raise self._failed(error, recompute) from error
                self.tried[key], self.refused = None, _in_words(error)
            else:
                self.tried[key] = MemoryPlan(
                    **step.parts, model=type(self.model).__name__, samples=self.samples, micro_batch=size,
                    recompute=recompute, contraction=contraction, budget=self.budget,
                    notes=self.notes if size < self.samples else (),
                )  # fmt: skip
        return self.tried[key]

    def _failed(self, error: Exception, recompute: bool) -> ConfigError:
        if isinstance(error, ConfigError):
            return error
        what = "a recomputing training step" if recompute else "a training step"
        return ConfigError(
            f"expected {what} of {type(self.model).__name__} on this batch to run, got {_in_words(error)}"
        )


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _set(model: nn.Module, recompute: bool, contraction: Contraction) -> None:
    recompute_(model, enabled=recompute)
    for module in model.modules():
        if isinstance(module, TTLinear):
            module.contraction = contraction


def _own_loss(model: Callable[..., Any], batch: Any) -> Tensor:
    """The loss that a model computes itself."""
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", out)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            "expected a model that returns a loss, a number or an output with one as its `loss`, got "
            f"{type(out).__name__}: pass loss=, a function of model and batch"
        )
    return loss


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
