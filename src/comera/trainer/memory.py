"""Memory of a training step: estimated by part before it runs, measured while it does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from comera.errors import ConfigError

# Tensors of the parameter's shape that each kind of optimizer keeps, and whether it counts steps per parameter.
_STATE = {"adamw": (2, True), "sgd": (0, False), "momentum": (1, False), "adagrad": (1, True)}
_PROCESS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_memory(device: torch.device | str = "cpu") -> int:
    """Bytes at the highest so far: tensors on a GPU, else the resident memory of this process, libraries included.

    Returns 0 on a system that does not tell.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _process_memory("VmHWM")


def current_memory(device: torch.device | str = "cpu") -> int:
    """Bytes held now, counted as in `peak_memory` (outside Linux the peak stands for it)."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _process_memory("VmRSS")


def reset_peak(device: torch.device | str = "cpu") -> None:
    """Let the peak start anew from what is held now, where the system allows it (GPU; most Linux)."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        try:
            _CLEAR.write_text("5")  # proc(5): resets the high-water mark of the resident set
        except OSError:  # a container may forbid it: the peak then counts from the start of the process
            return


def device_memory(device: str = "auto") -> int:
    """Bytes of memory that the device has: the GPU's, else the machine's; 0 on a system that does not tell.

    device: "auto", "cpu" or "cuda", as in TrainConfig.
    """
    if device != "cpu" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return 0


@dataclass(frozen=True)
class MemoryMeter:
    """Peak memory over a stretch of work, whole and above where it began.

    device: whose memory; baseline: bytes held when the meter was started.
    """

    device: torch.device
    baseline: int

    @classmethod
    def start(cls, device: torch.device | str = "cpu") -> MemoryMeter:
        """Reset the peak and take what is held now as the baseline."""
        reset_peak(device)
        return cls(torch.device(device), current_memory(device))

    @property
    def peak(self) -> int:
        """Bytes at the highest since the start."""
        return peak_memory(self.device)

    @property
    def added(self) -> int:
        """Bytes at the highest above the baseline."""
        return max(0, self.peak - self.baseline)


@dataclass(frozen=True)
class MemoryEstimate:
    """What one training step needs, in bytes by part; `flops` of its forward and backward.

    The parts are at their largest at different moments of the step, so `total` bounds the peak from above, but for
    the short-lived buffers inside single operations.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    flops: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by part."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "flops"}

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        rows = [f"{name:<12}{size / 2**20:>12,.1f} MB" for name, size in [*self.parts.items(), ("total", self.total)]]
        return "\n".join([*rows, f"{'FLOPs':<12}{self.flops / 1e9:>12,.2f} G"])


def check_memory(step: MemoryEstimate, device: str, what: str) -> None:
    """Raise ConfigError for a training step that takes more than there is, with its parts. what: is to be trained."""
    memory = device_memory(device)
    if 0 < memory < step.total:
        parts = ", ".join(f"{nbytes / 2**30:,.1f} {part}" for part, nbytes in step.parts.items())
        raise ConfigError(
            f"{what}: expected a training step that fits into the {memory / 2**30:,.1f} GB there are, got one of "
            f"about {step.total / 2**30:,.1f} GB ({parts}): take another method, optimizer or size; `comera estimate` "
            "tells what each takes"
        )


def estimate(model: nn.Module, loss: Callable[[], Tensor], *, optimizer: str = "adamw") -> MemoryEstimate:
    """Memory and FLOPs of a training step of `model`, from one forward and backward.

    On the meta device, model and batch alike, this allocates and computes nothing, whatever their size.
    loss: closure over model and batch that returns the scalar loss. No `.grad` is touched.
    optimizer: "adamw", "sgd", "momentum" (SGD with it) or "adagrad"; ConfigError for another one.
    Activations are what autograd keeps for the backward: each storage once, parameters and buffers left out. The meta
    device knows attention only in its unfused form, so there they bound from above those of a fused kernel.
    """
    if optimizer not in _STATE:
        raise ConfigError(f"expected an optimizer out of {', '.join(_STATE)}, got {optimizer!r}")
    slots, counts_steps = _STATE[optimizer]
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    gradients = sum(map(_nbytes, trained))
    kept = _Kept({_key(t): t for t in [*parameters, *model.buffers()]})
    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            value = loss()
        activations = kept.nbytes
        torch.autograd.grad(value, trained, allow_unused=True)
    return MemoryEstimate(
        weights=sum(map(_nbytes, [*parameters, *model.buffers()])),
        gradients=gradients,
        optimizer=slots * gradients + (4 * len(trained) if counts_steps else 0),
        activations=activations,
        flops=int(counter.get_total_flops()),
    )


class _Kept:
    """Storages that autograd saved, each once and held so that no other takes its address."""

    def __init__(self, left_out: dict[int, Tensor]) -> None:
        self.left_out = left_out
        self.storages: dict[int, torch.UntypedStorage] = {}

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())

    def pack(self, tensor: Tensor) -> Tensor:
        key = _key(tensor)
        if key not in self.left_out:
            self.storages[key] = tensor.untyped_storage()
        return tensor

    @staticmethod
    def unpack(tensor: Any) -> Any:
        return tensor


def _key(tensor: Tensor) -> int:
    """Identity of a tensor's storage: its address as an object, for on the meta device the data has none."""
    return int(tensor.untyped_storage()._cdata)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _process_memory(field: str) -> int:
    """VmHWM or VmRSS of this process on Linux, elsewhere its largest resident set, 0 if unknown; bytes."""
    if _PROCESS.exists():
        for line in _PROCESS.read_text("ascii", "replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
