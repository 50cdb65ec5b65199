"""One definition of an optimization step, whether it runs eager, compiled or as a CUDA graph.

On the host, it branches on no tensor's values, and it returns its results as tensors on the device. So a step never
synchronizes with the GPU.

Processes average their gradients here, in one flat buffer between backward and the rank rule. Rejected:
DistributedDataParallel, which ties buckets and autograd hooks to the shapes that it saw when it wrapped the model.
Pruning changes those, so the wrapper would have to be rebuilt at each pruning. Overlapping communication with the
backward gains little on the small gradients of a compressed model.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from comera.fp8 import FP8Report, fp8_
from comera.fusion.fuse import is_fused
from comera.fusion.merge_cache import accumulating, caches
from comera.graphs.cpu import CpuRecorder
from comera.graphs.cuda import CudaRecorder, make_capturable, not_captured
from comera.graphs.graphed import GraphedStep, Recorder, RecordingError
from comera.graphs.picture import Picture
from comera.kernels import select
from comera.kernels.cpp.gradients import clip_
from comera.kernels.recording import no_host_reads
from comera.rank.controller import RankController
from comera.rank.step_rule import gradients_of
from comera.trainer.compiled import Backend, CompiledLoss
from comera.trainer.task import Batch

Loss = Callable[[nn.Module, Batch], Tensor]


def _slower_compiled(model: nn.Module, device: torch.device) -> str:
    """Why torch.compile would make steps slower; "" if nobody knows. It leaves all of our C++ kernels out."""
    if device.type != "cpu" or not is_fused(model) or not select.cpp_in_use():
        return ""
    return "the C++ kernels of a fused model are faster than what torch.compile makes; COMERA_KERNELS=none compiles"


class StepResult(NamedTuple):
    """Scalars on the device: the step's mean loss, and the norm of its gradient before clipping."""

    loss: Tensor
    grad_norm: Tensor


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Context for forward passes: bfloat16 autocast for precision "bf16" and "fp8", nothing for "fp32"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision != "fp32")


def set_precision_(model: nn.Module, precision: str) -> FP8Report | None:
    """Let a model's tensor train layers compute in FP8 for precision "fp8", and report which do.

    Raises ConversionError where none can.
    """
    return fp8_(model) if precision == "fp8" else None


class TrainStep:
    """forward and backward of every micro-batch → average → clip → rank rule → optimizer.

    Args:
        model: the model to train, on its device.
        loss: (model, micro-batch) -> mean loss, a scalar.
        optimizer: over the model's parameters; its groups are read anew in each step. Parameters that it does not hold
            get their gradients, too, except from a whole step as a CUDA graph.
        controller: observes the loss; its hook on `optimizer` scales the gradients and adds those of the size. In
            mode "graph", both are captured, `advance` and `between_steps` do the host's work around each replay, and a
            captured step is valid while `phase` stays equal.
        max_grad_norm: largest global norm of the task's gradient; 0 turns clipping off.
        precision: "fp32", or "bf16" or "fp8" for autocast in the forward; FP8 is set by `set_precision_`.
        average: mean of a flat tensor over all processes, which each step calls in all of them; None for one process.
        mode: "eager"; "compile": forward and loss under torch.compile; "graph": the whole step as a CUDA graph, one for
            each shape of the batches, with learning rates in float32 tensors on the device, which leaves no gradients
            behind; on a CPU forward and backward from recordings (graphs/cpu.py). When Python could see a change of
            model, loss or optimizer, steps are recorded anew. What a recording cannot prove to be the step runs eager,
            and so does a mode that is not possible, or known to be slower. `mode` says what runs, and why.
        recorder: captures the graphs. Default: CUDA.
        backend: of torch.compile.

    Example:
        >>> import torch, comera
        >>> from comera.trainer import TrainStep
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> _ = comera.tensorize_(model, ratio=4)
        >>> optimizer = torch.optim.AdamW(comera.param_groups(model, lr=1e-2))
        >>> step = TrainStep(model, lambda model, x: (model(x) - x).square().mean(), optimizer, max_grad_norm=1.0)
        >>> micro_batches = list(torch.randn(2, 8, 64))
        >>> results = [step(micro_batches) for _ in range(5)]
        >>> bool(results[-1].loss < results[0].loss), step.mode
        (True, 'eager')
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        *,
        controller: RankController | None = None,
        max_grad_norm: float = 0.0,
        precision: str = "fp32",
        average: Callable[[Tensor], Tensor] | None = None,
        mode: Literal["eager", "compile", "graph"] = "eager",
        recorder: Recorder | None = None,
        backend: Backend = "inductor",
    ) -> None:
        self.model, self.loss, self.optimizer, self.controller = model, loss, optimizer, controller
        self.max_grad_norm, self.precision, self.average = max_grad_norm, precision, average
        self.device: torch.device = self.parameters[0].device
        self._wanted, self._refused = mode, ""
        self._graphs: GraphedStep | None = None  # of whole steps, or of forward and backward
        self._whole = False
        self._relative: dict[int, Tensor] = {}  # weights of batches, by their count: memory that captured steps read
        if mode == "compile":
            self._refused = _slower_compiled(model, self.device)
            if not self._refused:
                self.loss = CompiledLoss(loss, backend=backend)
        elif mode == "graph" and recorder is None and self.device.type == "cpu":
            self._graphs = GraphedStep(
                self._unread_passes, CpuRecorder(lambda: self.parameters, self._forget), self._picture
            )
        elif mode == "graph":
            self._refused = not_captured(optimizer, self.device, average is not None, recorder)
            if not self._refused:
                self._whole, recorder = True, recorder or CudaRecorder(self.device)
                self._graphs = GraphedStep(self._take_and_clear, recorder, self._picture, self._before_capture)
        if controller is not None:
            controller.replayed = self._whole

    @property
    def mode(self) -> str:
        """How steps run: "eager", "compile", "graph", or "eager (why nothing else)"."""
        if refused := self._refused or getattr(self._graphs or self.loss, "reason", ""):
            return f"eager ({refused})"
        if self._graphs and self._graphs.crowded:
            return "graph (too many shapes of batches for all to be recorded: use fewer lengths)"
        return self._wanted

    @property
    def built(self) -> int:
        """Number of graphs captured or compiled so far."""
        if self._graphs:
            return self._graphs.captures
        return self.loss.compilations if isinstance(self.loss, CompiledLoss) else 0

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rate of each parameter group. Does not synchronize."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, batches: Sequence[Batch], weights: Tensor | None = None) -> StepResult:
        """Take one step on the mean loss of `batches`, at least one, already on the device.

        weights: how much each batch counts, > 0, float64 (batches,) on the device; of several processes either all pass
        them or none. None: all count alike.
        Raises DataError in mode "graph" for batches that differ from the first ones in more than sizes.
        """
        self._weigh(len(batches), weights)
        if self._graphs is None or not self._whole:
            return self._take(batches)
        key = self._graphs.key(batches)
        if self.controller is not None:
            self.controller.advance()
        result: StepResult = self._graphs.take(batches, key)
        self._mark_written()
        if self.controller is not None:
            self.controller.between_steps()
        return result

    def _weigh(self, count: int, weights: Tensor | None) -> None:
        """Set the weights of the next `count` batches relative to their mean over all processes: 1 where all are equal,
        exactly. A batch that has the step for itself needs none."""
        if count == 1 and self.average is None:
            return
        if count not in self._relative:
            self._relative[count] = torch.ones(count, dtype=torch.float64, device=self.device)
        if weights is None:
            self._relative[count].fill_(1.0)
            return
        mean = weights.mean() if self.average is None else self.average(weights.mean().reshape(1))
        self._relative[count].copy_(weights / mean)

    def _take(self, batches: Sequence[Batch]) -> StepResult:
        # Set to None, so that gradients and activations never share the peak, and pruning may change the shapes.
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._passes(batches) if self._graphs is None or self._whole else self._graphs(batches)
        if self.average is not None:
            loss = self._average(self.average, loss)
        gradients = gradients_of(self.optimizer)
        for p, gradient in gradients.items():
            if gradient.is_sparse:  # norms and optimizers want the sums of duplicate rows
                p.grad = gradients[p] = gradient.coalesce()
        grad_norm = self._clip([g.values() if g.is_sparse else g for g in gradients.values()])
        if self.controller is not None:
            self.controller.observe(loss)
        self.optimizer.step()  # the rank rule is a hook of it
        increment_version(list(gradients))  # torch's fused optimizers do not
        return StepResult(loss, grad_norm)

    def _passes(self, batches: Sequence[Batch]) -> Tensor:
        """Forward and backward: the gradients of the mean loss of all batches, into `.grad`; returns that loss."""
        weights = self._relative.get(len(batches))
        shares = None if weights is None else (weights / len(batches)).unbind()
        losses = []
        with accumulating(self.model) if len(batches) > 1 else nullcontext():  # cores are merged once for all of them
            for k, batch in enumerate(batches):
                with autocast(self.device, self.precision):
                    loss = self.loss(self.model, batch)
                (loss * shares[k].to(loss.dtype) if shares else loss).backward()
                losses.append(loss.detach().float())
        return (torch.stack(losses) * weights.float() if weights is not None else losses[0]).mean()

    def _unread_passes(self, batches: Sequence[Batch]) -> Tensor:
        """So that a step is the same to the bit, recorded or not, and so is a resumed run."""
        with no_host_reads():
            return self._passes(batches)

    def _take_and_clear(self, batches: Sequence[Batch]) -> StepResult:
        """A step that leaves no gradients: those of a captured one are in memory that the next graph reuses."""
        result = self._take(batches)
        self.optimizer.zero_grad(set_to_none=True)
        self._forget()
        return result

    def _average(self, average: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over all processes; returns that of the loss, sent along with them.

        Sparse gradients become dense, because their rows differ between processes.
        """
        parameters = self.parameters
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        grads = [p.grad for p in parameters if p.grad is not None]
        flat = average(torch.cat([loss.reshape(1), *(grad.reshape(-1) for grad in grads)]))
        mean, *means = torch.split(flat, [1, *(grad.numel() for grad in grads)])
        for grad, value in zip(grads, means, strict=True):
            grad.copy_(value.view_as(grad))
        return mean.reshape(())

    def _clip(self, grads: list[Tensor]) -> Tensor:
        """Scale a gradient of a norm above `max_grad_norm` down to it; returns the norm before."""
        # A compressed model has hundreds of small gradients: one call for all of them, which a graph cannot capture.
        if not self._whole and select.supports("gradients", *grads[:1]):
            norm = clip_(grads, self.max_grad_norm)
            if norm is not None:
                return norm
        grad_norm = get_total_norm(grads)
        if self.max_grad_norm:
            by_device = defaultdict(list)
            for gradient in grads:
                by_device[gradient.device].append(gradient)
            scale = (self.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1.0)
            for device, each in by_device.items():
                torch._foreach_mul_(each, scale.to(device))
        return grad_norm

    def _picture(self) -> Picture:
        """Of what steps depend on. Raises RecordingError for whole steps that would leave gradients to others."""
        if self._whole:
            make_capturable(self.optimizer, self.device)
            others = {p for p in self.model.parameters() if p.requires_grad}.difference(self.parameters)
            if others:
                raise RecordingError(
                    f"{len(others)} parameters of the model need gradients and are not the optimizer's: a whole step "
                    "as a graph leaves none, freeze them by requires_grad_(False)"
                )
        return Picture(self.model, self.loss, self.optimizer, whole=self._whole, more=self._read)

    def _read(self) -> object:
        """What a step reads of this object and of the controller."""
        if not self._whole:
            return self.loss, self.precision
        return self.loss, self.precision, self.max_grad_norm, self.controller and self.controller.phase

    def _held(self) -> list[Tensor]:
        """All parameters and buffers."""
        if self._graphs is not None and self._graphs.picture is not None:
            return self._graphs.picture.tensors
        return [*dict.fromkeys([*self.model.parameters(), *self.parameters, *self.model.buffers()])]

    def _forget(self) -> None:
        """Let nothing be used any more that was computed from parameters and buffers, and cached."""
        increment_version(self._held())
        for cache in caches(self.model):
            cache.forget()

    def _mark_written(self) -> None:
        """Give parameters, buffers and optimizer state new versions, as the replay of a graph does not."""
        state = (value for state in self.optimizer.state.values() for value in state.values())
        increment_version([*self._held(), *(value for value in state if isinstance(value, Tensor))])

    def _before_capture(self) -> Callable[[], None]:
        """Prepare a capture, which computes nothing; returns what undoes it if it fails.

        Nothing cached from these parameters may be used in the capture, or the graph would never compute it again; and
        nothing cached in a failed capture may be used afterwards, since it has no values.
        """
        self._mark_written()
        states = {parameter: dict(state) for parameter, state in self.optimizer.state.items()}
        datas = [(tensor, tensor.data) for tensor in self._held()]

        def undo() -> None:
            self.optimizer.state.clear()
            self.optimizer.state.update(states)
            for tensor, data in datas:
                tensor.data = data
            self._mark_written()

        return undo
