"""The transformer of the recipes: post-norm encoders with GELU and learned positions, a stock Hugging Face BERT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import BertConfig

from comera.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; by default those of the six encoders that METHOD §4 publishes figures for."""

    hidden: int = 768
    """Width of the model."""
    layers: int = 6
    """Number of encoders."""
    heads: int = 12
    """Attention heads of an encoder."""
    ffn: int = 3072
    """Width of the feed-forward layers."""
    dropout: float = 0.0
    """Dropout of hidden states and of attention."""
    max_positions: int = 512
    """Longest sequence that the model can read."""

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "ffn", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} must be at least 1, got {getattr(self, name)!r}")
        if self.hidden % self.heads:
            raise ConfigError(f"model.hidden must be a multiple of model.heads, got {self.hidden} and {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"model.dropout must be in [0, 1), got {self.dropout!r}")

    def bert(self, vocab_size: int, **others: Any) -> BertConfig:
        """The configuration of Hugging Face's BERT in these sizes; `others`: further fields of it."""
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
