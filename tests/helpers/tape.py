"""A stand-in for CUDA graphs on the CPU: it records the operations of a step and runs them again without its Python."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.graphs.cuda import CudaRecorder
from comera.graphs.graphed import attempted
from comera.graphs.picture import Picture
from comera.memory.replay import written

HOST_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


class Tape(TorchDispatchMode):
    """The operations of a step with the memory that they read and write, which is all that a CUDA graph knows."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # each tensor written, and its values before

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation in HOST_READS:
            raise RuntimeError(f"{operation} synchronizes with the device\nmore lines")
        args, kwargs = (memory(args), memory(kwargs or {}))
        self.before += [(t, t.clone()) for t in written(operation, args, kwargs)]
        result = operation(*args, **kwargs)
        self.operations.append((operation, args, kwargs, tensors(memory(result))))
        return result

    def undo(self) -> None:
        for tensor, held in reversed(self.before):
            tensor.copy_(held)
        self.before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for operation, args, kwargs, results in self.operations:
            for kept, new in zip(results, tensors(operation(*args, **kwargs)), strict=True):
                if kept.data_ptr() != new.data_ptr():  # neither a view nor written in place
                    kept.copy_(new)


class TapeRecorder:
    """Records steps on tapes, and counts its calls. reason: what watched warm-ups return."""

    warm_ups = CudaRecorder.warm_ups

    def __init__(self, reason: str = "") -> None:
        self.eager, self.watched, self.captures, self.replays = 0, 0, 0, 0
        self.reason = reason

    def warm_up(self, step: Callable[[], Any], *, watch: bool) -> tuple[Any, str]:
        self.eager += 1
        self.watched += watch
        return step(), self.reason if watch else ""

    def capture(self, step: Callable[[], Any], picture: Picture) -> Callable[[], Any]:
        random_state = torch.get_rng_state()
        tape = Tape()
        try:
            with tape:
                result = attempted("capture failed", step)
        finally:
            with torch.no_grad():
                tape.undo()
            torch.set_rng_state(random_state)
        self.captures += 1

        def replay() -> Any:
            self.replays += 1
            tape.replay()
            return result

        return replay


def memory(value: Any) -> Any:
    """The same tensors by their memory alone: a Parameter may get other memory later, and a replay, as that of a CUDA
    graph, leaves the versions of what it writes."""
    return tree_map_only(Tensor, lambda tensor: tensor.data, value)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
