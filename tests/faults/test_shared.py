"""One model in many threads, in forked processes, and interrupted at random moments; two runs in one folder."""

import multiprocessing
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from comera.errors import ConfigError
from comera.trainer.checkpoint import checkpoints
from comera.trainer.loop import fit

from ..unit.trainer.test_loop import CONFIG, Tiny
from .children import settle
from .models import IDS, bert, losses, optimizer_of, step, twin

Record = Callable[[str, object], None]


def often(some: int, many: int) -> pytest.MarkDecorator:
    """`tries`: some in `make test`, many in `make faults`."""
    return pytest.mark.parametrize("tries", [some, pytest.param(many, marks=pytest.mark.faults)])


@often(30, 600)
def test_inference_in_many_threads_while_one_trains(tries: int, record_property: Record) -> None:
    frozen, trained = bert().eval(), bert()
    exact, wrong, stop = frozen(IDS).logits.detach(), [], threading.Event()
    counts = [0] * 4

    def infer(number: int) -> None:
        while counts[number] < tries and not stop.is_set():
            rows = slice(number, number + 1)
            with torch.no_grad():
                found = frozen(IDS[rows]).logits
            if not torch.allclose(found, exact[rows], rtol=1e-4, atol=1e-5):
                wrong.append(f"thread {number}: {float((found - exact[rows]).abs().max()):.1e} off")
            counts[number] += 1

    def read() -> None:
        """Of the model that is trained: only that it goes on."""
        while not stop.is_set():
            with torch.no_grad():
                if not trained(IDS).logits.isfinite().all():
                    wrong.append("the model that is trained: not finite")

    optimizer = optimizer_of(trained)
    alone, theirs = twin(trained, optimizer)
    expected = losses(alone, theirs, tries)
    threads = [threading.Thread(target=infer, args=(k,)) for k in range(4)]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    try:
        found = losses(trained, optimizer, tries)
        for thread in threads:
            thread.join()
    finally:
        stop.set()
        reader.join()
    wrong += [
        f"step {k}: loss {a} instead of {b}" for k, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b
    ]
    settle(record_property, "threads: inference in five, training in one", sum(counts) + tries, wrong)


class Rows(Dataset[Tensor]):
    """Computed by a fused model, in the workers."""

    def __init__(self, count: int) -> None:
        self.model, self.count = bert().eval(), count

    def __len__(self) -> int:
        return self.count

    @torch.no_grad()
    def __getitem__(self, k: int) -> Tensor:
        return self.model(IDS[k % 4 : k % 4 + 1]).logits


@often(8, 200)
def test_data_loader_workers_that_are_forked_after_kernels_ran(tries: int, record_property: Record) -> None:
    data = Rows(tries)
    exact = data.model(IDS).logits.detach()  # kernels of this process ran
    model = bert()
    step(model, optimizer_of(model))
    workers = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP does not survive a fork; that is so for torch's own operations, too
    try:
        context = multiprocessing.get_context("fork")
        loader = DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=60)
        wrong = [
            f"row {k}"
            for k, found in enumerate(loader)
            if not torch.allclose(found, exact[k % 4 : k % 4 + 1], rtol=1e-4, atol=1e-5)
        ]
    finally:
        torch.set_num_threads(workers)
    settle(record_property, "fork: a model in workers of a data loader", tries, wrong)


@often(25, 1000)
def test_ctrl_c_at_random_moments_of_a_fused_step(tries: int, record_property: Record) -> None:
    model = bert()
    optimizer = optimizer_of(model)
    for _ in range(3):
        step(model, optimizer)
    began = time.perf_counter()
    step(model, optimizer)
    length = time.perf_counter() - began
    rng, wrong, interrupted = random.Random(0), [], 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for k in range(tries):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, length))
                step(model, optimizer)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                # torch's optimizers switch gradients off in Python: an interrupt inside of that leaves them off, also
                # those of a dense model
                torch.set_grad_enabled(True)
            alone, theirs = twin(model, optimizer)
            found, expected = losses(model, optimizer, 2), losses(alone, theirs, 2)
            if found != expected:
                wrong.append(f"interrupt {k}: then losses of {found} instead of {expected}")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert interrupted > tries // 3
    settle(record_property, "signals: Ctrl-C inside of a fused step", interrupted, wrong)


class Slow(Tiny):
    """Trains long enough for another process to begin meanwhile."""

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        time.sleep(0.05)
        return super().train_batch(step, micro, rank, world)


def _run(out: Path, results: Any) -> None:
    try:
        fit(Slow(), replace(CONFIG, steps=4), out, resume=True)
        results.put("trained")
    except ConfigError as error:
        results.put("refused" if "no other run writes to" in str(error) else str(error))
    except BaseException as error:
        results.put(repr(error))


@often(2, 20)
def test_two_processes_in_one_run_folder(tmp_path: Path, tries: int, record_property: Record) -> None:
    context = multiprocessing.get_context("fork")
    wrong = []
    for k in range(tries):
        out, results = tmp_path / f"run-{k}", context.Queue()
        processes = [context.Process(target=_run, args=(out, results)) for _ in range(2)]
        for process in processes:
            process.start()
        came = [results.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
        if "trained" not in came or not set(came) <= {"trained", "refused"}:
            wrong.append(f"{k}: {came}")
        elif [path.name for path in checkpoints(out)][-1:] != ["step-00000004"]:
            wrong.append(f"{k}: checkpoints {checkpoints(out)}")
    settle(record_property, "two processes in one run folder", tries, wrong)
