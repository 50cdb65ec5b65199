"""What a block writes, written once: a replay begins where its forward began, and leaves everything as it finds it.

Running statistics, counters, power iterations, codebooks that follow their inputs and recurrent states make a forward
depend on what the last one left, and change it for the next one. A replay that simply ran again would write a second
time, and read what the first run wrote. So a forward notes what its modules hold, and the values that it writes over::

    attributes      by name: modes, counters, tensors; lists, dicts and sets with their members as they were
    buffers         copies, of which those that the forward changed stay
    other tensors   what operations write to without having made it, by a copy from before the first write

The replay swaps them in, and the present ones back. Not seen are objects inside of attributes, and what is written to
other tensors than buffers without an operation of torch, as through numpy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from comera.errors import TrainingError
from comera.kernels.recording import fixed
from comera.nn.tensor_train import TensorTrain

_Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]
_Place = tuple[int, ...]

# Parameters, submodules and hooks are not what a forward writes; buffers are by themselves.
_STRUCTURE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque)


class BlockState:
    """What a block holds and writes in one forward. block: None writes nothing.

    inputs: the tensors that it is called with by position, which it must not write to.
    """

    def __init__(self, block: nn.Module | None = None, inputs: Iterable[Any] = ()) -> None:
        self._modules = [] if block is None else list(_modules(block, set()))
        self._inputs = {_place(each)[0] for each in inputs if isinstance(each, Tensor)}
        self.wrote = False  # to a tensor that it had not made

    @property
    def modes(self) -> tuple[bool, ...]:
        """Which of its modules are in training mode."""
        return tuple(module.training for module in self._modules)

    def begin(self) -> None:
        """At the start of the forward: note what there is."""
        self._start = [(m, _copies(attributes), buffers) for m, attributes, buffers in self._held()]
        buffers = {b for _, _, each in self._start for b in each.values() if b is not None and b.numel()}
        self._values = {_place(b): (b, b.detach().clone(), b._version) for b in buffers}
        self._made: set[int] = set()
        self._written: set[_Place] = set()

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before an operation of the forward: note what it writes over.

        Raises TrainingError for a write to an input of the block, which autograd refuses to repeat.
        """
        for tensor in written(func, args, kwargs):
            place = _place(tensor)
            self._written.add(place)
            if place[0] in self._made or place in self._values:
                continue
            if place[0] in self._inputs:
                raise TrainingError(
                    f"expected a block that recomputes to leave its inputs as they are, got {func} in place on one of "
                    f"shape {tuple(tensor.shape)}: write to a copy of it, or leave the block out "
                    "(comera.recompute_(model, blocks=...))"
                )
            self._values[place] = tensor, tensor.detach().clone(), tensor._version

    def made(self, out: Any) -> None:
        """New tensors, which the forward may write to as it likes."""
        for tensor in [out] if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._made.add(_place(tensor)[0])

    def end(self) -> None:
        """At the end of the forward: forget what it did not write to."""
        self._values = {place: each for place, each in self._values.items() if self._changed(place, *each)}
        self._made, self._written, self.wrote = set(), set(), bool(self._values)

    def _changed(self, place: _Place, tensor: Tensor, before: Tensor, version: int) -> bool:
        # On a CPU by value, which sees whoever wrote; elsewhere that would synchronize, and in recordings be a choice.
        if place in self._written or tensor._version != version:
            return True
        return tensor.device.type == "cpu" and not fixed() and not torch.equal(tensor, before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which all is as it was at the start of the forward."""
        held = self._held()
        values = [(tensor.data, before, tensor.detach().clone()) for tensor, before, _ in self._values.values()]
        _set((module, _copies(attributes), buffers) for module, attributes, buffers in self._start)
        for data, before, _ in reversed(values):  # of memory that overlaps, the first copy is the oldest
            data.copy_(before)
        try:
            yield
        finally:
            for data, _, now in values:
                data.copy_(now)
            _set(held)

    def _held(self) -> _Attributes:
        """What the modules hold now, by reference."""
        return [(m, {k: v for k, v in vars(m).items() if k not in _STRUCTURE}, dict(m._buffers)) for m in self._modules]


def _modules(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it; tensor trains are not written to in a forward."""
    if module not in seen and not isinstance(module, TensorTrain):
        seen.add(module)
        yield module
        for child in module._modules.values():
            if child is not None:
                yield from _modules(child, seen)


def _copies(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy(value) if type(value) in _CONTAINERS else value for name, value in attributes.items()}


def _set(held: Iterable[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]) -> None:
    for module, attributes, buffers in held:
        own = vars(module)
        for name in own.keys() - attributes.keys() - _STRUCTURE:
            del own[name]
        own.update(attributes)
        module._buffers.clear()
        module._buffers.update(buffers)


def _place(tensor: Tensor) -> _Place:
    """Which memory a tensor has, and which part of it."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), *tensor.shape, *tensor.stride())


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    places = _writes(func)
    if not places:
        return []
    schema = func._schema.arguments
    by_name = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    if "training" in places and not by_name.get("training"):
        return []
    return [each for name in places for each in tree_leaves(by_name.get(name)) if isinstance(each, Tensor)]


@cache
def makes(func: Any) -> bool:
    """Whether an operation's result is new memory, not that of an argument."""
    return func is torch.ops.aten.lift_fresh.default or any(each.alias_info is None for each in func._schema.returns)


@cache
def _writes(func: Any) -> tuple[str, ...]:
    """Names of these arguments."""
    schema = func._schema
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    # torch declares running statistics to be written in some of these operations only
    reads = ("backward", "no_training", "no_update")
    if not names and "batch_norm" in schema.name and not any(word in schema.name for word in reads):
        names = [a.name for a in schema.arguments if a.name in ("running_mean", "running_var", "training")]
    return tuple(names)
