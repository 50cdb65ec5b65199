"""Whole steps as CUDA graphs, and compiled ones: the same as eager steps, on the device itself."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.errors import DataError
from comera.nn.linear import TTLinear
from comera.optim.param_groups import param_groups
from comera.rank.controller import RankController
from comera.rank.objective import EarlyStage, LateStage
from comera.recipes.bert import ModelConfig
from comera.recipes.code_lm.data import Batch, CodeDataConfig
from comera.recipes.code_lm.recipe import CodeLMConfig, CompressConfig, build_model, masked_loss
from comera.trainer.config import TrainConfig
from comera.trainer.loop import fit
from comera.trainer.optimizer import lr_multiplier
from comera.trainer.step import StepResult, TrainStep
from comera.trainer.task import Task
from comera.tt.spec import TTSpec

pytestmark = [
    pytest.mark.gpu,
    # what torch.compile itself does: it instantiates torch.autograd.Function for its bookkeeping, and scripts functions
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated"),
]

VOCABULARY, STEPS, LENGTHS = 13, 60, (5, 7, 9)
RATES = {"cores": 1e-2, "ranks": 5e-2, "dense": 1e-2, "dense_no_decay": 1e-2}
STAGES = {
    "early": LateStage(),
    "surrogate": LateStage(target_size=0.4, start_step=20, shrink="surrogate"),
    "sensitivity": LateStage(target_size=0.4, start_step=20, steps=20),
}


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def make_model(dropout: float = 0.2) -> nn.Sequential:
    """In float64: what the order of sums does to the last bit stays small over many steps."""
    torch.manual_seed(3)
    middle = TTLinear(TTSpec(8, 12, (2, 2, 2), (3, 2, 2), (1, 2, 4, 6, 4, 2, 1)))
    layers = [nn.Embedding(VOCABULARY, 8), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(12, VOCABULARY)]
    return nn.Sequential(*layers).to("cuda", torch.float64)


def make_step(mode: str, *, late: LateStage = STAGES["early"], loss: Any = loss_of, dropout: float = 0.2) -> TrainStep:
    model = make_model(dropout)
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, rank_lr=5e-2), betas=(0.9, 0.99), fused=True)
    controller = RankController(model, EarlyStage(size_weight=0.1), late).attach(optimizer)
    torch.manual_seed(0)
    return TrainStep(model, loss, optimizer, controller=controller, max_grad_norm=0.5, mode=mode)  # type: ignore[arg-type]


def batches_of(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    length = LENGTHS[step % len(LENGTHS)]
    return [torch.randint(VOCABULARY, (4, length), generator=generator).cuda() for _ in range(2)]


def take(step: TrainStep, count: int, *, prune_every: int = 0) -> list[StepResult]:
    results = []
    for k in range(count):
        multiplier = lr_multiplier((k + 0.5) / STEPS, warmup=0.2, schedule="cosine", final=0.1)
        rates = [RATES[group["name"]] * multiplier for group in step.optimizer.param_groups]
        step.set_rates(torch.tensor(rates).tolist())  # what float32 holds, as on the device
        results.append(step(batches_of(k)))
        if prune_every and (k + 1) % prune_every == 0:
            assert isinstance(step.controller, RankController)
            step.controller.prune_()
    return results


def assert_same(ours: TrainStep, theirs: TrainStep, results: list[StepResult], expected: list[StepResult]) -> None:
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(list(ours.parameters), list(theirs.parameters), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("stages", STAGES)
def test_graphed_steps_are_eager_steps(stages: str) -> None:
    """Through schedule, accumulation, clipping, dropout, three lengths, both stages and cuts."""
    eager, graph = (make_step(mode, late=STAGES[stages]) for mode in ("eager", "graph"))
    torch.manual_seed(0)
    expected = take(eager, STEPS, prune_every=15)
    torch.manual_seed(0)
    results = take(graph, STEPS, prune_every=15)
    assert graph.mode == "graph"
    assert graph.built >= 2 * len(LENGTHS)  # anew after what has shrunk
    assert_same(graph, eager, results, expected)


def test_dropout_draws_anew_in_each_replay() -> None:
    step = make_step("graph", dropout=0.5)
    step.set_rates([0.0] * 4)
    losses = [step(batches_of(0)).loss.item() for _ in range(8)]
    assert step.built == 1
    assert len(set(losses)) == len(losses)


def test_a_step_that_waits_for_the_device_runs_eager_and_says_where() -> None:
    def waiting(model: nn.Module, batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        return loss * 2 if loss.item() > 100 else loss

    eager, graph = make_step("eager"), make_step("graph", loss=waiting)
    torch.manual_seed(0)
    expected = take(eager, 12)
    torch.manual_seed(0)
    assert_same(graph, eager, take(graph, 12), expected)
    assert graph.mode.startswith("eager (the host synchronizes with the device at ")
    assert graph.built == 0


def test_a_capture_that_breaks_off_leaves_everything_in_order() -> None:
    def breaking(model: nn.Module, batch: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            model(batch)  # dropout has drawn in the capture
            torch.cuda.current_stream().synchronize()
        return loss_of(model, batch)

    eager, graph = make_step("eager"), make_step("graph", loss=breaking)
    torch.manual_seed(0)
    expected = take(eager, 12)
    torch.manual_seed(0)
    results = take(graph, 12)
    torch.cuda.empty_cache()
    assert_same(graph, eager, results, expected)
    assert graph.mode.startswith("eager (capture failed: ")


def test_an_own_random_number_on_the_host_is_not_frozen() -> None:
    graph = make_step("graph", loss=lambda model, batch: loss_of(model, batch) * (1 + torch.rand(()).item()))
    take(graph, 9)
    assert graph.mode == "eager (the step draws random numbers on the host)"


def test_batches_on_another_device_are_refused() -> None:
    step = make_step("graph")
    take(step, 9)
    with pytest.raises(DataError, match=r"on cuda:0, got torch.int64, 2-dimensional, on cpu"):
        step([batch.cpu() for batch in batches_of(0)])


@pytest.mark.parametrize("mode", ["graph", "compile"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_compressed_transformer_trains_in_each_mode(mode: str, precision: str) -> None:
    """Every layer that the recipes use can be captured and compiled, and learns as it does eager."""
    losses = {}
    for way in ("eager", mode):
        config = CodeLMConfig(
            model=ModelConfig(hidden=64, layers=2, heads=4, ffn=128),
            data=CodeDataConfig(block_size=32),
            compress=CompressConfig(order=4, rank=8, embedding_order=3, embedding_rank=8, head_rank=8),
        )
        model, _ = build_model(config, 500)
        optimizer = torch.optim.AdamW(param_groups(model.cuda().train(), lr=2e-3), fused=True)
        controller = RankController(model).attach(optimizer)
        step = TrainStep(
            model,
            masked_loss,
            optimizer,
            controller=controller,
            max_grad_norm=1.0,
            precision=precision,
            mode=way,  # type: ignore[arg-type]
        )
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 500, (4, 32), generator=generator)
        places = torch.arange(0, ids.numel(), 7)
        batch = Batch(ids.cuda(), places.cuda(), ids.flatten()[places].cuda())
        losses[way] = torch.stack([step([batch]).loss for _ in range(25)])
        assert step.mode == way
    assert losses["eager"][-1] < losses["eager"][0] - 1
    torch.testing.assert_close(losses[mode], losses["eager"], rtol=0.05 if precision == "bf16" else 1e-3, atol=1e-3)


class Toy(Task):
    """Predicts the next token."""

    name = "tiny"

    def __init__(self) -> None:
        self.model: nn.Module = make_model()

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        return batches_of(step)[micro].cpu()

    def eval_batches(self) -> Iterator[Tensor]:
        yield batches_of(7)[0].cpu()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return loss_of(model, batch)

    def tokens(self, batch: Tensor) -> int:
        return batch.numel()


def test_a_run_trains_from_graphs(tmp_path: Path) -> None:
    late = replace(STAGES["sensitivity"], start_step=12, steps=10)
    rates = {"lr": 2**-7, "rank_lr": 2**-5, "schedule": "constant", "warmup": 0.0}  # exact in float32
    config = TrainConfig(steps=40, accumulation=1, late=late, prune_every=15, progress=False, mode="graph", **rates)
    graph = fit(Toy(), config, tmp_path / "graph")
    eager = fit(Toy(), replace(config, mode="eager"), tmp_path / "eager")
    assert (graph.mode, eager.mode) == ("graph", "eager")
    assert graph.tensorized == eager.tensorized
    assert graph.held_out_loss == pytest.approx(eager.held_out_loss, rel=1e-6)
