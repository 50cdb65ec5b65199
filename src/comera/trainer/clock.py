"""The clock of a run, and the signals that stop it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch


class Clock:
    """Monotonic seconds of training, which stand still until `start` and while `paused`.

    device: synchronized at a pause, so that its work counts where it belongs; seconds: where to start.
    """

    def __init__(self, device: torch.device, seconds: float = 0.0) -> None:
        self._device = device
        self._seconds = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._seconds + (time.perf_counter() - self._since if self._since is not None else 0.0)

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside this context."""
        self._synchronize()
        self._seconds, self._since = self.seconds, None
        yield
        self._synchronize()
        self.start()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Interrupt:
    """Inside this context, SIGINT and SIGTERM only set `seen`; a second SIGINT has its usual effect.

    A second SIGTERM has not: launchers send one after the SIGINT that their processes got from the terminal.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # only this one may set handlers
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
