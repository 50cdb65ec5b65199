"""What classifiers learn, and how they are judged: accuracy, macro F1 and the confusion matrix.

B batch, T tokens of the longest example in it, L labels."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines import Conversion
from comera.files import replace_file
from comera.recipes.classify.data import PreparedExamples
from comera.recipes.data.prepared import ExampleBatch
from comera.recipes.stages import is_main, log
from comera.recipes.task import RecipeTask, evaluate_last, write_test
from comera.trainer.metrics import Summary, to_json

CONFUSION = "confusion.json"  # in a run's folder; reports draw it


class Reads(NamedTuple):
    """What a model reads of a batch. segments: token types. square: a mask (B, 1, T, T), which BERT uses as it is; of
    (B, T) it asks whether all entries are true, and synchronizes."""

    segments: bool = True
    square: bool = True

    @classmethod
    def of(cls, model: Any) -> "Reads":
        """As a model of transformers needs it."""
        two = (getattr(model.config, "type_vocab_size", None) or 0) > 1
        takes = "token_type_ids" in inspect.signature(model.forward).parameters
        return cls(two and takes, model.config.model_type == "bert")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments of the model."""
        return ("input_ids", *(["token_type_ids"] if self.segments else []), "attention_mask")


def scores(model: Any, batch: ExampleBatch, reads: Reads = Reads()) -> Tensor:  # noqa: B008
    """Logits of the labels, (B, L)."""
    mask = batch.attention_mask
    inputs = {"token_type_ids": batch.token_type_ids} if reads.segments else {}
    mask = mask[:, None, None, :].expand(-1, -1, mask.shape[1], -1) if reads.square else mask.long()
    logits: Tensor = model(input_ids=batch.input_ids, **inputs, attention_mask=mask).logits
    return logits


def example_loss(model: Any, batch: ExampleBatch, reads: Reads = Reads()) -> Tensor:  # noqa: B008
    """Mean cross-entropy of the labels, in nats."""
    return F.cross_entropy(scores(model, batch, reads), batch.labels)


def meta_batch(rows: int, width: int) -> ExampleBatch:
    """A batch of the longest examples, for estimates on the meta device."""
    ids, segments = (torch.empty(rows, width, dtype=torch.int64) for _ in range(2))
    mask = torch.empty(rows, width, dtype=torch.bool)
    return ExampleBatch(ids, segments, mask, torch.empty(rows, dtype=torch.int64))


def confusion_matrix(predicted: Tensor, labels: Tensor, count: int) -> Tensor:
    """How many examples of each label (row) got each answer (column), (L, L) int64. predicted, labels: (N,) int64."""
    return torch.bincount(labels * count + predicted, minlength=count * count).view(count, count)


def macro_f1(confusion_LL: Tensor) -> float:
    """The mean over labels of the harmonic mean of precision and recall; labels that neither occur nor are answered
    count nothing."""
    right = confusion_LL.diagonal().double()
    either = (confusion_LL.sum(0) + confusion_LL.sum(1)).double()
    return float((2 * right / either)[either > 0].mean())


class ClassificationTask(RecipeTask):
    """Classification of texts or pairs, as a task for `comera.trainer.loop.fit`. first: steps that earlier runs
    trained. part: of the data to evaluate on. confusion: of the last evaluation."""

    part: Literal["dev", "test"] = "dev"
    confusion: Tensor | None = None
    data: PreparedExamples

    def __init__(
        self, config: Any, data: PreparedExamples, model: nn.Module, report: Conversion, first: int, **identity: Any
    ) -> None:
        settings = {"data.first_step": first, **config.baselines.identity(config.method)}
        super().__init__(config, data, model, report, first, **settings, **identity)
        self.reads = Reads.of(model)
        self.steps_per_epoch = self.epoch_length()
        label, share = data.most_frequent
        self.references = {"accuracy": {f"always {label}": share}}

    def eval_batches(self) -> Iterator[ExampleBatch]:
        """The held-out or test examples in batches of the training size; always the same, in the same order."""
        part = self.data.test if self.part == "test" else self.data.dev
        assert part is not None
        batches = list(part.sorted(self.config.train.batch_size))
        Random(0).shuffle(batches)  # sorted by length before: so the first few represent all
        return iter(batches)

    def loss(self, model: nn.Module, batch: ExampleBatch) -> Tensor:
        return example_loss(model, batch, self.reads)

    def evaluate(self, model: nn.Module, batch: ExampleBatch) -> tuple[dict[str, Tensor], int, Tensor]:
        """Loss and accuracy, means over the batch; its number of examples; their answers and labels (B, 2)."""
        logits = scores(model, batch, self.reads)
        answers = logits.argmax(-1)
        means = {
            "loss": F.cross_entropy(logits, batch.labels),
            "accuracy": (answers == batch.labels).float().mean(),
        }
        return means, len(batch.labels), torch.stack([answers, batch.labels], 1)

    def evaluate_rows(self, rows: Tensor) -> dict[str, float]:
        """Macro F1; the confusion matrix is kept for the end of the run."""
        self.confusion = confusion_matrix(rows[:, 0], rows[:, 1], len(self.data.label_names))
        return {"f1": macro_f1(self.confusion)}

    def weight(self, batch: ExampleBatch) -> int:
        return len(batch.labels)

    def examples(self, batch: ExampleBatch) -> int:
        return len(batch.labels)

    def tokens(self, batch: ExampleBatch) -> int:
        """Tokens that the model reads; padding does not count."""
        return int(batch.attention_mask.sum())


def write_results(summary: Summary, task: ClassificationTask, folder: Path) -> Summary:
    """Write confusion.json of a finished run, and test.json where there are test examples, unless they are there;
    returns the summary."""
    path = folder / CONFUSION
    if not summary.finished or path.exists():
        return summary
    if task.confusion is None:  # an earlier call finished the run
        evaluate_last(task, folder)
    matrices = {"held-out": task.confusion}
    if task.data.test is not None:
        task.part = "test"
        write_test(task, folder)
        matrices["test"] = task.confusion
    if is_main(task.config.train):
        counts = {part: matrix.tolist() for part, matrix in matrices.items() if matrix is not None}
        replace_file(path, to_json({"labels": list(task.data.label_names), "counts": counts}) + "\n")
        (label, share), reached = task.data.most_frequent, dict(summary.metrics)
        values = ", ".join(f"{name} {value:.4f}" for name, value in reached.items())
        log(True, task.name, f"held-out: {values}; always answering {label!r} has accuracy {share:.4f}")
    return summary
