"""What ran below autograd on a CPU, in order, to be run again: calls of C++ kernels with addresses, operations of torch
with tensors.

A tape holds the memory that was made while it recorded (recorded_memory.py), since kernels know their operands by
address. It is right only for values for which Python would do the same again. So what reads values is refused, with
its file and line, if torch knows of it: all but an answer, yes or no, as of `mask.all()`. That is a choice, which is
recorded, and when replayed compared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.kernels.cpp.library import check
from comera.trainer.recorded_memory import Pool

Entry = tuple[Callable[..., object], tuple[Any, ...]]

_TORCH = str(Path(torch.__file__).parent)
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # of a new tensor; one that is given has them
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_TO_PYTHON = ("tolist", "numpy", "__array__", "__dlpack__")  # which read without an operation


class ChoiceError(RuntimeError):
    """A replay came to another answer than the recording: where it is read, and by what."""


class ReadsRefused(TorchFunctionMode):
    """Refuses methods that hand values to Python without an operation that a tape would see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _TO_PYTHON:
            raise RuntimeError(f"{_here()} reads values of a tensor, by {func.__name__}()")
        return func(*args, **(kwargs or {}))


class Tape(TorchDispatchMode):
    """Records what runs inside it. chooses: whether Python read answers of tensors meanwhile."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.chooses = False
        self._pool = pool
        self._entries: list[Entry] = []
        self._memory: dict[int, torch.UntypedStorage] = {}  # made while recording, or read by a kernel

    def kernel(self, name: str, function: Callable[..., int], given: Sequence[object]) -> None:
        """Record a call of a kernel."""
        self._entries.append((_call, (name, function, tuple(given))))

    def keep(self, *values: object) -> None:
        """Hold the memory of tensors; not the tensors, which autograd hands on only while nobody else has them."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                if leaf.layout is not torch.strided:
                    raise RuntimeError(f"recordings support dense tensors, the step makes one of layout {leaf.layout}")
                if leaf not in self._pool:
                    storage = leaf.untyped_storage()
                    self._memory[storage._cdata] = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _reads(func, args, kwargs or {}):
            what = f"{_here()} reads values of a tensor, by {func}"
            if not isinstance(result, bool):
                raise RuntimeError(what)
            self.chooses = True
            self._entries.append((_chosen, (func, self._by_memory(args), self._by_memory(kwargs or {}), result, what)))
            return result
        made = _tensors(result)
        given = {_place(t) for t in _tensors((args, kwargs))}
        fresh = [t for t in made if _place(t) not in given]
        args, kwargs = self._by_memory(args), self._by_memory(kwargs or {})
        if func._schema.is_mutable or (not made and given):  # an assertion, not a question about types
            self._entries.append((_again, (func, args, kwargs)))
        elif fresh and func._overloadpacket in _EMPTY:
            if _fits_pool(result):
                result = self._pool.empty(*result.shape)
                fresh = [result]
        elif fresh:
            into = _out_variant(func)
            if into is not None and _fits_pool(result):
                result = self._pool.empty(*result.shape).copy_(result)
                made = fresh = [result]
            self._entries.append(_into(func, args, kwargs, self._by_memory(made), into))
        self.keep(*fresh)
        return result

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
        place.copy_(new)


def _into(func: Any, args: Any, kwargs: Any, kept: list[Tensor], into: tuple[Any, list[str]] | None) -> Entry:
    """The entry of an operation that makes tensors: into their memory where its variant `into` writes there."""
    if into is None or len(kept) != len(into[1]):
        return _copied, (func, args, kwargs, kept)
    given = {name: value for name, value in kwargs.items() if name in _plain(into[0])}
    return _again, (into[0], args, {**given, **dict(zip(into[1], kept, strict=True))})


def _out_variant(func: Any) -> tuple[Any, list[str]] | None:
    """The overload of an operation that writes into tensors which it is given, and the names of these."""
    wanted = _plain(func)
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


def _fits_pool(made: Any) -> bool:
    if not isinstance(made, Tensor) or made.device.type != "cpu":
        return False
    return made.dtype is torch.float32 and made.numel() > 0 and made.is_contiguous()


def _reads(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the result, or its shape, is for Python to choose by."""
    if func._overloadpacket is _aten.index:  # as many rows as there are indices, unless they are a mask
        return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in tree_leaves(args[1]))
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return False
    return bool(_READS.intersection(func.tags))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    """Which memory a tensor has; its own, if it is sparse."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
