"""The transformer of the recipes code-lm and mnli: a stock Hugging Face BERT with post-norm encoders, GELU and learned
positions; its sizes, its formats, and how to rebuild it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig

from comera.convert import TT, TTM
from comera.errors import CheckpointError, ConfigError, check_fields
from comera.pretrained import read_manifest, tensor_headers
from comera.recipes.interface import Architecture

_ROWS, _TOKENS = 4, 64  # of an example batch


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; the defaults are the six encoders of the published results (docs/method.md §9)."""

    hidden: int = 768
    """Width of the model."""
    layers: int = 6
    """Number of encoders."""
    heads: int = 12
    """Attention heads per encoder."""
    ffn: int = 3072
    """Width of the feed-forward layers."""
    dropout: float = 0.0
    """Dropout of hidden states and attention."""
    max_positions: int = 512
    """Longest sequence that the model can read."""

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "ffn", "max_positions")
        check_fields(self, "model.", {name: (getattr(self, name) >= 1, "at least 1") for name in sizes})
        check_fields(self, "model.", {"dropout": (0 <= self.dropout < 1, "in [0, 1)")})
        if self.hidden % self.heads:
            raise ConfigError(f"model.hidden must be a multiple of model.heads, got {self.hidden} and {self.heads}")

    def bert(self, vocab_size: int, **others: Any) -> BertConfig:
        """The configuration of a Hugging Face BERT of these sizes; others: further fields of it."""
        return BertConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.ffn,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            max_position_embeddings=self.max_positions,
            **others,
        )


@dataclass(frozen=True)
class BertFormats:
    """Formats of the compressed layers; only the method comera uses them."""

    order: int = 6
    """Cores in the tensor train of a linear layer."""
    rank: int | tuple[int, ...] = 30
    """Initial TT-rank of linear layers: one value, clipped where the modes allow less, or one per inner rank."""
    embedding_order: int = 4
    """Cores in the TT-matrix of the token embedding."""
    embedding_rank: int | tuple[int, ...] = 30
    """Initial TT-rank of the token embedding."""

    @property
    def linear(self) -> TT:
        """The format of linear layers."""
        return TT(order=self.order, rank=self.rank)

    @property
    def embedding(self) -> TTM:
        """The format of the token embedding."""
        return TTM(order=self.embedding_order, rank=self.embedding_rank)


def check_length(field: str, length: int, model: ModelConfig) -> None:
    """Raise ConfigError if sequences are longer than the model can read."""
    if length > model.max_positions:
        raise ConfigError(
            f"{field} ({length}) must not be above model.max_positions ({model.max_positions}): "
            "lower the one or raise the other"
        )


def bert_architecture(
    model_class: Any, build: Callable[[], nn.Module], inputs: dict[str, Tensor], model: ModelConfig, **sizes: int
) -> Architecture:
    """How to rebuild a BERT. model_class: of transformers, for the dense model. build: makes the method's model.
    inputs: an example batch (B, T) by argument of forward; both dimensions are dynamic. sizes: those that the data
    decides."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=model.max_positions)
    dynamic = {name: {0: batch, 1: length} for name in inputs}
    about = {**sizes, "model": asdict(model)}

    def dense(folder: Path) -> nn.Module:
        model: nn.Module = model_class(model_class.config_class.from_pretrained(folder))
        return model

    return Architecture(build, dense, inputs, dynamic, about)


def example_ids(vocab_size: int, longest: int) -> Tensor:
    """Token ids of an example batch (B, T)."""
    return torch.randint(vocab_size, (_ROWS, min(_TOKENS, longest)), generator=torch.Generator().manual_seed(0))


def stored_rows(checkpoint: Path, layer: str) -> int:
    """Rows of a layer's weight in a checkpoint, compressed or dense. Raises CheckpointError if there is none."""
    for entry in read_manifest(checkpoint)["trains"]:
        if f"{layer}.tt" in entry["names"]:
            return int(entry["spec"]["num_embeddings"])
    try:
        return tensor_headers(checkpoint)[f"{layer}.weight"][0][0]
    except KeyError as error:
        raise CheckpointError(f"{checkpoint}: expected the weight of {layer}, found none ({error})") from error
