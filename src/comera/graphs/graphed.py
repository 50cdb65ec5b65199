"""Steps from recordings, one for each shape of the batches.

    first visits of a shape → eager → recorded → replayed

Every visit is a step that counts. A recording repeats what Python did when it was made, so it is right only while
Python would do the same again. What Python can see of a step (picture.py) is compared before each one: when it has
changed, after pruning, a mode that was set or a hook, all recordings are dropped and every shape begins anew. A step
that cannot be recorded, or for which this changes too often, runs eager, and `reason` says why.
"""

import copy
import dataclasses
import gc
from collections.abc import Callable, Hashable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from comera.errors import DataError
from comera.graphs.picture import Picture

T = TypeVar("T")
Batch = Any
Step = Callable[[Sequence[Batch]], Any]

LIMIT = 32  # shapes that are remembered; a recording takes a few MB
PATIENCE = 32  # a change costs 4 of it, a replay gives one back: where recordings do not pay, steps run eager
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


class RecordingError(Exception):
    """A step is not replayed, or its recording must not be.

    again: whether a later step may be recorded. result: of the step; None where it was not taken.
    """

    def __init__(self, reason: str, *, again: bool = False, result: Any = None) -> None:
        super().__init__(reason)
        self.reason, self.again, self.result = reason, again, result


class ChoiceError(RecordingError):
    """A replay came to another answer than the recording: where it is read, and by what."""


class Recorder(Protocol):
    """Records steps: `CudaRecorder`, `CpuRecorder`, or in tests a stand-in.

    warm_ups: visits of a shape before it is recorded; the last one is watched.
    """

    warm_ups: int

    def warm_up(self, step: Callable[[], Any], *, watch: bool) -> tuple[Any, str]:
        """Run a step; returns its result and, if watched, the reason why it cannot be recorded, "" for none."""

    def capture(self, step: Callable[[], Any], picture: Picture) -> Callable[[], Any]:
        """Record a step; returns its replay, whose first call has the results of the step that was recorded. picture:
        of what it depends on.

        Raises RecordingError, and so may the replay: with the step's result, or with nothing done.
        """


@dataclass
class _Shape:
    """One shape of batches: visits so far and, once recorded, the recording's inputs and its replay."""

    visits: int = 0
    inputs: Any = None
    replay: Callable[[], Any] | None = None


class GraphedStep:
    """Runs `step` from recordings where there are any, eager elsewhere.

    step: batches -> results, a structure of tensors. picture: makes one of what steps depend on now. before_capture:
    called before each recording; returns the function that undoes a refused one. limit: shapes that are remembered; the
    least recently used one is dropped.
    reason: why all steps run eager from now on; "" while they do not. captures: recorded shapes so far. crowded:
    whether there were more shapes than `limit`. picture: of what all recordings depend on.
    """

    def __init__(
        self,
        step: Step,
        recorder: Recorder,
        picture: Callable[[], Picture],
        before_capture: Callable[[], Callable[[], object]] = lambda: int,
        *,
        limit: int = LIMIT,
    ) -> None:
        self.reason, self.captures, self.crowded = "", 0, False
        self._step, self._recorder, self._limit = step, recorder, limit
        self._take_picture, self._before_capture = picture, before_capture
        self.picture: Picture | None = None
        self._unsettled = 0
        self._shapes: dict[Hashable, _Shape] = {}  # the most recently used one is last
        self._form: dict[str, str] | None = None

    def __call__(self, batches: Sequence[Batch]) -> Any:
        """Take one step."""
        return self.take(batches, self.key(batches))

    def take(self, batches: Sequence[Batch], key: Hashable) -> Any:
        """Take one step on batches with this `key`."""
        if not self.reason and self.picture is not None and (change := self.picture()):
            self._refuse(RecordingError(f"{change} changes from step to step", again=True))
        if self.reason:
            return self._step(batches)
        shape = self._shapes.pop(key) if key in self._shapes else _Shape()
        self._shapes[key] = shape
        if len(self._shapes) > self._limit:
            del self._shapes[next(iter(self._shapes))]
            self.crowded = True
        try:
            picture = self.picture = self.picture or attempted("what steps depend on is not seen", self._take_picture)
            if shape.visits < self._recorder.warm_ups:
                return self._warm_up(shape, batches)
            if shape.replay is None:
                shape.inputs = map_tensors(lambda t: t.detach().clone(), list(batches))
                shape.replay = self._capture(shape, picture)
            else:
                with torch.no_grad():
                    for source, target in zip(tensors_in(batches), tensors_in(shape.inputs), strict=True):
                        target.copy_(source, non_blocking=True)
                self._unsettled = max(self._unsettled - 1, 0)
            return map_tensors(torch.clone, shape.replay())
        except RecordingError as refused:
            inputs = shape.inputs
            self._refuse(refused)
            if refused.result is None:
                return self._step(batches)
            for mine, theirs in zip(tensors_in(inputs), tensors_in(batches), strict=True):
                if not torch.equal(mine, theirs):  # the step has written it
                    theirs.copy_(mine)
            return map_tensors(torch.clone, refused.result)

    def _warm_up(self, shape: _Shape, batches: Sequence[Batch]) -> Any:
        shape.visits += 1
        watch = shape.visits == self._recorder.warm_ups
        result, reason = self._recorder.warm_up(lambda: self._step(batches), watch=watch)
        if reason:
            self._refuse(RecordingError(reason))
        return result

    def _capture(self, shape: _Shape, picture: Picture) -> Callable[[], Any]:
        undo = self._before_capture()
        try:
            replay = self._recorder.capture(lambda: self._step(shape.inputs), picture)
            if change := picture():
                raise RecordingError(f"the step changes {change}", again=True)
        except RecordingError:
            undo()
            raise
        self.captures += 1
        return replay

    def _refuse(self, refused: RecordingError) -> None:
        """Drop all recordings, for good or until things stay as they are."""
        self._shapes.clear()
        self.picture = None
        self._unsettled += 4
        if not refused.again or self._unsettled > PATIENCE:
            self.reason = refused.reason

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
                    if leaf.requires_grad:
                        reason = f"{path} needs a gradient, which a recording would not leave there"
                        self._refuse(RecordingError(reason))
                    key.append(leaf.shape)
                    form[path] = f"{leaf.dtype}, {leaf.ndim}-dimensional, on {leaf.device}"
                elif isinstance(leaf, _PLAIN):
                    key.append(leaf)
                    form[path] = type(leaf).__name__
                else:
                    reason = f"graphs support tensors and plain values, but {path} is of type {type(leaf).__name__}"
                    self._refuse(RecordingError(reason))
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


def attempted(what: str, run: Callable[[], T]) -> T:
    """What `run`, in which no step runs, returns. Raises RecordingError, which begins with `what`, if it fails."""
    try:
        return run()
    except RecordingError:
        raise
    except Exception as error:
        first_line, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise RecordingError(f"{what}: {first_line}") from error


def kept_by_python(storages: Callable[[torch.UntypedStorage], bool]) -> str:
    """The shape of a tensor that Python holds in memory of which `storages` is true, in words; "" if there is none."""
    for each in gc.get_objects():
        if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided and storages(each.untyped_storage()):
            return f"a tensor of shape {tuple(each.shape)} that the step makes outlives it, where replays would write"
    return ""


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


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a structure."""
    return [leaf for _, leaf in _leaves(value) if isinstance(leaf, Tensor)]
