"""TrainStep in mode graph: N steps from graphs are N eager steps, to the bit. Graphs are tapes here, on the CPU."""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.contrib.projected import AdaRankGrad
from comera.errors import DataError
from comera.graphs.graphed import GraphedStep
from comera.nn.linear import TTLinear
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.optimizer import lr_multiplier
from comera.trainer.step import StepResult, TrainStep
from comera.tt.spec import TTSpec

from ...helpers.tape import TapeRecorder

VOCABULARY, BATCH, LENGTHS, STEPS = 13, 4, (5, 7, 9), 60
EARLY = EarlyStage(size_weight=0.1)
RATES = {"cores": 1e-2, "ranks": 5e-2, "dense": 1e-2, "dense_no_decay": 1e-2}


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the CPU's kernels: the norm of a gradient is made by one in eager steps alone."""
    monkeypatch.setenv("COMERA_KERNELS", "none")


def make_model(dropout: float = 0.2) -> nn.Sequential:
    torch.manual_seed(3)
    middle = TTLinear(TTSpec(8, 12, (2, 2, 2), (3, 2, 2), (1, 2, 4, 6, 4, 2, 1)))
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(12, VOCABULARY))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def batches_of(step: int, accumulation: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    length = LENGTHS[step % len(LENGTHS)]
    return [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for _ in range(accumulation)]


@dataclass
class Run:
    """Both sides of a comparison start from one of these."""

    step: TrainStep
    controller: RankController
    results: list[StepResult]

    @classmethod
    def make(
        cls, mode: str, recorder: TapeRecorder | None = None, late: LateStage | None = None, **options: Any
    ) -> "Run":
        model = make_model()
        groups = param_groups(model, lr=1e-2, rank_lr=5e-2, weight_decay=0.01)
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)
        controller = RankController(model, EARLY, late or LateStage()).attach(optimizer)
        options = {"loss": loss_of, "max_grad_norm": 0.5, "controller": controller, "recorder": recorder, **options}
        torch.manual_seed(0)
        return cls(TrainStep(model, optimizer=optimizer, mode=mode, **options), controller, [])

    def take(self, count: int, *, every: int = 0, then: Callable[["Run"], object] | None = None) -> "Run":
        for _ in range(count):
            k = len(self.results)
            multiplier = lr_multiplier((k + 0.5) / STEPS, warmup=0.2, schedule="cosine", final=0.1)
            rates = [RATES[group["name"]] * multiplier for group in self.step.optimizer.param_groups]
            self.step.set_rates(torch.tensor(rates).tolist())  # what float32 holds, as in tensors on the device
            weights = torch.tensor([1.0 + k % 4, 2.0], dtype=torch.float64)
            self.results.append(self.step(batches_of(k), weights))
            if every and then and (k + 1) % every == 0:
                then(self)
        return self

    def state(self) -> list[Tensor]:
        step = self.step
        moments = [v for p in step.parameters for _, v in sorted(step.optimizer.state[p].items())]
        return [*step.parameters, *moments, *(value for result in self.results for value in result)]


def assert_same(a: Run, b: Run) -> None:
    for ours, theirs in zip(a.state(), b.state(), strict=True):
        assert torch.equal(ours, theirs)
    assert a.controller.state_dict() == b.controller.state_dict()


def prune(run: Run) -> None:
    run.controller.prune_()


STAGES = {
    "early": None,
    "surrogate": LateStage(target_size=0.4, start_step=20, shrink="surrogate"),
    "sensitivity": LateStage(target_size=0.4, start_step=20, steps=20),
}


@pytest.mark.parametrize("stages", STAGES)
def test_graphed_steps_are_eager_steps(stages: str) -> None:
    """Through schedule, accumulation, weights, clipping, dropout, three lengths, both stages and cuts."""
    recorder = TapeRecorder()
    eager = Run.make("eager", late=STAGES[stages]).take(STEPS, every=15, then=prune)
    graph = Run.make("graph", recorder, late=STAGES[stages]).take(STEPS, every=15, then=prune)
    assert_same(eager, graph)
    assert graph.step.mode == "graph"
    assert recorder.eager + recorder.replays == STEPS
    assert recorder.captures == graph.step.built >= 2 * len(LENGTHS)  # anew after what has shrunk
    assert recorder.replays >= STEPS // 2
    assert graph.controller.stage == ("early" if stages == "early" else "late")
    before, after = (sum(p.numel() for p in run.step.parameters) for run in (Run.make("eager"), graph))
    assert after < before


def test_a_switch_that_changes_no_memory_is_captured_anew() -> None:
    late = LateStage(target_size=0.4, start_step=20, shrink="surrogate")
    recorder = TapeRecorder()
    assert_same(Run.make("eager", late=late).take(36), Run.make("graph", recorder, late=late).take(36))
    assert recorder.captures == 2 * len(LENGTHS)


def test_a_loaded_optimizer_state_and_controller_go_on_exactly() -> None:
    def reload(run: Run) -> None:
        run.step.optimizer.load_state_dict(copy.deepcopy(run.step.optimizer.state_dict()))
        run.controller.load_state_dict(run.controller.state_dict())

    recorder = TapeRecorder()
    eager = Run.make("eager").take(30, every=15, then=reload)
    graph = Run.make("graph", recorder).take(30, every=15, then=reload)
    assert_same(eager, graph)
    assert recorder.captures == 2 * len(LENGTHS)


def test_the_mode_of_the_model_is_not_frozen_in_a_graph() -> None:
    def switch(run: Run) -> None:
        run.step.model.train(not run.step.model.training)

    eager = Run.make("eager").take(36, every=9, then=switch)
    assert_same(eager, Run.make("graph", TapeRecorder()).take(36, every=9, then=switch))


def test_bf16_autocast_is_part_of_the_graph() -> None:
    recorder = TapeRecorder()
    eager, graph = (Run.make(mode, r, precision="bf16").take(15) for mode, r in (("eager", None), ("graph", recorder)))
    assert_same(eager, graph)
    assert recorder.replays


def test_learning_rates_live_in_tensors_and_gradients_do_not_stay() -> None:
    run = Run.make("graph", TapeRecorder()).take(3)
    groups = run.step.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    run.take(9)
    assert all(isinstance(rate, Tensor) and rate.dtype == torch.float32 for rate in rates)
    assert all(group["lr"] is rate and group["capturable"] for group, rate in zip(groups, rates, strict=True))
    assert all(p.grad is None for p in run.step.parameters)


def test_results_stay_as_they_were_when_later_steps_are_replayed() -> None:
    run = Run.make("graph", TapeRecorder()).take(12)
    seen = [(result.loss.item(), result.grad_norm.item()) for result in run.results]
    run.take(6)
    assert [(result.loss.item(), result.grad_norm.item()) for result in run.results[:12]] == seen


def test_a_failed_capture_goes_on_eager_with_the_same_numbers() -> None:
    def reading(model: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        return loss * 2 if loss.item() > 100 else loss

    late = LateStage(target_size=0.4, start_step=10, steps=10)
    graph = Run.make("graph", TapeRecorder(), late=late, loss=reading).take(40)
    assert_same(Run.make("eager", late=late).take(40), graph)
    assert graph.step.mode == "eager (capture failed: aten._local_scalar_dense.default synchronizes with the device)"
    assert graph.step.built == 0


def test_an_optimizer_that_replaces_its_state_goes_on_eager_with_the_same_numbers() -> None:
    def replace(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p, state in optimizer.state.items():
            state["exp_avg"] = state["exp_avg"] * 1
            p.data = p.data * 1

    runs = [Run.make("eager"), Run.make("graph", TapeRecorder())]
    for run in runs:
        run.step.optimizer.register_step_post_hook(replace)
        torch.manual_seed(0)
        run.take(15)
    assert_same(*runs)
    assert runs[1].step.mode == "eager (optimizer.state.exp_avg changes from step to step)"


def test_what_a_warm_up_finds_is_told() -> None:
    graph = Run.make("graph", TapeRecorder(reason="the host synchronizes with the device at m.py:3"))
    assert graph.take(1).step.mode == "graph"
    assert graph.take(8).step.mode == "eager (the host synchronizes with the device at m.py:3)"
    assert_same(Run.make("eager").take(9), graph)


def test_more_shapes_than_are_remembered_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.trainer.step.GraphedStep", partial(GraphedStep, limit=2))
    graph = Run.make("graph", TapeRecorder()).take(9)
    assert graph.step.mode.startswith("graph (too many shapes of batches")


def test_batches_of_another_dtype_are_refused() -> None:
    run = Run.make("graph", TapeRecorder()).take(9)
    before = run.controller.state_dict()
    with pytest.raises(DataError, match=r"captured for, batch: torch.int64.*got torch.int32"):
        run.step([batch.int() for batch in batches_of(0)])
    assert run.controller.state_dict() == before
    assert_same(Run.make("eager").take(9), run)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


NOT_CAPTURED = "step over matrices is not captured: use mode eager or compile, or train.optimizer adamw"


def projected(model: nn.Module) -> torch.optim.Optimizer:
    return AdaRankGrad(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "options", "reason"),
    [
        (sgd, {}, "SGD has no capturable form"),
        (projected, {}, f"AdaRankGrad's {NOT_CAPTURED}"),
        (adamw, {"average": lambda flat: flat}, "gradients are averaged over several processes, which is not captured"),
    ],
)
def test_what_cannot_be_captured_runs_eager_and_says_why(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], options: dict[str, Any], reason: str
) -> None:
    models = [make_model(), make_model()]
    steps = [
        TrainStep(models[0], loss_of, optimizer(models[0])),
        TrainStep(models[1], loss_of, optimizer(models[1]), mode="graph", **{"recorder": TapeRecorder(), **options}),
    ]
    assert [step.mode for step in steps] == ["eager", f"eager ({reason})"]
    for step in steps:
        torch.manual_seed(0)
        step.set_rates([0.05])
        for k in range(5):
            step(batches_of(k))
    assert steps[1].optimizer.param_groups[0]["lr"] == 0.05
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_model_on_several_devices_runs_eager() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    step = TrainStep(model, loss_of, adamw(model), mode="graph", recorder=TapeRecorder())
    assert step.mode == "eager (a graph holds one device, the model is on several)"


def test_an_optimizer_that_has_stepped_already_is_made_capturable() -> None:
    runs = [make_model(0.0), make_model(0.0)]
    for model, mode in zip(runs, ("eager", "graph"), strict=True):
        optimizer = adamw(model)
        TrainStep(model, loss_of, optimizer)(batches_of(0))
        step = TrainStep(model, loss_of, optimizer, mode=mode, recorder=TapeRecorder())  # type: ignore[arg-type]
        step.set_rates([0.0625])
        for k in range(9):
            step(batches_of(k))
    for ours, theirs in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_controller_goes_from_a_graphed_step_back_to_an_eager_one() -> None:
    """Who counts the steps and begins the stage is the one who steps."""
    late = LateStage(target_size=0.4, start_step=12, shrink="surrogate")
    eager = Run.make("eager", late=late).take(20)
    graph = Run.make("graph", TapeRecorder(), late=late).take(10)
    assert graph.controller.replayed
    step = graph.step
    graph.step = TrainStep(step.model, loss_of, step.optimizer, max_grad_norm=0.5, controller=graph.controller)
    assert not graph.controller.replayed
    assert_same(eager, graph.take(10))
    assert graph.controller.stage == "late"


class Scaled(nn.Module):
    """A layer that caches a function of its weight by the version of that, where no picture looks."""

    cached: ClassVar[deque[tuple[nn.Module, int, Tensor]]] = deque(maxlen=1)

    def __init__(self, *, caches: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.caches = caches

    def forward(self, input: Tensor) -> Tensor:
        owner, version, square = self.cached[0] if self.cached else (None, -1, self.weight)
        if not self.caches or owner is not self or version != self.weight._version:
            square = self.weight.detach().square()
            self.cached.append((self, self.weight._version, square))
        return input * self.weight * square


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_cached_by_version_is_computed_anew_in_captures_and_after_replays(fails: bool) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        return loss * 2 if fails and loss.item() > 100 else loss

    outputs = []
    recorder = TapeRecorder()
    for model, mode in ((Scaled(caches=False), "eager"), (Scaled(), "graph")):
        step = TrainStep(model, loss, adamw(model), mode=mode, recorder=recorder)  # type: ignore[arg-type]
        seen = []
        for k in range(6):
            seen.append(step([torch.full((2, 3), 1.0 + k)]).loss)
            with torch.no_grad():
                seen.append(model(torch.ones(3)))  # an evaluation between two steps fills the cache
        outputs.append(seen)
    assert [torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True)] == [True] * 12
    assert recorder.replays == (0 if fails else 3)  # the first of three warm-ups makes the state of the optimizer


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_each_step_gives_what_it_writes_a_new_version(mode: str) -> None:
    model = make_model(0.0)
    step = TrainStep(model, loss_of, adamw(model), mode=mode, recorder=TapeRecorder())  # type: ignore[arg-type]
    step(batches_of(0))
    state = [value for values in step.optimizer.state.values() for value in values.values()]
    # nothing caches by the versions of the optimizer's state, so an eager step leaves them to the optimizer
    written = [*model.parameters(), *(state if mode == "graph" else [])]
    for _ in range(6):
        before = [tensor._version for tensor in written]
        step(batches_of(0))
        assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))
