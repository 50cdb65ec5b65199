"""Micro-batches and processes with unequal numbers of tokens count in a step by their tokens, not one each."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from comera.errors import DataError
from comera.nn.linear import TTLinear
from comera.trainer.checkpoint import find_checkpoint
from comera.trainer.config import TrainConfig
from comera.trainer.evaluation import evaluate
from comera.trainer.loop import fit
from comera.trainer.processes import open_accelerator
from comera.trainer.step import TrainStep
from comera.trainer.task import Task
from comera.tt.spec import TTSpec

from ..helpers.launched import launch

VOCABULARY, ROWS, LENGTHS = 11, 3, (2, 9, 5, 4)
CONFIG = TrainConfig(
    steps=6, batch_size=ROWS, lr=1e-2, eval_every=0, save_every=0, log_every=1, progress=False, device="cpu"
)


class Lengths(Task):
    """Next tokens of sequences whose length differs from batch to batch; `joined`: all of a step in one batch."""

    name = "lengths"

    def __init__(self, *, joined: bool = False) -> None:
        torch.manual_seed(0)
        spec = TTSpec(8, 12, (2, 2, 2), (3, 2, 2), (1, 2, 4, 6, 4, 2, 1))
        self.model: nn.Module = nn.Sequential(
            nn.Embedding(VOCABULARY, 8), TTLinear(spec), nn.GELU(), nn.Linear(12, VOCABULARY)
        )
        self.joined = joined

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> list[Tensor]:
        places = range(4) if self.joined else [2 * micro + rank] if world == 2 else [micro]
        return [self._tokens(step, place) for place in places]

    def _tokens(self, step: int, place: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * step + place)
        return torch.randint(VOCABULARY, (ROWS, LENGTHS[place] + 1), generator=generator)

    def eval_batches(self) -> Iterator[list[Tensor]]:
        yield from ([self._tokens(99, place)] for place in range(4))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        logits = torch.cat([model(tokens[:, :-1]).flatten(0, 1) for tokens in batch])
        return F.cross_entropy(logits, torch.cat([tokens[:, 1:].flatten() for tokens in batch]))

    def tokens(self, batch: list[Tensor]) -> int:
        return sum(tokens[:, 1:].numel() for tokens in batch)


def parameters(run: Path) -> dict[str, Tensor]:
    return load_file(find_checkpoint(run) / "model.safetensors")


def assert_same_run(run: Path, other: Path) -> None:
    torch.testing.assert_close(parameters(run), parameters(other), rtol=1e-4, atol=1e-6)


def test_micro_batches_count_by_their_tokens(tmp_path: Path) -> None:
    one = fit(Lengths(joined=True), CONFIG, tmp_path / "joined")
    two = fit(Lengths(), replace(CONFIG, accumulation=4), tmp_path / "micro")
    assert_same_run(tmp_path / "micro", tmp_path / "joined")
    assert two.held_out_loss == pytest.approx(one.held_out_loss, rel=1e-5)


def train_as(rank: int, world: int, run: str) -> None:
    fit(Lengths(), replace(CONFIG, accumulation=2), run)


def test_processes_count_by_their_tokens(tmp_path: Path) -> None:
    fit(Lengths(joined=True), CONFIG, tmp_path / "joined")
    launch(train_as, str(tmp_path / "two"))
    assert_same_run(tmp_path / "two", tmp_path / "joined")


def test_a_step_weighs_its_batches_in_gradient_and_loss() -> None:
    task = Lengths()
    model = task.model.double()
    batches = [task.train_batch(0, micro, 0, 1) for micro in range(4)]
    weights = torch.tensor([task.weight(batch) for batch in batches], dtype=torch.float64)
    joint = Lengths(joined=True)
    joint.model.double()
    whole = joint.train_batch(0, 0, 0, 1)
    expected = joint.loss(joint.model, whole)
    expected.backward()
    result = TrainStep(model, task.loss, torch.optim.SGD(model.parameters(), lr=0.0))(batches, weights)
    assert result.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for parameter, other in zip(model.parameters(), joint.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_equal_weights_change_no_bit(count: int) -> None:
    results = []
    for weights in (None, torch.full((count,), 37.0, dtype=torch.float64)):
        task = Lengths()
        batches = [task.train_batch(step, 1, 0, 1) for step in range(count)]
        step = TrainStep(task.model, task.loss, torch.optim.SGD(task.model.parameters(), lr=0.1))
        result = step(batches, weights)
        results.append([result.loss, *(p.detach() for p in task.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    expected = torch.stack([Lengths().loss(Lengths().model, batch).detach() for batch in batches]).mean()
    assert torch.equal(results[0][0], expected)


def test_held_out_batches_count_by_their_tokens() -> None:
    task = Lengths()
    means = evaluate(task, task.model, open_accelerator("cpu"))
    whole = [tokens for batch in task.eval_batches() for tokens in batch]
    assert means["loss"] == pytest.approx(task.loss(task.model, whole).item(), rel=1e-5)


def test_a_batch_without_weight_is_refused(tmp_path: Path) -> None:
    class Empty(Lengths):
        def weight(self, batch: list[Tensor]) -> int:
            return 0

    with pytest.raises(DataError, match=r"expected training batches of a weight above 0 from lengths, got 0 at step 1"):
        fit(Empty(), CONFIG, tmp_path)
