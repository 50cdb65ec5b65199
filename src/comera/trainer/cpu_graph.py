"""Forward and backward on a CPU as a recording: what a CUDA graph is to a GPU.

    tape    what ran below autograd, in order: calls of C++ kernels with addresses, operations of torch with tensors
    replay  the same again, on the same memory: no Python, no autograd, no allocation between kernels

With one sample, half of a compressed step is Python and autograd.

A shape has a recording for each way that its steps take: where Python asks tensors a question, as transformers asks a
mask whether it hides anything, a replay that comes to another answer is undone, and its batch goes to the recording
with that answer, which is made if there is none.

A recording is wrong if it has missed something: a value that Python read, a random number that Python drew. What reads
values is refused where torch knows of it (tape.py). And the first replays are compared with the step itself, on the
batches of the moment, to the bit: loss, gradients, buffers and the state of the random generator.
"""

import random
from collections.abc import Callable, Sequence
from itertools import starmap
from operator import attrgetter
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from comera.kernels.cpp.memory import block
from comera.kernels.recording import values_unread
from comera.trainer.cuda_graph import GraphedStep
from comera.trainer.recorded_memory import Pool
from comera.trainer.tape import ChoiceError, ReadsRefused, Tape
from comera.trainer.task import Batch

T = TypeVar("T")

CHECKED = 2  # replays that are compared with the step: on the batch that was recorded, and on the next one
WAYS = 8  # recordings of one shape, at most
_shape, _requires_grad = map(attrgetter, ("shape", "requires_grad"))


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
        recordings = [self._record(step)]  # of one shape; the one that served last is first

        def replay() -> Passes:
            what = ""
            for recording in list(recordings):
                try:
                    made = recording()
                except ChoiceError as other:
                    what = str(other)
                else:
                    recordings.remove(recording)
                    recordings.insert(0, recording)
                    return made
            if len(recordings) == WAYS:
                raise RuntimeError(f"{what}, and steps of one shape take more than {WAYS} ways")
            self._forget()
            recordings.insert(0, self._record(step))
            return recordings[0]()

        return replay

    def _record(self, step: Callable[[], Passes]) -> Callable[[], Passes]:
        """The replay of one way of a step; it raises ChoiceError, and leaves nothing, for batches of another way."""
        pool = self._pool() or Pool(block)
        self._pool = ref(pool)
        tape, left, restore = Tape(pool), CHECKED, self._saved()
        try:
            with values_unread(tape, pool), ReadsRefused(), tape:
                result = _handed_on(step(), pool)
        finally:
            restore()

        def replay() -> Passes:
            nonlocal left
            if not left and not tape.chooses:
                tape.replay()
                return result
            restore, expected = self._saved(), self._expected(step, pool) if left else []
            if left:
                restore()
            try:
                tape.replay()
            except ChoiceError:
                restore()
                raise
            if left and not all(starmap(_same_bits, zip(expected, [*_tensors(result), *self._changed()], strict=True))):
                restore()
                raise RuntimeError("what is recorded is not the step: something in it depends on what was not recorded")
            left = max(left - 1, 0)
            return result

        return replay

    def _expected(self, step: Callable[[], Passes], pool: Pool) -> list[Tensor | None]:
        """What a step makes and changes; not in the memory of the replay that follows."""
        with values_unread(memory=pool):
            made = step()
            kept = [t.clone() if t is not None and t in pool else t for t in _tensors(made)]
        self._forget()
        return [*kept, *self._changed()]

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
