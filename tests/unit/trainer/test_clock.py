"""The clock of training, what it counts in a run, and the signals that end one."""

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comera.trainer.clock import Clock, Interrupt
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.task import Task

from ...helpers.run_folders import records


class Ticks:
    """time.perf_counter as the test sets it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr("comera.trainer.clock.time", ticks)
    return ticks


def test_the_clock_stands_until_started_and_while_paused(ticks: Ticks) -> None:
    clock = Clock(torch.device("cpu"), seconds=10.0)
    ticks.now = 5
    assert clock.seconds == 10
    clock.start()
    ticks.now = 7
    assert clock.seconds == 12
    with clock.paused():
        ticks.now = 100
        assert clock.seconds == 12
    ticks.now = 101
    assert clock.seconds == 13


def test_signals_are_noted_inside_and_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with Interrupt() as interrupt:
            assert not interrupt.seen
            os.kill(os.getpid(), number)
            assert interrupt.seen
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_sigint_is_obeyed_but_a_second_sigterm_is_not() -> None:
    with Interrupt():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_another_thread_leaves_the_handlers_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside: list[object] = []

    def run() -> None:
        with Interrupt():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert inside == [before]
    assert signal.getsignal(signal.SIGINT) == before


class Timed(Task):
    """A regression whose steps take a second, the first three ten, and whose evaluation takes a thousand."""

    name = "timed"

    def __init__(self, ticks: Ticks) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(3, 1)
        self.ticks = ticks

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        self.ticks.now += 10 if step < 3 else 1
        return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

    def eval_batches(self) -> Iterator[Tensor]:
        self.ticks.now += 1000
        yield torch.ones(4, 3)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def tokens(self, batch: Tensor) -> int:
        return len(batch)


CONFIG = TrainConfig(max_seconds=50, warmup=0.0, eval_every=4, save_every=3, log_every=1, progress=False)


def test_a_bound_in_seconds_counts_training_alone_and_drives_the_schedule(tmp_path: Path, ticks: Ticks) -> None:
    summary = fit(Timed(ticks), replace(CONFIG, schedule="linear"), tmp_path)
    assert (summary.stopped, summary.time, summary.steps) == ("time", 50.0, 3 + 20)
    assert ticks.now == 50 + 6 * 1000  # evaluated every 4 steps and at the end
    train = records(tmp_path, "train")
    begun = [0.0, *(line["time"] for line in train[:-1])]  # the time when a step begins decides its rate
    assert [line["lr"]["dense"] for line in train] == pytest.approx([1e-3 * (1 - t / 50) for t in begun])
    assert [line["step_time"] for line in train] == pytest.approx([10] * 3 + [1] * 20)
    assert train[-1]["tokens_per_s"] == pytest.approx(4)


def test_the_median_step_leaves_out_the_first_ones(tmp_path: Path, ticks: Ticks) -> None:
    summary = fit(Timed(ticks), replace(CONFIG, max_seconds=None, steps=5), tmp_path)
    assert (summary.time, summary.step_time) == (32.0, 1.0)


def test_a_resumed_run_goes_on_from_the_time_it_had(tmp_path: Path, ticks: Ticks) -> None:
    class Interrupted(Timed):
        def tokens(self, batch: Tensor) -> int:
            if self.ticks.now == 33:  # in step 6
                os.kill(os.getpid(), signal.SIGTERM)
            return super().tokens(batch)

    config = replace(CONFIG, eval_every=0)
    first = fit(Interrupted(ticks), config, tmp_path)
    assert (first.stopped, first.steps, first.time) == ("interrupted", 6, 33.0)
    ticks.now += 500
    second: Any = fit(Timed(ticks), config, tmp_path, resume=True)
    assert (second.stopped, second.steps, second.time, second.tokens) == ("time", 6 + 17, 50.0, 4 * 23)
