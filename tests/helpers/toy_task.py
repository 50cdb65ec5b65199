"""A small language model as a task of `fit`."""

import os
import signal
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.nn.linear import TTLinear
from comera.trainer.task import Task
from comera.tt.spec import TTSpec

VOCABULARY, LENGTH, BATCH = 13, 5, 4


class NextToken(Task):
    """Predicts the next token through a compressed layer and dropout; batches follow from step and micro-batch.

    stop: a step in which this process gets a signal, `number`, at its micro-batch `stop_micro`.
    """

    name = "tiny"
    held_out: tuple[int, ...] = (BATCH, BATCH, BATCH)  # rows of each batch of an evaluation
    lowest_gate: float | None = None  # with gates from this one to 1, ranks fall one by one
    stop_micro = 0

    def __init__(
        self,
        *,
        compressed: bool = True,
        dropout: float = 0.1,
        hidden: int = 12,
        seed: int = 3,
        stop: int | None = None,
        number: int = signal.SIGTERM,
    ) -> None:
        torch.manual_seed(seed)
        spec = TTSpec(8, hidden, (2, 2, 2), (hidden // 4, 2, 2), (1, 2, 4, 6, 4, 2, 1))
        middle = TTLinear(spec) if compressed else nn.Linear(8, hidden)
        if self.lowest_gate is not None and isinstance(middle, TTLinear):
            for d in middle.tt.rank_params:
                d.data = torch.linspace(self.lowest_gate, 1.0, len(d))
        layers = [nn.Embedding(VOCABULARY, 8), middle, nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, VOCABULARY)]
        self.model: nn.Module = nn.Sequential(*layers)
        self.asked: list[tuple[int, int]] = []
        self.stop, self.number = stop, number

    def size(self, step: int) -> tuple[int, int]:
        """Rows of all processes together, and their length."""
        return BATCH, LENGTH

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Tensor:
        self.asked.append((step, micro))
        if (step, micro) == (self.stop, self.stop_micro):
            os.kill(os.getpid(), self.number)
        generator = torch.Generator().manual_seed(1000 * step + micro)
        return torch.randint(VOCABULARY, self.size(step), generator=generator).tensor_split(world)[rank]

    def eval_batches(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(7)
        for rows in self.held_out:
            yield torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def tokens(self, batch: Tensor) -> int:
        return batch.numel()


class Scored(NextToken):
    """It also says how often it was right, and how many rows it saw."""

    def evaluate(self, model: nn.Module, batch: Tensor) -> tuple[dict[str, Tensor], int]:
        hits = model(batch[:, :-1]).argmax(-1) == batch[:, 1:]
        return {"accuracy": hits.float().mean(), "loss": self.loss(model, batch)}, len(batch)

    def examples(self, batch: Tensor) -> int:
        return len(batch)
