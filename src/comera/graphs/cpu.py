"""Forward and backward on a CPU as a recording: what a CUDA graph is to a GPU.

    recording  a step that counts, and what ran in it below autograd, in order: calls of C++ kernels with addresses,
               operations of torch with tensors
    replay     the same again, on the same memory: no Python, no autograd, no allocation between kernels

With one sample, half of a compressed step is Python and autograd.

A shape has a recording for each way that its steps take: where Python asks tensors a question, as transformers asks a
mask whether it hides anything, a replay that comes to another answer is undone, and its batch goes to the recording
with that answer, which is made if there is none.

A recording is wrong if it has missed something. What it knows that it cannot repeat is refused (recording.py), what
Python could see changing is compared before each step (picture.py), and a tensor that outlives the recorded step in its
memory is refused: other recordings would write there. Against the rest, replays 1, 2, 4, 8 and so on, and then one of
`EVERY`, are compared with the step itself, on the batch of the moment, to the bit: loss, gradients, buffers and the
state of the random generators. It is the step that counts then.
"""

import gc
import random
import sys
from collections.abc import Callable, Iterable
from itertools import starmap
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from comera.graphs.graphed import ChoiceError, RecordingError, attempted, kept_by_python
from comera.graphs.picture import Picture
from comera.graphs.pool import Pool
from comera.graphs.recording import Recording
from comera.kernels.cpp.memory import block, release
from comera.kernels.recording import no_host_reads

EVERY = 512  # so many replays apart at most: one takes as long as a step and a replay, under 1 % even where that is 0.2
WAYS = 8  # recordings of one shape, at most

_Made = list[Tensor | None]
"""The loss, and the gradient of each leaf."""


class CpuRecorder:
    """Records forward and backward: steps that return the loss and leave gradients in `.grad`.

    cleared: the leaves whose gradients are None before each step; gradients of others are added to what they have.
    forget: makes what was computed from parameters, and cached, invalid.
    """

    warm_ups = 1

    def __init__(self, cleared: Callable[[], Iterable[Tensor]], forget: Callable[[], object]) -> None:
        self._cleared, self._forget = cleared, forget
        self._pool: Callable[[], Pool | None] = lambda: None

    def warm_up(self, step: Callable[[], Tensor], *, watch: bool) -> tuple[Tensor, str]:
        """Run a step: the next one, which is recorded, is watched."""
        return step(), ""

    def capture(self, step: Callable[[], Tensor], picture: Picture) -> Callable[[], Tensor]:
        """Record a step and take it; the first call of the replay returns its loss."""
        pool = self._pool() or Pool(block)
        self._pool = ref(pool)
        ways = [_Way(step, picture, pool, self._cleared(), self._forget)]  # the one that served last is first
        recorded = [ways[0].loss]

        def replay() -> Tensor:
            if recorded:
                return recorded.pop()
            what = ""
            for way in list(ways):
                try:
                    loss = way()
                except ChoiceError as other:
                    what = other.reason
                else:
                    ways.remove(way)
                    ways.insert(0, way)
                    return loss
            if len(ways) == WAYS:
                raise RecordingError(f"{what}, and steps of one shape take more than {WAYS} ways")
            ways.insert(0, _Way(step, picture, pool, self._cleared(), self._forget))
            return ways[0].loss

        return replay


class _Way:
    """One way of the steps of a shape, recorded in a step that counts.

    loss: of that step. Raises RecordingError with it.
    """

    def __init__(
        self,
        step: Callable[[], Tensor],
        picture: Picture,
        pool: Pool,
        cleared: Iterable[Tensor],
        forget: Callable[[], object],
    ) -> None:
        self._step, self._picture, self._pool, self._forget = step, picture, pool, forget
        others = set(picture.leaves).difference(cleared)
        self._others = [leaf in others for leaf in picture.leaves]
        self._held = pool.alive  # by somebody, from an earlier recording
        self._replays = 0
        recording = self._recording = Recording(pool, picture.buffers)
        random_state, of_python = torch.get_rng_state(), _random_of_python()
        with recording.calls, recording:
            made = self._run(recording)
        self._draws = not torch.equal(torch.get_rng_state(), random_state)
        if recording.reason or _random_of_python() != of_python:
            reason = recording.reason or "the step draws random numbers by Python's generator"
            raise RecordingError(reason, result=self._hand_on(made))
        self._result = self._lent(made)
        del made
        self.loss = self._hand_on(self._result)
        self._refuse_what_stays()

    def __call__(self) -> Tensor:
        """Take a step, which leaves gradients; returns the loss. Raises ChoiceError, with nothing done, for batches of
        another way."""
        self._replays += 1
        if self._replays.bit_count() == 1 or self._replays % EVERY == 0:  # the first are powers of 2
            return self._checked()
        self._replay(self._saved(self._recording.written))
        return self._hand_on(self._result)

    def _checked(self) -> Tensor:
        """A step, after a replay that is compared with it."""
        buffers = self._picture.buffers
        restore = self._saved(buffers)
        self._replay(restore)
        replayed = [None if t is None else t.clone() for t in (*self._result, *self._state(buffers))]
        restore()
        made = self._run(None)  # in the same memory, and counts
        same = all(starmap(_same_bits, zip(replayed, [*made, *self._state(buffers)], strict=True)))
        result = self._lent(made)
        del made
        loss = self._hand_on(result)
        if not same:
            reason = "what is recorded is not the step: something in it depends on what was not recorded"
            raise RecordingError(reason, result=loss)
        self.loss = loss
        self._refuse_what_stays()
        release()  # of eager steps and evaluations; a replay takes none of it
        return loss

    def _run(self, sink: Recording | None) -> _Made:
        """Run the step; what it made is in `.grad` no more. Nothing that was cached before may be used, nor later what
        is cached now."""
        leaves = self._picture.leaves
        before = [leaf.grad for leaf in leaves]
        self._forget()
        try:
            for leaf in leaves:
                leaf.grad = None
            with no_host_reads(sink, self._pool):
                return [self._step().detach(), *(leaf.grad for leaf in leaves)]
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
            self._forget()

    def _replay(self, restore: Callable[[], None]) -> None:
        try:
            attempted("a replay failed", self._recording.replay)
        except BaseException:
            restore()
            raise
        increment_version(self._recording.written)

    def _hand_on(self, made: _Made) -> Tensor:
        """Leave gradients in `.grad`, until the next step; returns the loss."""
        loss, *gradients = made
        for leaf, gradient, other in zip(self._picture.leaves, gradients, self._others, strict=True):
            if gradient is None:
                continue
            if not other:
                leaf.grad = gradient
            elif leaf.grad is None:
                leaf.grad = gradient.clone()
            else:
                with torch.no_grad():
                    leaf.grad.add_(gradient)
        assert loss is not None
        return loss

    def _lent(self, made: _Made) -> _Made:
        """The same in memory that other recordings take, too: results are read before the next step."""
        return [self._pool.alias(t, hold=True) if t is not None and t in self._pool else t for t in made]

    def _state(self, buffers: Iterable[Tensor]) -> list[Tensor]:
        """What a step changes besides gradients."""
        return [*buffers, torch.get_rng_state(), *(each.get_state() for each in self._recording.generators)]

    def _saved(self, buffers: Iterable[Tensor]) -> Callable[[], None]:
        """What gives buffers and random generators what they have now."""
        held = [(buffer, buffer.clone()) for buffer in buffers]
        random_state = torch.get_rng_state() if self._draws else None
        states = [(each, each.get_state()) for each in self._recording.generators]

        def restore() -> None:
            with torch.no_grad():
                for buffer, values in held:
                    buffer.copy_(values)
            if random_state is not None:
                torch.set_rng_state(random_state)
            for each, state in states:
                each.set_state(state)

        return restore

    def _refuse_what_stays(self) -> None:
        """Raise RecordingError where Python keeps something that replays would not change, or would write to."""
        if change := self._picture():
            raise RecordingError(f"the step changes {change}", again=True, result=self.loss)
        if self._pool.alive - self._held:
            gc.collect()
        if kept := self._pool.alive - self._held:
            reason = kept_by_python(lambda storage: storage._cdata in kept)
            raise RecordingError(reason or "a tensor outlives the step", again=True, result=self.loss)


def _random_of_python() -> object:
    """The state of Python's random generator, and of numpy's."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate()
    name, keys, *others = numpy.random.get_state()
    return random.getstate(), name, keys.tobytes(), others


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Also where they are no numbers."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (one, other)))
