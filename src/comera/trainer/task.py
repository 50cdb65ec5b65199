"""What a recipe gives to `fit`: a model, its batches and its loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from comera.trainer.config import TrainConfig

Batch = Any


class Task(ABC):
    """A training task. Its batches may have any size, and a different one at each step.

    A subclass sets `name` and `model` and defines the abstract methods; everything else has a default.

    Attributes:
        name: name of the recipe.
        model: the model to train, in place.
        method: what the report calls the method, such as "dense" or "comera". None: one of these two, by the model.
        report_rows: rows of the conversion report, for layers.json.
        dense_total: parameters of the dense original, for the compression ratios. None: counted from the model.
        identity: JSON-ready values besides the TrainConfig that decide what is learned, such as a hash of the data. A
            run resumes only under the same ones.
        files: further files of the run's folder, text by name, such as a tokenizer.
        references: values to hold the metrics against in reports, by metric and label.
        keep_logits: whether `loss` reads the logits of a causal language model that it has given labels (`fuse_`).
        steps_per_epoch: steps per pass over the training data. None: the data has no end.
        counted: the unit that `tokens` counts, for display.
        one_sequence: whether batches depend on (step * accumulation + micro) * world + rank alone. Then a run may
            resume on another number of processes, with an accumulation that gives a step as many batches.

    Example:
        >>> import torch, comera
        >>> from comera.trainer import Task, TrainConfig, fit
        >>> class Digits(Task):
        ...     name, counted = "digits", "examples"
        ...     def __init__(self):
        ...         layers = [torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)]
        ...         self.model = torch.nn.Sequential(*layers)
        ...         self.report_rows = [row.to_dict() for row in comera.tensorize_(self.model, ratio=2).rows]
        ...         self.held_out = self.batch(-1)
        ...     def batch(self, seed):
        ...         x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 + seed))
        ...         return x, x[:, :4].argmax(1)
        ...     def train_batch(self, step, micro, rank, world):
        ...         return self.batch((step * 8 + micro) * world + rank)
        ...     def eval_batches(self):
        ...         return [self.held_out]
        ...     def loss(self, model, batch):
        ...         return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        ...     def tokens(self, batch):
        ...         return len(batch[1])
        >>> summary = fit(Digits(), TrainConfig(steps=20, lr=1e-2, progress=False, device="cpu"), "runs/digits")
        >>> summary.stopped, summary.steps, summary.held_out_loss < 1.4
        ('steps', 20, True)
    """

    name: str
    model: nn.Module
    method: str | None = None
    report_rows: Sequence[Mapping[str, Any]] = ()
    dense_total: int | None = None
    identity: Mapping[str, Any] = {}
    files: Mapping[str, str] = {}
    references: Mapping[str, Mapping[str, float]] = {}
    keep_logits: bool = True
    steps_per_epoch: int | None = None
    counted: str = "tokens"
    one_sequence: bool = False

    @abstractmethod
    def train_batch(self, step: int, micro: int, rank: int, world: int) -> Batch:
        """Micro-batch `micro` of step `step`, both from 0, for process `rank` of `world`: a pure function."""

    @abstractmethod
    def eval_batches(self) -> Iterable[Batch]:
        """The held-out batches, the same ones each time."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch, a scalar."""

    @abstractmethod
    def tokens(self, batch: Batch) -> int:
        """Tokens in a batch without padding, or whatever unit `counted` names."""

    def weight(self, batch: Batch) -> float:
        """How many terms `loss` is the mean of, > 0: in a step, and by default on held-out data, batches count by it.

        Default: `tokens`.
        """
        return self.tokens(batch)

    def examples(self, batch: Batch) -> int | None:
        """Examples in a batch. None: `TrainConfig.batch_size`."""
        return None

    def evaluate(
        self, model: nn.Module, batch: Batch
    ) -> tuple[Mapping[str, Tensor], float] | tuple[Mapping[str, Tensor], float, Tensor]:
        """Means over a held-out batch, scalars by name with "loss" among them, and the weight of the batch.

        A third value, a tensor (B, ...) with one row per example, is collected for `evaluate_rows`.
        Default: the loss alone, and `weight`.
        """
        return {"loss": self.loss(model, batch)}, self.weight(batch)

    def evaluate_rows(self, rows: Tensor) -> Mapping[str, float]:
        """Metrics that are no means over batches, from the rows of all held-out batches in any order."""
        return {}

    def optimizer(self, config: TrainConfig) -> Optimizer | None:
        """An optimizer over the model's parameters, already on their device, at the peak learning rates.

        A run resumes exactly if the optimizer's state consists of tensors and JSON-ready values per parameter.
        Default: None, for fused AdamW over `param_groups`.
        """
        return None

    def after_step(self, step: int) -> object:
        """Called after each optimizer step, counted from 1 over the whole run.

        It may change only the model's parameters and buffers and the optimizer's state.
        """
        return None
