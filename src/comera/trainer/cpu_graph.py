"""Forward and backward on a CPU as a recording: what a CUDA graph is to a GPU.

    tape    what ran below autograd, in order: calls of C++ kernels with addresses, operations of torch with tensors
    replay  the same again, on the same memory: no Python, no autograd, no allocation between kernels

With one sample, half of a compressed step is Python and autograd. Calls of kernels know their operands by address, so a
tape holds the memory that was made while it recorded (recorded_memory.py).

A recording is wrong if it has missed something: a value that Python read, a random number that Python drew. What reads
values is refused where torch knows of it. And the first replays are compared with the step itself, on the batches of
the moment, to the bit: loss, gradients, buffers and the state of the random generator.
"""

import random
from collections.abc import Callable, Sequence
from itertools import starmap
from operator import attrgetter
from pathlib import Path
from traceback import extract_stack
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from comera.kernels.cpp.library import check
from comera.kernels.cpp.memory import block
from comera.kernels.recording import values_unread
from comera.trainer.cuda_graph import GraphedStep
from comera.trainer.recorded_memory import Pool
from comera.trainer.task import Batch

T = TypeVar("T")
Entry = tuple[Callable[..., object], tuple[Any, ...]]

CHECKED = 2  # replays that are compared with the step: on the batch that was recorded, and on the next one
_TORCH = str(Path(torch.__file__).parent)
_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_OPTIONS = ("dtype", "layout", "device", "pin_memory")  # of a new tensor; one that is given has them
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_shape, _requires_grad = map(attrgetter, ("shape", "requires_grad"))
_TO_PYTHON = ("tolist", "numpy", "__array__", "__dlpack__")  # which read without an operation


class Passes:
    """What forward and backward make: the loss, and the gradient of each parameter, None for one that has none."""

    def __init__(self, loss: Tensor, gradients: list[Tensor | None]) -> None:
        self.loss, self.gradients = loss, gradients


class RecordedPasses:
    """Runs `passes` from recordings, one for each shape of the batches, where they can be recorded.

    passes: batches -> loss, the gradients in `.grad`. model, parameters: it computes with the model and makes gradients
    of the parameters.
    """

    def __init__(
        self, passes: Callable[[Sequence[Batch]], Tensor], model: nn.Module, parameters: Sequence[Tensor]
    ) -> None:
        self._passes, self._model, self._parameters = passes, model, parameters
        self._held = list(dict.fromkeys([*model.parameters(), *parameters, *model.buffers()]))
        recorder = CpuRecorder(list(model.buffers()), self._forget)
        self.graphs = GraphedStep(self._run, recorder, self._foundation, self._before_capture)

    def __call__(self, batches: Sequence[Batch]) -> Tensor:
        """The loss; gradients are in `.grad`, until the next call, which may write there."""
        made: Passes = self.graphs(batches)
        for p, gradient in zip(self._parameters, made.gradients, strict=True):
            p.grad = gradient
        return made.loss.clone()

    def _run(self, batches: Sequence[Batch]) -> Passes:
        for p in self._parameters:
            p.grad = None
        with values_unread():  # so that a step is the same to the bit, recorded or not, and so is a resumed run
            return Passes(self._passes(batches), [p.grad for p in self._parameters])

    def _foundation(self) -> object:
        """What a recording depends on."""
        memory = [list(map(read, self._held)) for read in (Tensor.data_ptr, _shape, _requires_grad)]
        return memory, self._model.training, torch.get_num_threads()

    def _before_capture(self) -> Callable[[], object]:
        """Nothing that was cached from these parameters may be used while recording, nor what is cached then later."""
        self._forget()
        return self._forget

    def _forget(self) -> None:
        increment_version(self._held)


class CpuRecorder:
    """Records forward and backward; a `comera.trainer.cuda_graph.Recorder`.

    buffers: of the model, which a step may write. forget: makes what was computed from parameters and cached invalid.
    """

    def __init__(self, buffers: Sequence[Tensor], forget: Callable[[], object]) -> None:
        self._buffers, self._forget = buffers, forget
        self._pool: Callable[[], Pool | None] = lambda: None

    def warm_up(self, step: Callable[[], T], *, watch: bool) -> tuple[T, str]:
        """Run a step; watch: detect random draws by Python."""
        drawn = random.getstate()
        result = step()
        changed = watch and random.getstate() != drawn
        return result, "the step draws random numbers by Python's generator" if changed else ""

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Record a step; what it writes to memory of others, and draws, is undone."""
        pool = self._pool() or Pool(block)
        self._pool = ref(pool)
        tape, left, restore = _Tape(pool), CHECKED, self._saved()
        try:
            with values_unread(tape, pool), _ReadsRefused(), tape:
                result = _handed_on(step(), pool)
        finally:
            restore()

        def replay() -> Passes:
            nonlocal left
            if not left:
                tape.replay()
                return result
            left, restore = left - 1, self._saved()
            with values_unread(memory=pool):  # what it makes is gone when the replay writes there
                made: Passes = step()
                expected = [
                    *(t.clone() if t is not None and t in pool else t for t in _tensors(made)),
                    *self._changed(),
                ]
            self._forget()
            restore()
            tape.replay()
            if not all(starmap(_same_bits, zip(expected, [*_tensors(result), *self._changed()], strict=True))):
                restore()
                raise RuntimeError("what is recorded is not the step: something in it depends on what was not recorded")
            return result

        return replay

    def _changed(self) -> list[Tensor]:
        """Copies of what a step changes."""
        return [*(buffer.clone() for buffer in self._buffers), torch.get_rng_state()]

    def _saved(self) -> Callable[[], None]:
        """What gives buffers and the random generator what they have now."""
        random_state, held = torch.get_rng_state(), [buffer.clone() for buffer in self._buffers]

        def restore() -> None:
            with torch.no_grad():
                for buffer, values in zip(self._buffers, held, strict=True):
                    buffer.copy_(values)
            torch.set_rng_state(random_state)

        return restore


class _ReadsRefused(TorchFunctionMode):
    """Refuses methods that hand values to Python without an operation that a tape would see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _TO_PYTHON:
            raise RuntimeError(f"{_here()} reads values of a tensor, by {func.__name__}()")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Records what runs inside it."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
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
        if _reads(func, args, kwargs or {}):
            raise RuntimeError(f"{_here()} reads values of a tensor, by {func}")
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        given = {_place(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [t for t in made if _place(t) not in given]
        args, kwargs = self._by_memory(args), self._by_memory(kwargs or {})
        if func._schema.is_mutable or not made:
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
        """Run it all again."""
        with torch.no_grad():
            for function, given in self._entries:
                function(*given)


def _call(name: str, function: Callable[..., int], given: Sequence[Any]) -> None:
    if status := function(*given):
        check(name, status)


def _again(func: Any, args: Any, kwargs: Any) -> None:
    func(*args, **kwargs)


def _copied(func: Any, args: Any, kwargs: Any, kept: Sequence[Tensor]) -> None:
    """Run an operation whose results are new tensors, and put them where they were recorded."""
    for place, new in zip(kept, tree_leaves(func(*args, **kwargs)), strict=True):
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


def _place(tensor: Tensor) -> int:
    """Which memory a tensor has; its own, if it is sparse."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _tensors(made: Passes) -> list[Tensor | None]:
    return [made.loss.detach(), *made.gradients]


def _handed_on(made: Passes, pool: Pool) -> Passes:
    """The same in memory that other recordings take, too: results are read before the next replay."""

    def alias(tensor: Tensor) -> Tensor:
        return pool.alias(tensor, hold=True) if tensor in pool else tensor

    return Passes(alias(made.loss.detach()), [None if t is None else alias(t) for t in made.gradients])


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Also where they are no numbers."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
