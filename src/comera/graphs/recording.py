"""What ran below autograd on a CPU, in order, to be run again: calls of C++ kernels with addresses, operations of torch
with tensors.

All that is made meanwhile lies in one pool (pool.py), since kernels know their operands by address. A recording is
right only for values for which Python would do the same again, and while it writes to nothing that outlives the step.
So it is refused, with file and line, for

    a value that Python reads: all but an answer, yes or no, as of `mask.all()`. That is a choice, which is recorded,
        and when replayed compared;
    a function whose operations have not used one of its integers: it has read them itself, as `tensor_split` does;
    a write to what is neither made in the step nor a buffer of the model: that step must not run again to be compared.

The step that is recorded goes on all the same, and counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.graphs.graphed import ChoiceError
from comera.graphs.pool import Pool
from comera.kernels.cpp.library import check
from comera.memory.live import run_backward
from comera.memory.replay import written

Entry = tuple[Callable[..., object], tuple[Any, ...]]

_COMERA, _TORCH = (str(path) for path in (Path(__file__).parents[1], Path(torch.__file__).parent))
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_COPIES = (_aten._to_copy, _aten.clone)
_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # of a new tensor; one that is given has them
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_TO_PYTHON = ("tolist", "numpy", "__array__", "__dlpack__")  # which read without an operation
_MEMORY = ("data_ptr", "storage", "untyped_storage")  # which tell where values are
_IN_PLACE = ("adamw", "clip")  # kernels that write to parameters


class Recording(TorchDispatchMode):
    """Records what runs inside of it and of `calls`.

    buffers: of the model, which a step may write.
    calls: sees functions of torch. reason: why it must not be replayed; "" if it may. chooses: whether Python read
    answers of tensors. written: buffers that the step wrote. generators: random generators besides torch's own.
    """

    def __init__(self, pool: Pool, buffers: Sequence[Tensor]) -> None:
        super().__init__()
        self.reason, self.chooses = "", False
        self.written: dict[Tensor, None] = {}
        self.generators: dict[Generator, None] = {}
        self.calls = _Calls(self)
        self._pool = pool
        self._buffers = {_place(buffer): buffer for buffer in buffers}
        self._entries: list[Entry] = []
        self._memory: dict[int, torch.UntypedStorage] = {}  # of others, read by a kernel; or made, but not of the pool
        self._made: set[int] = set()  # the latter

    def refuse(self, what: str) -> None:
        """Do not replay this, because at the present line the step does `what`."""
        self.reason = self.reason or f"{_here()} {what}"
        self._entries.clear()

    def kernel(self, name: str, function: Callable[..., int], given: Sequence[object]) -> None:
        """Record a call of a kernel."""
        if name in _IN_PLACE:
            self.refuse("updates parameters within forward or backward")
        elif not self.reason:
            self._entries.append((_call, (name, function, tuple(given))))

    def keep(self, *values: object) -> None:
        """Hold the memory of tensors; not the tensors, which autograd hands on only while nobody else has them."""
        for leaf in _tensors(values):
            if leaf.layout is not torch.strided:
                self.refuse(f"makes a tensor of layout {leaf.layout}: recordings support dense tensors")
            elif leaf not in self._pool:
                storage = leaf.untyped_storage()
                self._memory[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # such tensors, as lazy weights, take operations apart and come back with plain ones
        with torch._C.DisableTorchFunction():  # what follows is for no `calls`
            result = func(*args, **kwargs)
            if not self.reason:
                result = self._record(func, args, kwargs, result)
                self.calls.used(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """What an operation gives back: its result, or the same in the pool."""
        self._check(func, args, kwargs)
        if _reads(func, args, kwargs):
            what = f"{_here()} reads values of a tensor, by {func}"
            if not isinstance(result, bool):
                self.reason = self.reason or what
                return result
            self.chooses = True
            self._entries.append((_chosen, (func, self._by_memory(args), self._by_memory(kwargs), result, what)))
            return result
        made, given = _tensors(result), {_place(t) for t in _tensors((args, kwargs))}
        fresh = {id(t): t for t in made if _place(t) not in given}
        empty = func._overloadpacket in _EMPTY
        args, kwargs = self._by_memory(args), self._by_memory(kwargs)
        if fresh:
            placed = {key: self._placed(t, empty) for key, t in fresh.items()}
            result = tree_map_only(Tensor, lambda t: placed.get(id(t), t), result)
            if not empty:
                into = None if func._schema.is_mutable else _out_variant(func)
                self._entries.append(_into(func, args, kwargs, self._by_memory(_tensors(result)), into))
        elif func._schema.is_mutable or (not made and given):  # an assertion, not a question about types
            self._entries.append((_again, (func, args, kwargs)))
        return result

    def _check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Refuse an operation with effects that outlive the step, and note those that can be undone."""
        for tensor in written(func, args, kwargs):
            place = _place(tensor)
            if place in self._buffers:
                self.written[self._buffers[place]] = None
            elif tensor not in self._pool and place not in self._made and tensor.numel():
                self.refuse(f"writes, by {func}, a tensor {tuple(tensor.shape)} that is no buffer of the model")
        if func.namespace == "c10d":
            self.refuse(f"sends to other processes, by {func}")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Generator):
                self.generators[leaf] = None

    def _placed(self, made: Tensor, empty: bool) -> Tensor:
        """A new tensor in memory that a replay writes again."""
        ours = made.layout is torch.strided and made.is_cpu and made.numel()
        if ours and not torch._debug_has_internal_overlap(made):
            placed = self._pool.like(made)
            return placed if empty else placed.copy_(made)
        self.keep(made)
        self._made.add(_place(made))
        return made

    def _by_memory(self, value: Any) -> Any:
        """The same tensors as others of the same memory, because the memory of a parameter may be replaced, and what
        autograd hands on has no other name; and as ones that do not hold it, if it is of the pool."""

        def alias(tensor: Tensor) -> Tensor:
            return self._pool.alias(tensor) if tensor in self._pool else tensor.data

        return tree_map_only(Tensor, alias, value)

    def replay(self) -> None:
        """Run it all again.

        Raises:
            ChoiceError: values ask for another recording. What the replay wrote until then is for the caller to undo.
        """
        with torch.no_grad():
            for function, given in self._entries:
                function(*given)


class _Calls(TorchFunctionMode):
    """Refuses functions that hand values to Python without an operation that a recording would see, or that read an
    integer tensor without one: sizes, as those of `tensor_split`, which later operations have as constants."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._unused: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and len(args) == 1 and not any(kwargs.values()):
            with self:  # which torch's own function would leave
                return run_backward(args[0])
        name = getattr(func, "__name__", "")
        if name in _TO_PYTHON or (name in _MEMORY and not _here().startswith(_COMERA)):
            self._recording.refuse(f"reads values of a tensor, by {name}()")
        outer, self._unused = self._unused, {_place(t): t for t in _tensors((args, kwargs)) if _is_integer(t)}
        try:
            result = func(*args, **kwargs)
            returned = {_place(t) for t in _tensors(result)}
            if returned and not self._unused.keys() <= returned and not name.endswith("_as") and name != "to":
                self._recording.refuse(f"reads values of a tensor, by {name}()")
        finally:
            self._unused = outer
        return result

    def used(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operation was called in the present function: a copy takes the place of what it was made of."""
        places = {_place(t) for t in _tensors((args, kwargs))}
        unused = [self._unused.pop(place) for place in places if place in self._unused]
        if unused and func._overloadpacket in _COPIES and _is_integer(result):
            self._unused[_place(result)] = result


def _call(name: str, function: Callable[..., int], given: Sequence[Any]) -> None:
    if status := function(*given):
        check(name, status)


def _again(func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)


def _chosen(func: Any, args: Any, kwargs: Any, recorded: bool, what: str) -> None:
    if func(*args, **kwargs) is not recorded:
        raise ChoiceError(what)


def _copied(func: Any, args: Any, kwargs: Any, kept: Sequence[Tensor]) -> None:
    """Run an operation whose results are new tensors, and put them where they were recorded."""
    for place, new in zip(kept, _tensors(func(*args, **kwargs)), strict=True):
        if place.shape != new.shape:
            raise RuntimeError(f"{func} made {tuple(place.shape)}, now {tuple(new.shape)}: sizes depend on values")
        place.copy_(new)


def _into(func: Any, args: Any, kwargs: Any, kept: list[Tensor], into: tuple[Any, list[str]] | None) -> Entry:
    """The entry of an operation that makes tensors: into their memory where its variant `into` writes there."""
    if into is None or len(kept) != len(into[1]):
        return _copied, (func, args, kwargs, kept)
    given = {name: value for name, value in kwargs.items() if name in _plain(into[0])}
    return _again, (into[0], args, {**given, **dict(zip(into[1], kept, strict=True))})


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """The overload of an operation that writes into tensors which it is given, and the names of these. Those that
    reduce are excluded: some make all that they reduce in the place of the result, and write behind it."""
    wanted = _plain(func)
    if "reduction" in wanted:
        return None
    for name in func._overloadpacket.overloads():
        other = getattr(func._overloadpacket, name)
        outs = [each.name for each in other._schema.arguments if each.is_out]
        plain = _plain(other)
        made_by_out = {name for name in _OPTIONS if name not in plain}
        if outs and list(plain.items()) == [each for each in wanted.items() if each[0] not in made_by_out]:
            return other, outs
    return None


def _plain(func: Any) -> dict[str, str]:
    """The types of an operation's arguments by name, but for those which it writes its results to."""
    return {each.name: str(each.type) for each in func._schema.arguments if not each.is_out}


def _here() -> str:
    """The file and line of what is being recorded."""
    frames = [f for f in extract_stack() if f.filename != __file__ and not f.filename.startswith(_TORCH)]
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result, or its shape, is for Python to choose by."""
    if func._overloadpacket is _aten.index:  # as many rows as there are indices, unless they are a mask
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]))
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return bool(_READS.intersection(func.tags))


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    """Which memory a tensor has; its own, if it is sparse."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
