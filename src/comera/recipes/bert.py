"""The transformer of the recipes code-lm and classify: a stock Hugging Face BERT."""

from dataclasses import dataclass, replace
from typing import Any, Self

from transformers import BertConfig

from comera.baselines.narrow import nearest_heads
from comera.errors import ConfigError, check_fields


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer; the defaults are the six encoders of the published results (docs/method.md §9), with
    post-norm, GELU and learned positions."""

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

    def narrowed(self, hidden: int) -> Self:
        """The same depth, `hidden` wide: heads of about the same size, feed-forward layers in proportion."""
        ffn = max(16, round(self.ffn * hidden / self.hidden / 16) * 16)
        return replace(self, hidden=hidden, heads=nearest_heads(hidden, self.hidden / self.heads), ffn=ffn)

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
