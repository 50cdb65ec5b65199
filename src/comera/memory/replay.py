"""What a block's forward keeps for its replay in the backward, decided per operation, and what it writes.

It keeps results that are much smaller than their operands, and those that cannot or should not be computed twice:

    low-rank products     with at most a quarter of an operand's elements: P = A xᵀ of a compressed layer; convolutions
                          to a quarter of the channels: P = conv(x, A)
    random draws          zeros and ones (dropout masks) as booleans
    fused attention       output and log-sum-exp, where one kernel computes it
    keep_for_recompute    what the code itself marks (ops/once.py)

The replay runs every other operation again, and uses the kept results in place of these.

To see operations takes a dispatch mode, 10 µs of Python for each. Where a forward has shown that the code marks all
that is worth keeping, as in blocks that `fuse_` has fused, `marked` keeps just that. What draws random numbers without
saying so would then draw them again: from the same states of torch's generator for the CPU.

What a block writes is written once: a replay begins where its forward began, and leaves everything as it finds it.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from ctypes import string_at
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from comera.errors import TrainingError
from comera.kernels.recording import fixed
from comera.nn.tensor_train import TensorTrain
from comera.ops.once import RecomputeStore, exchange, keep_for_recompute

T = TypeVar("T")
Kept = tuple[Any, Any]
"""An operation, and what is kept of its result."""

# A product is low-rank if it has at most 1/SMALLER of the elements of an operand.
SMALLER = 4
_aten = torch.ops.aten
# Products, with the position of the first of their two operands among the arguments.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.bmm.default: 0,
    _aten.addmm.default: 1,
    _aten.baddbmm.default: 1,
    _aten._scaled_mm_v2.default: 0,
}

_Attributes = list[tuple[nn.Module, dict[str, Any], dict[str, Tensor | None]]]
_Place = tuple[int, ...]

# Parameters, submodules and hooks are not what a forward writes; buffers are by themselves.
_STRUCTURE = frozenset(vars(nn.Module())) - {"training"}
_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, str, type(None))


def contexts(
    state: BlockState | None = None, kept: list[Kept] | None = None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The modes under which a block runs forward and is replayed, as `torch.utils.checkpoint` wants them.

    state: of the block. kept: an empty list, which receives what the forward keeps.
    """
    given = state or BlockState(), [] if kept is None else kept
    return _Keep(*given), _Replay(*given)


def only_marked(kept: Sequence[Kept]) -> bool:
    """Whether the code itself has marked all that a forward kept."""
    return all(operation is keep_for_recompute for operation, _ in kept)


def marked(state: BlockState) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Contexts as those of `contexts` for blocks on the CPU, which keep what the code marks and see no operation."""
    record = _Record(state, [])
    return _KeepMarked(record), _ReplayMarked(record)


def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The same choice for the compiler, which repeats random draws from the same seeds."""
    kept = _is_low_rank(func, args) or _kind(func) == "attention"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(func: Any, args: tuple[Any, ...]) -> bool:
    return _kind(func) is not None or _is_low_rank(func, args)


@cache
def _kind(func: Any) -> Literal["attention", "random"] | None:
    """Whether an operation is the forward of a fused attention, or draws random numbers."""
    name: str = func._schema.name
    if ("attention" in name or "attn" in name) and not ("backward" in name or "bwd" in name):
        return "attention"
    return "random" if torch.Tag.nondeterministic_seeded in func.tags else None


def _is_low_rank(func: Any, args: tuple[Any, ...]) -> bool:
    if func is _aten.convolution.default:
        input, kernel, transposed = args[0], args[1], args[6]
        return not transposed and bool(SMALLER * kernel.shape[0] <= input.shape[1])
    first = _PRODUCTS.get(func)
    if first is None:
        return False
    left, right = args[first : first + 2]
    elements = prod(left.shape[:-1]) * right.shape[-1]
    return bool(SMALLER * elements <= max(_elements(left), _elements(right)))


def _elements(tensor: Tensor) -> int:
    """Number of elements of a tensor; expanded ones count once."""
    return prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)


def _drops(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is dropout in one operation, whose output follows from its input and mask."""
    return func is _aten.native_dropout.default and args[2] is not False


def _draws_bits(func: Any) -> bool:
    return "bernoulli" in func._schema.name


def _returns_written(func: Any) -> bool:
    return bool(func._schema.returns) and func._schema.returns[0].alias_info is not None


def _to_keep(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """What `_restore` needs of an operation's result; copies, because the block may write to the result later."""
    if _kind(func) == "attention":  # whose backward forbids that
        return _aliases(out)
    if _drops(func, args):
        return out[1].detach()
    places = written(func, args, kwargs)
    if _draws_bits(func):
        return (places[0] if places else out).bool()
    return [tensor.clone() for tensor in places], None if _returns_written(func) else _copies(out)


def _restore(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kept: Any) -> Any:
    """The result of an operation from what was kept of it; writes what the operation writes."""
    if _kind(func) == "attention":
        return _aliases(kept)
    if _drops(func, args):
        scale = 0.0 if args[1] == 1 else 1 / (1 - args[1])
        return args[0] * kept * scale, kept.detach()
    places = written(func, args, kwargs)
    if _draws_bits(func):
        return (places[0] if places else torch.empty_like(args[0])).copy_(kept)
    values, out = kept
    for tensor, value in zip(places, values, strict=True):
        tensor.copy_(value)
    return places[0] if _returns_written(func) else _copies(out)


def _copies(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, values)


def _aliases(values: Any) -> Any:
    """The same memory as new tensors, detached from any graph."""
    return tree_map_only(Tensor, Tensor.detach, values)


class _Keep(TorchDispatchMode, RecomputeStore):
    """Runs every operation, and keeps the results that the replay does not compute."""

    def __init__(self, state: BlockState, kept: list[Kept]) -> None:
        super().__init__()
        self.state, self.kept = state, kept
        self.suspended = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions in a block run, unseen by the mode."""
        return True

    def __enter__(self) -> _Keep:
        self.begin()
        self.before = exchange(self)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        exchange(self.before)
        self.end()

    def begin(self) -> None:
        """Before the first operation."""
        self.state.begin()

    def end(self) -> None:
        """After the last one."""
        self.state.end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        self.state.before(func, args, kwargs)
        out = func(*args, **kwargs)
        if makes(func):
            self.state.made(out)
        if _is_kept(func, args):
            self.kept.append((func, _to_keep(func, args, kwargs, out)))
        return out

    def keep_for_recompute(self, make: Callable[[], T]) -> T:
        """make(), whose result is kept; operations inside are not."""
        with self.paused():
            out = make()
        self.state.made(out)
        self.kept.append((keep_for_recompute, _aliases(out)))
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend this mode, which costs 10 µs of Python per operation, unless another mode is above it."""
        exchange(None)
        on_top = _get_current_dispatch_mode() is self
        if on_top:
            super().__exit__(None, None, None)
        self.suspended = True
        try:
            yield
        finally:
            self.suspended = False
            if on_top:
                super().__enter__()
            exchange(self)


class _Replay(_Keep):
    """Runs every operation but those with a kept result. Each backward through the block enters it anew."""

    def begin(self) -> None:
        """Go back to where the forward began."""
        self.remaining, self.start = iter(self.kept), self.state.restored()
        self.start.__enter__()

    def end(self) -> None:
        """And to what is now."""
        self.start.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended or not _is_kept(func, args):
            return func(*args, **kwargs)
        return _restore(func, args, kwargs, self._next(func))

    def keep_for_recompute(self, make: Callable[[], T]) -> T:
        """The kept result, without a call of `make`."""
        values: T = _aliases(self._next(keep_for_recompute))
        return values

    def _next(self, func: Any) -> Any:
        """What was kept of `func`, which must be the next kept operation of the forward."""
        expected, values = next(self.remaining, ("its end", None))
        if func is not expected:
            raise _changed(expected, func)
        return values


def _changed(expected: object, came: object) -> TrainingError:
    return TrainingError(
        f"expected a block to repeat in the backward the operations of its forward, here {expected}, got {came}: let "
        "it depend on its inputs only, or turn recomputation off"
    )


@dataclass
class _Record:
    """What a forward made once, and what its block held.

    states: those of the generator at its start and after each result, 5 kB each; None where nothing was drawn but what
    is in the results.
    """

    held: BlockState
    made: list[Any]
    states: list[Tensor] | None = None


def _bytes(state: Tensor) -> bytes:
    """What is in a state of the random generator, which is on the host: no operation that a mode would see reads it."""
    return string_at(state.data_ptr(), state.nbytes)


class _KeepMarked(RecomputeStore):
    """Keeps what the code marks."""

    def __init__(self, record: _Record) -> None:
        self.record = record

    def __enter__(self) -> RecomputeStore:
        self.record.held.begin()
        self.states, self.drawn = [torch.get_rng_state()], False  # whether anything was, besides the results
        self.before = exchange(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        exchange(self.before)
        self.record.held.end()
        self._compare()
        if self.drawn:
            self.record.states = self.states
        del self.states  # the context lives as long as the graph

    def _compare(self) -> None:
        self.drawn |= _bytes(torch.get_rng_state()) != _bytes(self.states[-1])

    def keep_for_recompute(self, make: Callable[[], T]) -> T:
        """make(), whose result is kept; results marked inside are not."""
        self._compare()
        with self.paused():
            out = make()
        self.states.append(torch.get_rng_state())
        self.record.made.append(_aliases(out))
        return out

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend this store."""
        exchange(None)
        try:
            yield
        finally:
            exchange(self)


class _ReplayMarked(_KeepMarked):
    """Gives back what was kept, and the generator the states it had. Each backward enters it anew."""

    def __enter__(self) -> RecomputeStore:
        self.used, self.start = 0, self.record.held.restored()
        self.start.__enter__()
        if self.record.states is not None:
            self.outside = torch.get_rng_state()
            torch.set_rng_state(self.record.states[0])
        self.before = exchange(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        exchange(self.before)
        if self.record.states is not None:
            torch.set_rng_state(self.outside)
            del self.outside
        self.start.__exit__(None, None, None)

    def keep_for_recompute(self, make: Callable[[], T]) -> T:
        """The kept result, without a call of `make`."""
        if self.used == len(self.record.made):
            raise _changed("its end", keep_for_recompute)
        out: T = _aliases(self.record.made[self.used])
        self.used += 1
        if self.record.states is not None:
            torch.set_rng_state(self.record.states[self.used])
        return out


class BlockState:
    """What a block holds and writes in one forward. block: None writes nothing.

    inputs: the tensors that it is called with by position, which it must not write to.
    """

    def __init__(self, block: nn.Module | None = None, inputs: Iterable[Any] = ()) -> None:
        self._modules = [] if block is None else list(_modules(block, set()))
        self._inputs = {_place(each)[0] for each in inputs if isinstance(each, Tensor)}
        self.wrote = False  # to a tensor that it had not made

    @property
    def settings(self) -> tuple[object, ...]:
        """What its modules hold besides parameters, buffers and modules, their training mode among it; of those of
        torch and comera, whose draws and writes are known by that, the mode alone."""
        return tuple(
            (module.training,) if _is_known(type(module)) else settings(_attributes(module).values())
            for module in self._modules
        )

    def begin(self) -> None:
        """At the start of the forward: note what there is."""
        self._start = [(m, _members_copied(attributes), buffers) for m, attributes, buffers in self._held()]
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
        # On a CPU by value, which sees every writer; elsewhere that would synchronize, and in recordings be a choice.
        if place in self._written or tensor._version != version:
            return True
        return tensor.device.type == "cpu" and not fixed() and not torch.equal(tensor, before)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which all is as it was at the start of the forward."""
        held = self._held()
        values = [(tensor.data, before, tensor.detach().clone()) for tensor, before, _ in self._values.values()]
        _set((module, _members_copied(attributes), buffers) for module, attributes, buffers in self._start)
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
        return [(module, _attributes(module), dict(module._buffers)) for module in self._modules]


def _modules(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """A module and those inside it; tensor trains are not written to in a forward."""
    if module not in seen and not isinstance(module, TensorTrain):
        seen.add(module)
        yield module
        for child in module._modules.values():
            if child is not None:
                yield from _modules(child, seen)


def _is_known(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith(("torch.nn.", "comera."))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module holds besides its parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _STRUCTURE}


def settings(values: Iterable[object]) -> tuple[object, ...]:
    """What of values may decide how a block computes: shapes of tensors, plain values, of anything else its type."""
    return tuple(map(_setting, values))


def _setting(value: object) -> object:
    if isinstance(value, Tensor):
        return (*value.shape, value.dtype)
    if type(value) in (tuple, list):
        return settings(value)  # type: ignore[arg-type]
    return value if type(value) in _PLAIN else type(value)


def _members_copied(attributes: dict[str, Any]) -> dict[str, Any]:
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
