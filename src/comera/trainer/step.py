"""One definition of an optimisation step, whether it runs eager, compiled or as a CUDA graph.

It decides nothing on the host by what a tensor holds, and returns its numbers as tensors on the device, so a step
never waits for the GPU.

Processes average their gradients here, in one flat buffer between backward and the rank rule, and not through
DistributedDataParallel: DDP ties buckets and autograd hooks to the shapes that it saw when it wrapped the model, which
pruning changes under it, and it would have to be torn down and made anew at each cut. What DDP gains by overlapping
communication with the backward is small where the gradients are those of a compressed model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from comera.fusion.merge_cache import merged_once
from comera.kernels import select
from comera.kernels.cpp.gradients import clip_
from comera.trainer.compiled import CompiledLoss
from comera.trainer.cuda_graph import CudaRecorder, GraphedStep, Recorder
from comera.trainer.task import Batch

Loss = Callable[[nn.Module, Batch], Tensor]


class Observer(Protocol):
    """What a step needs of a RankController; its other half is a hook on the optimizer.

    In mode graph `replayed` is set: `observe` and the hook are captured, and the step calls `advance` before and
    `between_steps` after each replay; a captured step holds while `phase` stays equal.
    """

    replayed: bool

    def observe(self, loss: Tensor) -> object:
        """Take note of the step's task loss, a scalar on the device."""

    def advance(self) -> object:
        """What the host does when a step begins."""

    def between_steps(self) -> object:
        """What the host does when a step is over."""

    @property
    def phase(self) -> Hashable:
        """What steps take from the host."""


class StepResult(NamedTuple):
    """Scalars on the device: the step's mean loss, and the norm of its gradient before clipping."""

    loss: Tensor
    grad_norm: Tensor


class _Identities(list[Any]):
    """Compared by which objects they are, not by what those hold."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identities) and len(self) == len(other) and all(map(is_, self, other))


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Context of forward passes: bfloat16 autocast for precision "bf16", nothing for "fp32"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class TrainStep:
    """forward and backward of every micro-batch → average → clip → rank rule → optimizer.

    loss: (model, micro-batch) -> its mean loss.
    controller: told the loss; its hook on `optimizer` scales the gradients and adds those of the size.
    clip: largest global norm of the task's gradient, 0 for none.
    average: mean of a flat tensor over all processes, None for one process.
    mode: eager; compile: forward and loss under torch.compile; graph: the whole step as a CUDA graph for each shape of
    the batches, with the learning rates in tensors on the device (in float32) and no gradients left behind. Where one
    cannot be had the step is eager, and the property `mode` says why.
    recorder: what captures graphs, CUDA if left out.
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
        mode: Literal["eager", "compile", "graph"] = "eager",
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.controller = controller
        self.clip = clip
        self.precision = precision
        self.average = average
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.device: torch.device = self.parameters[0].device
        self._held = [*dict.fromkeys([*model.parameters(), *self.parameters, *model.buffers()])]
        self._wanted = mode
        self._refused = ""
        self._graphs: GraphedStep | None = None
        if mode == "compile":
            self.loss = CompiledLoss(loss)
        elif mode == "graph":
            self._refused = self._refusal(recorder)
            if not self._refused:
                self._make_capturable()
                recorder = recorder or CudaRecorder(self.device)
                self._graphs = GraphedStep(self._take_and_clear, recorder, self._foundation, self._keep)
        if controller is not None:
            controller.replayed = self._graphs is not None

    @property
    def mode(self) -> str:
        """How steps run: "eager", "compile", "graph", or "eager (why nothing else)"."""
        working = self._graphs or self.loss
        refused = self._refused or getattr(working, "reason", "")
        if refused:
            return f"eager ({refused})"
        if self._graphs and self._graphs.crowded:
            return "graph (too many shapes of batches for all to be captured: give them fewer lengths)"
        return self._wanted

    @property
    def built(self) -> int:
        """Graphs captured or compiled so far."""
        if isinstance(self.loss, CompiledLoss):
            return self.loss.compilations
        return self._graphs.captures if self._graphs else 0

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rate of each parameter group; waits for nothing."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, batches: Sequence[Batch]) -> StepResult:
        """Take one step on the mean loss of `batches`, at least one, already on the device.

        Raises DataError in mode graph for batches of another form than the first ones, in anything but sizes.
        """
        if self._graphs is None:
            return self._take(batches)
        key = self._graphs.key(batches)
        if self.controller is not None:
            self.controller.advance()
        result: StepResult = self._graphs.take(batches, key)
        if self.controller is not None:
            self.controller.between_steps()
        return result

    def _take(self, batches: Sequence[Batch]) -> StepResult:
        # Set to None: gradients and activations are then never held together, and pruning may change the shapes.
        self.optimizer.zero_grad(set_to_none=True)
        share = 1 / len(batches)
        losses = []
        with merged_once(self.model) if len(batches) > 1 else nullcontext():
            for batch in batches:
                with autocast(self.device, self.precision):
                    loss = self.loss(self.model, batch)
                (loss * share).backward()
                losses.append(loss.detach().float())
        loss = torch.stack(losses).mean()
        if self.average is not None:
            loss = self._average(self.average, loss)
        self._coalesce()
        grad_norm = self._clip()
        if self.controller is not None:
            self.controller.observe(loss)
        self.optimizer.step()
        return StepResult(loss, grad_norm)

    def _take_and_clear(self, batches: Sequence[Batch]) -> StepResult:
        """A step that leaves no gradients: those of a captured one lie in memory that the next graph uses."""
        result = self._take(batches)
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _average(self, average: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over all processes; returns that of the loss, sent along with them.

        Sparse ones become dense: which rows they have differs from process to process."""
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        flat = average(torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in grads)]))
        mean, *means = torch.split(flat, [1, *(grad.numel() for grad in grads)])
        for grad, value in zip(grads, means, strict=True):
            grad.copy_(value.view_as(grad))
        return mean.reshape(())

    def _coalesce(self) -> None:
        """Let sparse gradients hold each row once, as a norm and an optimizer need them."""
        for p in self.parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()

    def _clip(self) -> Tensor:
        """Scale the gradient down to a norm of `clip` where it is larger; returns the norm before."""
        grads = [_numbers(grad) for p in self.parameters if (grad := p.grad) is not None]
        # a compressed model has hundreds of small gradients: one call for all of them, which a graph cannot hold
        if self._graphs is None and select.supports("gradients", *grads[:1]):
            norm = clip_(grads, self.clip)
            if norm is not None:
                return norm
        grad_norm = get_total_norm(grads)
        if self.clip:
            clip_grads_with_norm_(self.parameters, self.clip, grad_norm)
        return grad_norm

    def _refusal(self, recorder: Recorder | None) -> str:
        """Why steps cannot be captured, "" if they may be."""
        if recorder is None and self.device.type != "cuda":
            return f"graphs need CUDA, the model is on {self.device}"
        if any(p.device != self.device for p in self.parameters):
            return "a graph holds one device, the model is on several"
        if self.average is not None:
            return "gradients are averaged over several processes, which is not captured"
        if not all("capturable" in group for group in self.optimizer.param_groups):
            return f"{type(self.optimizer).__name__} has no capturable form"
        return ""

    def _make_capturable(self) -> None:
        """Have the optimizer keep step counts and learning rates on the device."""
        for group in self.optimizer.param_groups:
            group["capturable"] = True
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=self.device)
            for state in (self.optimizer.state.get(p, {}) for p in group["params"]):
                if isinstance(state.get("step"), Tensor):
                    state["step"] = state["step"].to(self.device)

    def _foundation(self) -> object:
        """What a captured step relies on: the memory that it reads and writes, and the host's part.

        Parameters are given other memory, state and rates are other tensors after a change.
        """
        memory = [(tensor.data_ptr(), tensor.shape) for tensor in self._held]
        state = _Identities(value for state in self.optimizer.state.values() for value in state.values())
        rates = _Identities(group["lr"] for group in self.optimizer.param_groups)
        phase = self.controller.phase if self.controller is not None else None
        return memory, state, rates, self.model.training, phase

    def _keep(self) -> Callable[[], None]:
        """Take note of the tensors of model and optimizer; what is returned puts them back in their places."""
        states = {parameter: dict(state) for parameter, state in self.optimizer.state.items()}
        datas = [tensor.data for tensor in self._held]

        def put_back() -> None:
            self.optimizer.state.clear()
            self.optimizer.state.update(states)
            for tensor, data in zip(self._held, datas, strict=True):
                tensor.data = data

        return put_back


def _numbers(grad: Tensor) -> Tensor:
    """All numbers of a gradient that are not zero because of its form."""
    return grad.values() if grad.is_sparse else grad
