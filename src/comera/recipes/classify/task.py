"""What classifiers learn, and how they are judged: accuracy, macro F1 and the confusion matrix.

B batch, T tokens of the longest example in it, L labels."""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.recipes.data.prepared import ExampleBatch


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
