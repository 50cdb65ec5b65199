"""Graphs of steps: when they are captured, replayed, dropped and refused. The recorder works on any device."""

import random
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from comera.errors import DataError
from comera.graphs.cuda import CudaRecorder
from comera.graphs.graphed import PATIENCE, GraphedStep, RecordingError, map_tensors
from comera.recipes.data.prepared import ExampleBatch

from ...helpers.tape import TapeRecorder

WARM_UPS = CudaRecorder.warm_ups


class Counter:
    """A step that adds up its batches in `total`, and gives back their sum."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.calls = 0

    def __call__(self, batches: Any) -> tuple[Tensor]:
        self.calls += 1
        found: list[Tensor] = []
        map_tensors(lambda t: found.append(t) or t, batches)
        total = torch.stack([t.sum().float() for t in found]).sum()
        self.total += total
        return (total,)

    def picture(self) -> Any:
        address = self.total.data_ptr()
        return lambda: "" if self.total.data_ptr() == address else "total"

    def keep(self) -> Callable[[], None]:
        return partial(setattr, self, "total", self.total)


def graphed(step: Counter, recorder: TapeRecorder | None = None, **options: Any) -> GraphedStep:
    return GraphedStep(step, recorder or TapeRecorder(), step.picture, step.keep, **options)


def test_a_shape_warms_up_is_captured_and_replayed() -> None:
    step, recorder = Counter(), TapeRecorder()
    run = graphed(step, recorder)
    results = [run([torch.full((3,), float(k))])[0] for k in range(6)]
    assert [r.item() for r in results] == [0, 3, 6, 9, 12, 15]  # copies: a later replay does not overwrite them
    assert step.total.item() == 45
    assert (recorder.eager, recorder.watched, recorder.captures, recorder.replays) == (WARM_UPS, 1, 1, 4)
    assert step.calls == WARM_UPS + 1  # from then on no Python runs
    assert (run.reason, run.captures, run.crowded) == ("", 1, False)


def test_every_shape_and_number_of_micro_batches_has_a_graph() -> None:
    step, recorder = Counter(), TapeRecorder()
    run = graphed(step, recorder)
    visits = [[torch.ones(2)], [torch.ones(4)], [torch.ones(2), torch.ones(4)], [torch.ones(4), torch.ones(2)]]
    for _ in range(WARM_UPS + 2):
        for batches in visits:
            assert run(batches)[0].item() == sum(b.numel() for b in batches)
    assert (recorder.captures, recorder.replays) == (4, 8)


def test_the_shape_that_was_not_used_for_longest_is_forgotten() -> None:
    recorder = TapeRecorder()
    run = graphed(Counter(), recorder, limit=2)
    for size in (1, 1, 1, 2, 2, 2):
        run([torch.ones(size)])
    assert not run.crowded
    run([torch.ones(1)])
    run([torch.ones(3)])  # 2 goes
    assert run.crowded
    before = recorder.replays
    run([torch.ones(1)])
    assert recorder.replays == before + 1
    run([torch.ones(2)])
    assert (recorder.replays, recorder.eager) == (before + 1, 2 * WARM_UPS + 2)


class Named(NamedTuple):
    x: Any
    label: Any = None


IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("came", "message"),
    [
        (Named(IDS.int()), r"batch.x: torch.int64, 2-dimensional, on cpu, got torch.int32, 2-dimensional, on cpu"),
        (Named(IDS[0]), r"batch.x: torch.int64, 2-dimensional, on cpu, got torch.int64, 1-dimensional"),
        (
            Named(IDS.to("meta")),
            r"batch.x: torch.int64, 2-dimensional, on cpu, got torch.int64, 2-dimensional, on meta",
        ),
        (Named(IDS, IDS), r"batch.label: NoneType, got torch.int64"),
        (Named([IDS]), r"batch.x: torch.int64, 2-dimensional, on cpu, got nothing"),
        ({"x": IDS}, r"got nothing: make batches that differ only in sizes, or train in mode eager"),
    ],
)
@pytest.mark.parametrize("visits", [1, WARM_UPS + 2])
def test_batches_of_another_form_are_refused(came: Any, message: str, visits: int) -> None:
    run = graphed(Counter())
    for _ in range(visits):
        run([Named(IDS)])
    with pytest.raises(DataError, match=message):
        run([came])
    run([Named(IDS[:, :1])])  # another size is none


def test_a_micro_batch_of_another_form_is_refused_too() -> None:
    with pytest.raises(DataError, match=r"batch.x: torch.int64"):
        graphed(Counter())([Named(IDS), Named(IDS.int())])


def test_values_that_are_no_tensors_belong_to_the_shape() -> None:
    recorder = TapeRecorder()
    step = Counter()
    scaled = GraphedStep(lambda batches: (batches[0].x.sum() * batches[0].label,), recorder, step.picture, step.keep)
    for factor in (2, 3, 2, 3, 2, 3, 2, 3):
        assert scaled([Named(torch.ones(2), factor)])[0].item() == 2 * factor
    assert recorder.captures == 2


def test_a_batch_that_no_graph_can_hold_runs_eager() -> None:
    run = graphed(Counter())
    assert run([Named(torch.ones(2), object())])[0].item() == 2
    assert run.reason == "graphs support tensors and plain values, but batch.label is of type object"


def test_a_change_of_what_graphs_stand_on_drops_them() -> None:
    step, recorder = Counter(), TapeRecorder()
    run = graphed(step, recorder)
    for _ in range(4):
        run([torch.ones(2)])
    step.total = step.total.clone()  # what pruning does to parameters
    for _ in range(4):
        run([torch.ones(2)])
    assert step.total.item() == 16
    assert (recorder.eager, recorder.captures) == (2 * WARM_UPS, 2)


def test_an_eager_step_that_replaces_what_graphs_stand_on_drops_them_too() -> None:
    step, recorder = Counter(), TapeRecorder()

    def replacing(batches: Any) -> tuple[Tensor]:
        if batches[0].numel() == 5:
            step.total = step.total.clone()
        return step(batches)

    run = GraphedStep(replacing, recorder, step.picture, step.keep)
    for size in (2, 2, 2, 5, 2, 2, 2):
        run([torch.ones(size)])
    assert step.total.item() == 17
    assert (recorder.captures, run.reason) == (2, "")


def test_what_a_watched_step_finds_ends_graphs_for_good() -> None:
    step, recorder = Counter(), TapeRecorder(reason="the host synchronizes with the device at model.py:7")
    run = graphed(step, recorder)
    for _ in range(5):
        run([torch.ones(2)])
    assert run.reason == "the host synchronizes with the device at model.py:7"
    assert (step.total.item(), step.calls, recorder.captures) == (10, 5, 0)


def test_a_failed_capture_costs_no_step() -> None:
    step = Counter()

    def reading(batches: Any) -> tuple[Tensor]:
        (total,) = step(batches)
        return (total * float(total),)

    run = GraphedStep(reading, TapeRecorder(), step.picture, step.keep)
    assert [run([torch.ones(2)])[0].item() for _ in range(4)] == [4] * 4
    assert run.reason == "capture failed: aten._local_scalar_dense.default synchronizes with the device"
    assert step.total.item() == 8


def test_a_step_that_puts_new_tensors_in_the_place_of_old_ones_is_not_replayed() -> None:
    step = Counter()

    def replacing(batches: Any) -> tuple[Tensor]:
        result = step(batches)
        step.total = step.total + 1
        return result

    run = GraphedStep(replacing, TapeRecorder(), step.picture, step.keep)
    for _ in range(PATIENCE):
        run([torch.ones(2)])
    assert (run.reason, run.captures) == ("total changes from step to step", 0)
    assert step.total.item() == 3 * PATIENCE


def test_a_capture_that_puts_a_new_tensor_in_place_is_undone() -> None:
    step, recorder = Counter(), TapeRecorder()

    def replacing(batches: Any) -> tuple[Tensor]:
        result = step(batches)
        if recorder.eager == WARM_UPS and step.calls == WARM_UPS + 1:  # what no watched step has done
            step.total = step.total + 1
        return result

    run = GraphedStep(replacing, recorder, step.picture, step.keep)
    for _ in range(3 * WARM_UPS):
        run([torch.ones(2)])
    assert (run.reason, run.captures) == ("", 1)
    assert step.total.item() == 6 * WARM_UPS  # the one that the capture had put there is gone


@dataclass(frozen=True)
class Data:
    ids: Tensor
    parts: list[Tensor]
    name: str = "a"


PAIRS = ExampleBatch(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), torch.ones(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: (x, {"y": x, "n": 3}),
        lambda x: Data(x, [x, x + 1]),
        lambda x: PAIRS._replace(input_ids=x),
        lambda x: UserDict(z=x, a=[None, x]),
    ],
)
def test_batches_of_any_structure_reach_the_graph(make: Callable[[Tensor], Any]) -> None:
    step, eager, recorder = Counter(), Counter(), TapeRecorder()
    run = graphed(step, recorder)
    for k in range(5):
        batch = make(torch.full((2, 3), float(k)))
        assert run([batch])[0].item() == eager([batch])[0].item()
    assert recorder.replays == 5 - WARM_UPS
    assert type(map_tensors(torch.clone, batch)) is type(batch)


def test_the_order_of_keys_does_not_matter() -> None:
    step, recorder = Counter(), TapeRecorder()
    run = GraphedStep(lambda batches: (batches[0]["a"] - batches[0]["b"],), recorder, step.picture, step.keep)
    for k in range(6):
        a, b = torch.tensor(5.0 + k), torch.tensor(3.0)
        assert run([{"a": a, "b": b} if k % 2 else {"b": b, "a": a}])[0].item() == 2 + k
    assert recorder.replays == 6 - WARM_UPS


class FakeCuda:
    """The parts of torch.cuda that a recorder calls, writing down the order in which it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "main"
        self.sync_mode = 0
        self.fails = False
        fakes = {
            "Stream": lambda device: self.stream("aside"),
            "current_stream": lambda device=None: self.stream(self.current),
            "stream": self.on,
            "graph_pool_handle": lambda: self.calls.append("new pool") or self.pool,
            "CUDAGraph": type("Graph", (), {"replay": lambda graph: self.calls.append("replay")}),
            "graph": self.graph,
            "default_generators": [self],
            "memory_snapshot": self.snapshot,
            "get_sync_debug_mode": lambda: self.sync_mode,
            "set_sync_debug_mode": lambda mode: setattr(self, "sync_mode", mode),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(f"torch.cuda.{name}", fake)
        monkeypatch.setattr("torch.Generator", lambda device: self)
        monkeypatch.setattr("torch._C._cuda_endAllocateToPool", self.end_pool, raising=False)
        self.recorder = CudaRecorder(torch.device("cuda"))
        self.pool = (0, 1)
        self.alive: list[Tensor] = []  # tensors in the pool
        self.others = [torch.ones(5)]

    def stream(self, name: str) -> Any:
        waits = lambda other: self.calls.append(f"{name} waits for {other.name}")  # noqa: E731
        return SimpleNamespace(name=name, device_index=0, wait_stream=waits)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (stream.name, pool is not None) == ("aside", True)
        yield
        if self.fails:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nfor debugging ...")
        self.calls.append("captured")

    def capture(self, step: Callable[[], Any]) -> Callable[[], Any]:
        picture: Any = None
        return self.recorder.capture(step, picture)

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"address": t.data_ptr(), "state": "active_allocated"} for t in self.alive]
        others = [{"address": t.data_ptr(), "state": "active_allocated"} for t in self.others]
        freed = {"address": 1, "state": "inactive"}
        return [
            {"segment_pool_id": self.pool, "blocks": [*blocks, freed]},
            {"segment_pool_id": (0, 0), "blocks": others},
        ]

    def end_pool(self, index: int, pool: Any) -> None:
        self.calls.append("end of pool")
        raise RuntimeError("not recording to it")

    def get_state(self) -> str:
        return "state"

    def set_state(self, state: str) -> None:
        self.calls.append(f"set {state}")

    def graphsafe_get_state(self) -> str:
        return "fresh"

    def graphsafe_set_state(self, state: str) -> None:
        self.calls.append(f"set {state}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_steps_warm_up_aside_in_the_order_of_the_rest(cuda: FakeCuda) -> None:
    assert cuda.recorder.warm_up(lambda: cuda.current, watch=False) == ("aside", "")
    assert (cuda.calls, cuda.current) == (["aside waits for main", "main waits for aside"], "main")


def test_waits_of_the_host_and_its_random_numbers_are_found(cuda: FakeCuda) -> None:
    def warns(*messages: str) -> None:
        assert cuda.sync_mode == "warn"
        for message in messages:
            warnings.warn(message, stacklevel=1)

    sync = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"
    prototype = "Synchronization debug mode is a prototype feature and does not detect all synchronizing operations"
    watch = partial(cuda.recorder.warm_up, watch=True)
    assert watch(lambda: warns()) == (None, "")
    assert watch(lambda: warns(prototype)) == (None, "")
    found = watch(lambda: warns(prototype, sync))[1]
    assert found.startswith("the host synchronizes with the device at ")
    assert "test_cuda.py:" in found
    assert watch(lambda: torch.rand(1).shape)[1] == "the step draws random numbers on the host"
    assert watch(lambda: random.random() < 2)[1] == "the step draws random numbers on the host"
    with pytest.warns(UserWarning, match="mine"):
        assert watch(lambda: warns("mine"))[1] == ""
    assert cuda.sync_mode == 0


def test_graphs_share_a_pool_as_long_as_one_lives(cuda: FakeCuda) -> None:
    first = cuda.capture(lambda: "first")
    second = cuda.capture(lambda: "second")
    assert (first(), second()) == ("first", "second")
    assert [call for call in cuda.calls if "waits" not in call] == [
        "new pool",
        "captured",
        "captured",
        "replay",
        "replay",
    ]
    del first, second
    cuda.capture(lambda: "third")
    assert cuda.calls.count("new pool") == 2


def test_after_a_broken_capture_allocator_and_random_numbers_are_put_right(cuda: FakeCuda) -> None:
    cuda.fails = True
    with pytest.raises(RecordingError, match=r"capture failed: .* not permitted when stream is capturing$"):
        cuda.capture(lambda: None)
    assert cuda.calls[-3:] == ["end of pool", "set state", "set fresh"]
    assert cuda.current == "main"


def test_a_tensor_that_a_capture_leaves_in_the_pool_is_refused(cuda: FakeCuda) -> None:
    """The next graph would write to it; results, and those of other graphs, are known."""

    def step(*kept: Tensor) -> Callable[[], Any]:
        result = {"loss": torch.ones(3)}

        def run() -> Any:
            cuda.alive += [result["loss"], *kept]
            cuda.others.append(torch.ones(7))  # of another thread
            return result

        return run

    replays = [cuda.capture(step()) for _ in range(2)]
    assert [replay()["loss"].sum() for replay in replays] == [3, 3]
    with pytest.raises(RecordingError, match=r"a tensor of shape \(2,\) that the step makes outlives it") as refused:
        cuda.capture(step(torch.ones(2)))
    assert refused.value.again
