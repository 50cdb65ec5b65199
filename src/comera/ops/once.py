"""Results that are made once: what a replay of the forward (train/recompute.py) takes as they were.

A replay decides by operation what to keep. Code that knows better, since a small result took large intermediates or
many random numbers, says so with `made_once`. Without a replay that is the call alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Tape(Protocol):
    """What records results in a forward and gives them back in its replay."""

    def made_once(self, make: Callable[[], T]) -> T:
        """What `make` returned in the forward: a tensor, or a tuple that holds some."""

    def paused(self) -> AbstractContextManager[object]:
        """Context in which nothing is recorded or given back."""


class _Running(threading.local):
    tape: Tape | None = None


_running = _Running()


def made_once(make: Callable[[], T]) -> T:
    """make(), a tensor or a tuple that holds some, for the forward and its replay together.

    `make` must draw from torch's generators only and must not be differentiated: call it inside of an
    autograd.Function, or where nothing needs a gradient. Nobody may write to its result in place.
    """
    if torch.compiler.is_compiling() or _running.tape is None:
        return make()
    return _running.tape.made_once(make)


def unrecorded() -> AbstractContextManager[object]:
    """Context for what outlives the forward, and which its replay therefore finds made: nothing in it is recorded."""
    if torch.compiler.is_compiling() or _running.tape is None:
        return nullcontext()
    return _running.tape.paused()


def exchange(tape: Tape | None) -> Tape | None:
    """Let `tape` be the one of this thread; returns the one that was."""
    _running.tape, before = tape, _running.tape
    return before
