"""What a recipe gives to `fit`: a model, its batches and its loss."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

Batch = Any


class Task(Protocol):
    """What a recipe gives to `fit`. Batches may have any size, another one at each step.

    Optional members:
    - `method`: "dense", "comera", ...: what the report calls it.
    - `report_rows`: for layers.json, the rows of the conversion's report.
    - `dense_total`: numbers of the dense original, for the ratios.
    - `identity`: JSON-ready, what besides the TrainConfig decides what is learned, such as a hash of the data; a run
      resumes only under the same one.
    - `steps_per_epoch`: steps that see the training data once, for data that has an end.
    - `evaluate(model, batch) -> (means, weight)`: means over a held-out batch by name, scalars with "loss" among them,
      and what the batch counts, such as its examples; without it, the loss alone and every batch alike. A third value,
      a tensor (B, ...) with a row for each example, is kept for `evaluate_rows(rows) -> {name: number}`: what is no
      mean over batches, made of the rows of all held-out data, in any order.
    - `optimizer(config) -> torch.optim.Optimizer`: over the model's parameters, on their device by then, at the peak
      learning rates; without it, fused AdamW over `param_groups`. A run resumes exactly where its state is tensors and
      JSON-ready values by parameter.
    - `after_step(step) -> None`: called after each step of the optimizer, counted from 1 over the whole run; what it
      changes must live in the model's parameters and buffers or in the optimizer's state.
    - `examples(batch) -> int`: examples in a batch; without it, `batch_size`.
    - `counted`: what `tokens` counts, for people: "tokens" if left out.
    """

    name: str
    model: nn.Module

    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """Micro-batch `micro` of step `step`, both from 0, for process `rank` of `world`: a pure function."""

    def eval_batches(self) -> Iterable[Batch]:
        """Held-out batches, the same ones each time."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The batch's mean loss, a scalar."""

    def tokens(self, batch: Batch) -> int:
        """Tokens, or whatever the recipe counts as its input, in a batch; padding is none."""
