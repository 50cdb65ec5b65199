"""fit() with what a task and a configuration choose of the step: its mode, its optimizer, what follows it."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comera.errors import CheckpointError, ConfigError
from comera.files import write_sums
from comera.rank.objective import EarlyStage, LateStage
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.step import TrainStep

from ...helpers.run_folders import records
from ...helpers.tape import TapeRecorder
from ...helpers.toy_task import BATCH, NextToken

CONFIG = TrainConfig(
    steps=30,
    batch_size=BATCH,
    accumulation=2,
    lr=2**-6,  # exact in float32 too, so that rates in tensors are the same
    rates="flat",
    rank_lr=2**-4,
    schedule="constant",
    warmup=0.0,
    early=EarlyStage(size_weight=0.2),
    late=LateStage(target_size=0.3, start_step=12, steps=10),
    prune_every=9,
    eval_every=10,
    save_every=6,
    log_every=1,
    progress=False,
    device="cpu",
    threads=1,
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the CPU's kernels: the norm of a gradient is made by one in eager steps alone."""
    monkeypatch.setenv("COMERA_KERNELS", "none")


class Tiny(NextToken):
    """In batches of two lengths."""

    def size(self, step: int) -> tuple[int, int]:
        return BATCH, (5, 7)[step % 2]


def learned(run: Path) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in records(run, "train")]


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """fit() finds a recorder of graphs that works on the CPU."""
    recorder = TapeRecorder()
    monkeypatch.setattr("comera.trainer.state.TrainStep", partial(TrainStep, recorder=recorder))
    return recorder


def test_a_run_from_graphs_is_the_eager_run_and_resumes_as_such(tmp_path: Path, tapes: TapeRecorder) -> None:
    eager = fit(Tiny(), CONFIG, tmp_path / "eager")
    assert (tapes.eager, eager.mode, records(tmp_path / "eager", "mode")) == (0, "eager", [])

    graph = replace(CONFIG, mode="graph")
    summary = fit(Tiny(), graph, tmp_path / "graph")
    assert learned(tmp_path / "graph") == learned(tmp_path / "eager")
    assert (summary.mode, summary.held_out_loss, summary.parameters) == ("graph", eager.held_out_loss, eager.parameters)
    assert tapes.replays > 10
    logged = records(tmp_path / "graph", "mode")
    assert {line["mode"] for line in logged} == {"graph"}
    assert [line["built"] for line in logged] == list(range(tapes.captures + 1))

    assert fit(Tiny(stop=16), graph, tmp_path / "halves").stopped == "interrupted"
    assert fit(Tiny(), graph, tmp_path / "halves", resume=True).mode == "graph"
    assert learned(tmp_path / "halves") == learned(tmp_path / "eager")


def test_the_mode_may_change_where_a_run_goes_on(tmp_path: Path, tapes: TapeRecorder) -> None:
    fit(Tiny(), CONFIG, tmp_path / "eager")
    assert fit(Tiny(stop=16), replace(CONFIG, mode="graph"), tmp_path / "both").mode == "graph"
    assert fit(Tiny(), CONFIG, tmp_path / "both", resume=True).mode == "eager"
    assert learned(tmp_path / "both") == learned(tmp_path / "eager")
    assert records(tmp_path / "both", "mode")[-1] | {"time": 0} == {
        "kind": "mode",
        "step": 18,
        "time": 0,
        "mode": "eager",
        "built": 0,
    }


def test_recordings_on_a_cpu_resume_to_the_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(CONFIG, mode="graph", progress=True)
    summary = fit(Tiny(), config, tmp_path / "whole")
    assert summary.mode == "graph"
    assert [line["mode"] for line in records(tmp_path / "whole", "mode")][-1] == "graph"
    assert "mode graph" in capsys.readouterr().err
    fit(Tiny(stop=16), config, tmp_path / "both")
    assert fit(Tiny(), config, tmp_path / "both", resume=True).mode == "graph"
    assert learned(tmp_path / "both") == learned(tmp_path / "whole")
    fit(Tiny(), CONFIG, tmp_path / "eager")
    assert learned(tmp_path / "both") == learned(tmp_path / "eager")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch.compile's own
def test_a_compiled_run_tells_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comera.trainer.state.TrainStep", partial(TrainStep, backend="eager"))
    config = replace(CONFIG, steps=5, late=LateStage(), mode="compile", eval_every=0)
    assert fit(Tiny(compressed=False), config, tmp_path).mode == "compile"
    assert [(line["step"], line["built"]) for line in records(tmp_path, "mode")] == [(1, 1), (2, 2)]


class Momentum(Tiny):
    """Brings its own optimizer, whose groups have no names, and counts the steps that are over."""

    def __init__(self, **options: Any) -> None:
        super().__init__(compressed=False, **options)
        self.over: list[int] = []

    def optimizer(self, config: TrainConfig) -> torch.optim.Optimizer:
        weights, biases = ([p for p in self.model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": weights}, {"params": biases, "lr": 2 * config.lr, "name": "biases"}]
        return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)

    def after_step(self, step: int) -> None:
        self.over.append(step)


def test_a_task_may_bring_its_optimizer(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=8, schedule="linear", late=LateStage())
    fit(Momentum(), config, tmp_path / "whole")
    rates = [line["lr"] for line in records(tmp_path / "whole", "train")]
    left = [1 - (step + 0.5) / 8 for step in range(8)]
    peaks = {"group_0": config.lr, "biases": 2 * config.lr}
    assert rates == [{name: pytest.approx(peak * part) for name, peak in peaks.items()} for part in left]

    first, second = Momentum(stop=4), Momentum()
    fit(first, config, tmp_path / "halves")
    fit(second, config, tmp_path / "halves", resume=True)
    assert learned(tmp_path / "halves") == learned(tmp_path / "whole")
    assert (first.over, second.over) == ([1, 2, 3, 4, 5], [6, 7, 8])

    summary = fit(Momentum(), replace(config, mode="graph"), tmp_path / "graph")
    assert summary.mode == "graph"
    assert learned(tmp_path / "graph") == learned(tmp_path / "whole")


def test_a_run_goes_on_with_the_optimizer_it_was_begun_with(tmp_path: Path) -> None:
    config = replace(CONFIG, late=LateStage())
    fit(Momentum(stop=4), config, tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer: expected 'SGD', got 'adamw'"):
        fit(Tiny(compressed=False), config, tmp_path, resume=True)


class Projected(torch.optim.Optimizer):
    """Keeps a moment of the gradient's column sums: state that has not its parameter's shape."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                moment = state.setdefault("moment", torch.zeros(p.shape[-1]))
                state["count"] = state.get("count", 0) + 1
                moment.lerp_(p.grad.reshape(-1, p.shape[-1]).sum(0), 0.1)
                p.sub_(group["lr"] * (p.grad + moment))


class ByProjection(Tiny):
    def optimizer(self, config: TrainConfig) -> torch.optim.Optimizer:
        return Projected(self.model.parameters(), {"lr": config.lr})


def test_state_of_other_shapes_is_saved_and_checked(tmp_path: Path) -> None:
    config = replace(CONFIG, steps=8, late=LateStage())
    fit(ByProjection(compressed=False), config, tmp_path / "whole")
    fit(ByProjection(compressed=False, stop=4), config, tmp_path / "halves")
    fit(ByProjection(compressed=False), config, tmp_path / "halves", resume=True)
    assert learned(tmp_path / "halves") == learned(tmp_path / "whole")

    path = find_checkpoint(tmp_path / "halves") / "trainer.json"
    trainer = json.loads(path.read_text())
    assert trainer["other_shapes"]["0.weight:moment"] == [8]
    trainer["other_shapes"]["0.weight:moment"] = [9]
    path.write_text(json.dumps(trainer))
    write_sums(path.parent)
    (tmp_path / "halves" / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"expected state of shape \(9,\), got '0.weight:moment' of shape \(8,\)"):
        fit(ByProjection(compressed=False), config, tmp_path / "halves", resume=True)


def test_recomputation_is_turned_on_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[nn.Module] = []
    monkeypatch.setattr("comera.trainer.state.recompute_", asked.append)
    fit(Tiny(), replace(CONFIG, steps=1), tmp_path / "without")
    assert asked == []
    task = Tiny()
    fit(task, replace(CONFIG, steps=1, recompute=True), tmp_path / "with")
    assert asked == [task.model]


def test_modes_are_checked_and_do_not_decide_what_is_learned() -> None:
    with pytest.raises(ConfigError, match=r"train.mode must be one of eager, compile, graph, got 'fast'"):
        replace(CONFIG, mode="fast")  # type: ignore[arg-type]
    assert replace(CONFIG, mode="graph", recompute=True).identity() == CONFIG.identity()
