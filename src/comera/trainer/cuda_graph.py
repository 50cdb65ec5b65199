"""Whole steps as CUDA graphs: captured once for each shape of the batches, then replayed.

    first visits of a shape → eager, the last one watched for synchronization → captured → replayed

Every visit is a step that counts: warm-up steps are real steps and a capture runs nothing, so nothing has to be undone.

A graph knows tensors by their memory. Its foundation (memory and shapes of parameters and optimizer state, the rank
controller's phase) is compared before each step. When it has changed, after pruning or loading a checkpoint, all graphs
are dropped and every shape warms up again. Graphs share one memory pool: nothing in it outlives a replay except the
results, which are copied.
"""

import copy
import dataclasses
import random
import warnings
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from comera.errors import DataError
from comera.trainer.task import Batch

T = TypeVar("T")
Step = Callable[[Sequence[Batch]], T]

WARM_UPS = 2  # visits of a shape before its capture: one for lazy initialization, the next is watched
LIMIT = 32  # shapes that are remembered; a graph takes a few MB
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class Recorder(Protocol):
    """Captures steps: `CudaRecorder`, or in tests a stand-in that runs them again."""

    def warm_up(self, step: Callable[[], T], *, watch: bool) -> tuple[T, str]:
        """Run a step; returns its result and, if watched, the reason why it cannot be captured, "" for none."""

    def capture(self, step: Callable[[], T]) -> Callable[[], T]:
        """Record a step without running it; returns its replay, which always fills and returns the same tensors.

        Raises RuntimeError if that fails; steps can run eager afterwards.
        """


@dataclass
class _Shape:
    """One shape of batches: visits so far and, once captured, the graph's inputs and its replay."""

    visits: int = 0
    inputs: Any = None
    replay: Callable[[], Any] | None = None


class GraphedStep:
    """Runs `step` from graphs where they are captured, eager elsewhere.

    step: batches -> results, a structure of tensors. It may write only to memory that `foundation` reports.
    foundation: memory and host-side values that a captured step depends on. before_capture: called before each capture;
    returns the function that undoes a failed one. limit: shapes that are remembered; the least recently used one is
    dropped. reason: why all steps run eager from now on; "" while they do not. captures: their number so far. crowded:
    whether there were more shapes than `limit`.
    """

    def __init__(
        self,
        step: Step[T],
        recorder: Recorder,
        foundation: Callable[[], object],
        before_capture: Callable[[], Callable[[], object]],
        *,
        limit: int = LIMIT,
    ) -> None:
        self.reason, self.captures, self.crowded = "", 0, False
        self._step, self._recorder, self._limit = step, recorder, limit
        self._foundation, self._before_capture = foundation, before_capture
        self._captured_on: object = None  # the foundation of all graphs
        self._shapes: dict[Hashable, _Shape] = {}  # the most recently used one is last
        self._form: dict[str, str] | None = None

    def __call__(self, batches: Sequence[Batch]) -> Any:
        """Take one step."""
        return self.take(batches, self.key(batches))

    def take(self, batches: Sequence[Batch], key: Hashable) -> Any:
        """Take one step on batches with this `key`."""
        if self.reason:
            return self._step(batches)
        now = self._foundation()
        if now != self._captured_on:
            self._shapes.clear()
            self._captured_on = now
        shape = self._shapes.pop(key) if key in self._shapes else _Shape()
        self._shapes[key] = shape
        if len(self._shapes) > self._limit:
            del self._shapes[next(iter(self._shapes))]
            self.crowded = True
        if shape.replay is None:
            if shape.visits < WARM_UPS:
                return self._warm_up(shape, batches)
            self._capture(shape, batches)
        if shape.replay is None:
            return self._step(batches)
        for static, new in zip(_tensors(shape.inputs), _tensors(batches), strict=True):
            static.copy_(new, non_blocking=True)
        try:
            return map_tensors(torch.clone, shape.replay())
        except (RuntimeError, ValueError, MemoryError) as error:  # the step says more of an error in its batch
            self._give_up(f"a replay failed: {str(error).strip().partition(chr(10))[0]}")
            return self._step(batches)

    def _warm_up(self, shape: _Shape, batches: Sequence[Batch]) -> Any:
        shape.visits += 1
        result, reason = self._recorder.warm_up(lambda: self._step(batches), watch=shape.visits == WARM_UPS)
        if reason:
            self._give_up(reason)
        now = self._foundation()
        if now != self._captured_on:  # first steps create optimizer state; no graph may use the tensors it replaced
            for other in self._shapes.values():
                other.inputs = other.replay = None
            self._captured_on = now
        return result

    def _capture(self, shape: _Shape, batches: Sequence[Batch]) -> None:
        shape.inputs = map_tensors(lambda t: t.detach().clone(), list(batches))
        undo = self._before_capture()  # a capture computes nothing: a tensor that it puts in place has no values
        try:
            shape.replay = self._recorder.capture(lambda: self._step(shape.inputs))
        except RuntimeError as error:
            self._give_up(f"capture failed: {str(error).strip().partition(chr(10))[0]}")
        if not self.reason and self._foundation() != self._captured_on:
            self._give_up("the step puts new tensors in the place of the model's or the optimizer's")
        if self.reason:
            undo()
        else:
            self.captures += 1

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        for shape in self._shapes.values():
            shape.inputs = shape.replay = None
        self._shapes.clear()

    def key(self, batches: Sequence[Batch]) -> Hashable:
        """What distinguishes shapes of batches: sizes of tensors, and values other than tensors.

        Raises DataError for batches that differ from the first ones in anything else.
        """
        if self.reason:
            return None
        key: list[Hashable] = []
        for batch in batches:
            form: dict[str, str] = {}
            for path, leaf in _leaves(batch):
                if isinstance(leaf, Tensor):
                    key.append(leaf.shape)
                    form[path] = f"{leaf.dtype}, {leaf.ndim}-dimensional, on {leaf.device}"
                elif isinstance(leaf, _PLAIN):
                    key.append(leaf)
                    form[path] = type(leaf).__name__
                else:
                    self._give_up(
                        f"graphs support tensors and plain values, but {path} is of type {type(leaf).__name__}"
                    )
            key.append(len(form))
            self._form = self._form or form
            if form != self._form:
                path = next(p for p in {**self._form, **form} if self._form.get(p) != form.get(p))
                raise DataError(
                    f"expected batches of the form that graphs are captured for, {path}: "
                    f"{self._form.get(path, 'nothing')}, got {form.get(path, 'nothing')}: make batches that differ "
                    "only in sizes, or train in mode eager"
                )
        return tuple(key)


class CudaRecorder:
    """Captures steps as CUDA graphs on `device`, in one memory pool, on the stream of their warm-up."""

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

    def capture(self, step: Callable[[], T]) -> Callable[[], T]:
        """Record a step in the shared pool."""
        if not self._graphs:  # a pool without a graph has lost its memory
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self._stream.device_index]
        random_state = generator.get_state()
        try:
            # thread_local: data loaders in other threads do not break the capture
            with (
                self._on_stream(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = step()
        except RuntimeError:
            self._recover(generator, random_state)
            raise
        self._graphs.add(graph)

        def replay() -> T:
            graph.replay()
            return result

        return replay

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
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
        for state in (optimizer.state.get(p, {}) for p in group["params"]):
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].to(device)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure (dictionaries, sequences, dataclasses) with `function` applied to its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        mapped = copy.copy(value)
        mapped.update({key: map_tensors(function, item) for key, item in value.items()})
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _leaves(value: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """All leaves of a structure with their paths; the order of a mapping's keys does not matter."""
    if isinstance(value, MutableMapping):
        items = sorted(((f"{path}[{key!r}]", item) for key, item in value.items()), key=itemgetter(0))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(f"{path}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f"{path}.{name}", item) for name, item in zip(value._fields, value, strict=True)]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{k}]", item) for k, item in enumerate(value)]
    else:
        yield path, value
        return
    for item_path, item in items:
        yield from _leaves(item, item_path)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor)]
