"""The run's clock, and the signals that stop it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch


class Clock:
    """Monotonic seconds of training: it stands until `start`, and while `paused`.

    device: waited for at a pause, so that its work is counted where it belongs; seconds: to start from.
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
        """Let it run."""
        self._since = time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stand still inside."""
        self._wait()
        self._seconds, self._since = self.seconds, None
        yield
        self._wait()
        self.start()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Interrupt:
    """Inside, SIGINT and SIGTERM are noted in `seen` and not obeyed; a second SIGINT has its usual effect.

    SIGTERM stays noted only: a launcher sends it after the SIGINT that its processes have had from the terminal.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():  # Python lets no other set handlers
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])
