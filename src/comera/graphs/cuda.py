"""Whole steps as CUDA graphs: captured once for each shape of the batches, then replayed (graphed.py).

    first visits of a shape → eager, the last one watched for synchronization → captured → replayed

Every visit is a step that counts: warm-up steps are real steps and a capture runs nothing, so nothing has to be undone.
Graphs share one memory pool: nothing in it outlives a replay except the results, which are copied. A capture that
leaves a tensor there is refused, since the next graph would write to it.
"""

import gc
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.graphs.graphed import Recorder, RecordingError, attempted, kept_by_python, tensors_in
from comera.graphs.picture import Picture

T = TypeVar("T")


class CudaRecorder:
    """Captures steps as CUDA graphs on `device`, in one memory pool, on the stream of their warm-up."""

    warm_ups = 2  # one for lazy initialization, the next is watched

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._pool: Any = None

    def warm_up(self, step: Callable[[], T], *, watch: bool) -> tuple[T, str]:
        """Run a step on the capture stream; watch: detect synchronization, and random draws on the host."""
        with self._on_stream():
            if not watch:
                return step(), ""
            drawn = random.getstate(), torch.get_rng_state()
            mode = torch.cuda.get_sync_debug_mode()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    result = step()
                finally:
                    torch.cuda.set_sync_debug_mode(mode)
        reason = ""
        for warning in seen:
            if "a synchronizing CUDA operation" in str(warning.message):
                reason = f"the host synchronizes with the device at {warning.filename}:{warning.lineno}"
            elif "Synchronization debug mode" not in str(warning.message):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        if random.getstate() != drawn[0] or not torch.equal(torch.get_rng_state(), drawn[1]):
            reason = reason or "the step draws random numbers on the host"
        return result, reason

    def capture(self, step: Callable[[], T], picture: Picture) -> Callable[[], T]:
        """Record a step in the shared pool, without running it."""
        if not self._graphs:  # a pool without a graph has lost its memory
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._stream.device_index]
        random_state, held = generator.get_state(), self._live()

        def captured() -> T:
            # thread_local: data loaders in other threads do not break the capture
            mode = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with self._on_stream(), mode:
                return step()

        try:
            result = attempted("capture failed", captured)
        except RecordingError:
            self._recover(generator, random_state)
            raise
        self._graphs.add(graph)
        gc.collect()
        made = self._live() - held - {t.data_ptr() for t in tensors_in(result)}
        if reason := kept_by_python(lambda storage: storage.data_ptr() in made):
            raise RecordingError(reason, again=True)

        def replay() -> T:
            attempted("a replay failed", graph.replay)
            return result

        return replay

    def _live(self) -> set[int]:
        """Addresses of the tensors in the pool."""
        segments = (each for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] == self._pool)
        blocks = (block for segment in segments for block in segment["blocks"])
        return {block["address"] for block in blocks if block["state"] == "active_allocated"}

    def _recover(self, generator: torch.Generator, random_state: Tensor) -> None:
        """After a failed capture, end it for the allocator and the random generator too. No public API does."""
        with suppress(RuntimeError):  # it may have ended already
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
        fresh = torch.Generator(self.device)
        fresh.set_state(random_state)
        generator.graphsafe_set_state(fresh.graphsafe_get_state())

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the capture stream, after all earlier work and before all later work of the current stream."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


def not_captured(optimizer: Optimizer, device: torch.device, averaged: bool, recorder: Recorder | None) -> str:
    """Why steps of an optimizer cannot be captured, with averages over processes or without; "" if they can."""
    if recorder is None and device.type != "cuda":
        return f"graphs need CUDA or a CPU, the model is on {device}"
    if any(p.device != device for group in optimizer.param_groups for p in group["params"]):
        return "a graph holds one device, the model is on several"
    if averaged:
        return "gradients are averaged over several processes, which is not captured"
    if not all("capturable" in group for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} has no capturable form"
    if not getattr(optimizer, "captured", True):
        kind = type(optimizer).__name__
        return f"{kind}'s step over matrices is not captured: use mode eager or compile, or train.optimizer adamw"
    return ""


def make_capturable(optimizer: Optimizer, device: torch.device) -> None:
    """Make an optimizer keep step counts and learning rates on the device."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        if not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        for state in (optimizer.state.get(p, {}) for p in group["params"]):
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device)
