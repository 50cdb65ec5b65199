"""Memory of a training step: estimated by part before it runs, measured while it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comera.errors import ConfigError
from comera.kernels.cpp.library import dry_run
from comera.memory.live import FusedAttention, LiveMemory, run_backward
from comera.optim.names import optimizer_named

_PROCESS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_memory(device: torch.device | str = "cpu") -> int:
    """Peak bytes so far: of tensors on a GPU, else resident memory of this process, libraries included.

    0 on a system that does not report it.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _process_memory("VmHWM")


def current_memory(device: torch.device | str = "cpu") -> int:
    """Bytes in use, counted as in `peak_memory` (outside Linux, the peak instead)."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _process_memory("VmRSS")


def reset_peak(device: torch.device | str = "cpu") -> None:
    """Restart the peak from the bytes in use, where the system allows it (GPU; most Linux)."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        with suppress(OSError):  # forbidden in some containers: the peak then counts from the start of the process
            _CLEAR.write_text("5")  # proc(5): resets the high-water mark of the resident set


def device_memory(device: str = "auto") -> int:
    """Bytes of memory of the device, a GPU or else the machine; 0 on a system that does not report it.

    device: "auto", "cpu" or "cuda", as in TrainConfig.
    """
    if device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 0


def free_memory(device: str = "auto") -> int:
    """Bytes of that memory which nobody uses; 0 on a system that does not report it (not Linux, no GPU)."""
    if device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[0])
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


@dataclass(frozen=True)
class MemoryMeter:
    """Peak memory since the start of the meter, in total and above the baseline.

    device: whose memory; baseline: bytes in use at the start.
    """

    device: torch.device
    baseline: int

    @classmethod
    def start(cls, device: torch.device | str = "cpu") -> MemoryMeter:
        """Reset the peak and take the bytes in use as the baseline."""
        reset_peak(device)
        return cls(torch.device(device), current_memory(device))

    @property
    def peak(self) -> int:
        """Peak bytes since the start."""
        return peak_memory(self.device)

    @property
    def added(self) -> int:
        """Peak bytes above the baseline."""
        return max(0, self.peak - self.baseline)


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of one training step at its peak, in bytes by part, and the `flops` of its forward and backward.

    activations: what the peak takes above weights, gradients and optimizer state. Gradients grow while activations are
    freed, so that this is less than all that the backward needs; 0 where the optimizer's step is the peak. Buffers
    inside single operations are not in it. fragmentation: gaps in the heap of the process, on a CPU.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    flops: int
    fragmentation: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "flops"}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        rows = [f"{name:<14}{size / 2**20:>12,.1f} MB" for name, size in [*self.parts.items(), ("total", self.total)]]
        return "\n".join([*rows, f"{'FLOPs':<14}{self.flops / 1e9:>12,.2f} G"])


def check_memory(step: MemoryEstimate, device: str, what: str) -> None:
    """Raise ConfigError, with the parts, for a training step that needs more memory than there is. what: its name."""
    memory = device_memory(device)
    if 0 < memory < step.total:
        parts = ", ".join(f"{nbytes / 2**30:,.1f} {part}" for part, nbytes in step.parts.items())
        raise ConfigError(
            f"{what}: expected a training step that fits into the {memory / 2**30:,.1f} GB there are, got one of "
            f"about {step.total / 2**30:,.1f} GB ({parts}): use another method, optimizer or size; `comera estimate` "
            "shows what each needs"
        )


def shortage(step: MemoryEstimate, device: str) -> str | None:
    """What to say, in a line, of a training step that may need more memory than is free; None if it seems to fit.

    A warning and no error: estimates are some percent off, and what others hold now they may free.
    """
    free = free_memory(device)
    if not 0 < free < step.total:
        return None
    return (
        f"a step needs about {step.total / 1e9:,.1f} GB, {free / 1e9:,.1f} are free: recompute activations "
        "(train.recompute), or take a smaller batch, shorter texts or smaller ranks; `comera estimate` shows the parts"
    )


def estimate(
    model: nn.Module, loss: Callable[[], Tensor], *, optimizer: str = "adamw", device: str = "auto"
) -> MemoryEstimate:
    """Memory at the peak of a training step of `model`, and its FLOPs, from one forward and backward.

    With model and batch on the meta device, this allocates and computes nothing, whatever their size; operations are
    those of the device that it stands for, with the kernels that this machine has, fused as the model is.

    loss: closure over model and batch that returns the scalar loss. No `.grad` changes.
    optimizer: a name of `comera.optim.names`; adarankgrad counts at its largest ranks; ConfigError for any other.
    device: what the meta device stands for: "auto", "cpu" or "cuda", as in TrainConfig.
    """
    moments, counts = optimizer_named(optimizer).state_of(model)
    stored = [*model.parameters(), *model.buffers()]
    trained = _trained(model)
    gradients = sum(p.nbytes for p in trained)
    for_cpu = _for_cpu(model, device)
    with _step_aside(trained, for_cpu), LiveMemory(stored) as live:
        with FlopCounterMode(display=False) as counter:
            _forward_backward(trained, loss)
        state = [torch.empty(size, dtype=torch.uint8, device=stored[0].device) for size in moments]
        live.restart()
        _forward_backward(trained, loss)  # in what the first step left of the heap
        del state
    kept = sum(moments)
    return MemoryEstimate(
        weights=sum(tensor.nbytes for tensor in stored),
        gradients=gradients,
        optimizer=kept + counts,
        activations=max(0, live.peak - gradients - kept),
        fragmentation=live.resident - live.peak if for_cpu else 0,
        flops=int(counter.get_total_flops()),
    )


def count_flops(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """FLOPs of a training step, as `estimate` counts them, without what it does to follow memory."""
    trained = _trained(model)
    with _step_aside(trained, _for_cpu(model, "auto")), FlopCounterMode(display=False) as counter:
        _forward_backward(trained, loss)
    return int(counter.get_total_flops())


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _for_cpu(model: nn.Module, device: str) -> bool:
    """Whether a model on the meta device stands for one on a CPU."""
    stored = next(chain(model.parameters(), model.buffers()))
    return stored.is_meta and (device == "cpu" or not torch.cuda.is_available())


@contextmanager
def _step_aside(trained: Sequence[nn.Parameter], for_cpu: bool) -> Iterator[None]:
    """Steps inside run as on the device that is stood for, and leave no gradient."""
    before = [p.grad for p in trained]
    try:
        with dry_run() if for_cpu else nullcontext(), FusedAttention():
            yield
    finally:
        for p, grad in zip(trained, before, strict=True):
            p.grad = grad


def _forward_backward(trained: Sequence[nn.Parameter], loss: Callable[[], Tensor]) -> None:
    """Leave the gradients of the loss in the parameters."""
    for p in trained:
        p.grad = None
    run_backward(loss())


def _process_memory(field: str) -> int:
    """VmHWM or VmRSS of this process on Linux, elsewhere its peak resident set; bytes, 0 if unknown."""
    if found := _kilobytes(_PROCESS, field):
        return found
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _kilobytes(file: Path, field: str) -> int:
    """Bytes in a field of a file of proc(5); 0 if there is none."""
    if file.exists():
        for line in file.read_text("ascii", "replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0
