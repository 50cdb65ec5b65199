"""Means over held-out data: weighted by what the batches count, and without a trace in training."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from comera.errors import ConfigError
from comera.trainer.evaluation import evaluate
from comera.trainer.task import Task

SIZES = (5, 3, 1)


class Counting(Task):
    """Batches of several sizes; the loss is their mean square, through dropout that only training applies."""

    name = "counting"
    model: nn.Module = nn.Dropout(0.5)

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        raise AssertionError("evaluation takes held-out batches")

    def eval_batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        torch.rand(3)  # a recipe may draw
        for size in SIZES:
            yield torch.randn(size, generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def tokens(self, batch: Tensor) -> int:
        return batch.numel()


class Weighing(Counting):
    def evaluate(self, model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], int]:
        positive = (batch > 0).double().mean()  # any dtype
        return {"positive": positive, "loss": self.loss(model, batch)}, len(batch)


def measure(task: Any, **options: Any) -> dict[str, float]:
    return evaluate(task, task.model, Accelerator(cpu=True), **options)


def rows() -> Tensor:
    return torch.cat([*Counting().eval_batches()])


def test_batches_count_by_their_weight() -> None:
    means = measure(Weighing())
    assert means["loss"] == pytest.approx(rows().square().mean().item(), rel=1e-6)
    assert means["positive"] == pytest.approx((rows() > 0).float().mean().item(), rel=1e-6)


def test_by_default_batches_count_by_their_tokens() -> None:
    assert measure(Counting()) == {"loss": pytest.approx(rows().square().mean().item(), rel=1e-6)}


def test_the_first_batches_alone() -> None:
    assert measure(Weighing(), batches=1)["loss"] == pytest.approx(rows()[:5].square().mean().item(), rel=1e-6)


def test_bf16_is_that_of_training() -> None:
    class Multiplying(Counting):
        model = nn.Linear(1, 1)
        seen: list[torch.dtype] = []  # noqa: RUF012

        def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
            out = model(batch[:, None])
            self.seen.append(out.dtype)
            return out.mean()

    measure(Multiplying(), precision="bf16")
    assert Multiplying.seen == [torch.bfloat16] * len(SIZES)


def test_nothing_of_it_is_left_in_training() -> None:
    task = Weighing()
    before = torch.get_rng_state()
    measure(task)
    assert torch.equal(torch.get_rng_state(), before)
    assert task.model.training


def test_no_held_out_batches_are_an_error() -> None:
    class Blind(Counting):
        def eval_batches(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.raises(ConfigError, match="expected held-out batches from counting, got none"):
        measure(Blind())


def test_means_without_a_loss_are_an_error() -> None:
    class Lossless(Counting):
        def evaluate(self, model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], int]:
            return {"accuracy": batch.mean()}, 1

    with pytest.raises(ConfigError, match=r"expected means with 'loss' from counting\.evaluate, got accuracy"):
        measure(Lossless())
