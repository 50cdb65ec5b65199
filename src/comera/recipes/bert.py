"""The transformer of the recipes code-lm, mnli and classify: a stock Hugging Face BERT with post-norm encoders, GELU
and learned positions; its sizes and its formats."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from transformers import BertConfig

from comera.baselines.narrow import nearest_heads
from comera.convert import BTT, TT, TTM
from comera.errors import ConfigError, check_fields


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


@dataclass(frozen=True)
class BertFormats:
    """Formats of the compressed layers; only the method comera uses them."""

    format: Literal["tt", "btt", "dense"] = "tt"
    """Format of linear layers: tt, a tensor train, as published, or btt, a block tensor train; dense leaves them as
    they are, for models so narrow that the vocabulary is most of them."""
    order: int = 6
    """Cores in the tensor train of a linear layer; tt only."""
    rank: int | tuple[int, ...] = 30
    """Initial rank of linear layers: one value, clipped where the modes or blocks allow less, or for tt one per inner
    rank."""
    blocks: tuple[int, int] | None = None
    """Input and output blocks of linear layers; btt only. None: about the square roots of the features."""
    embedding: Literal["ttm", "low_rank"] = "ttm"
    """Format of the token embedding: ttm, a TT-matrix, as published, or low_rank, a product of two matrices in which
    every token has `embedding_rank` parameters of its own."""
    embedding_order: int = 4
    """Cores in the TT-matrix of the token embedding; ttm only."""
    embedding_rank: int | tuple[int, ...] = 30
    """Initial TT-rank of the token embedding."""

    def __post_init__(self) -> None:
        checks = {
            "format": (self.format in ("tt", "btt", "dense"), "tt, btt or dense"),
            "embedding": (self.embedding in ("ttm", "low_rank"), "ttm or low_rank"),
        }
        check_fields(self, "compress.", checks)
        self.linear, self.table  # noqa: B018  # refuses what no layer can have

    @property
    def linear(self) -> TT | BTT | None:
        """The format of linear layers."""
        return self.linear_of(self.rank)

    def linear_of(self, rank: int | tuple[int, ...]) -> TT | BTT | None:
        """The format of linear layers, at another rank; None for dense ones."""
        if self.format == "dense":
            return None
        if self.format == "tt":
            return TT(order=self.order, rank=rank)
        return BTT(rank=rank, blocks=self.blocks)  # type: ignore[arg-type]  # which refuses several ranks

    @property
    def table(self) -> TTM:
        """The format of the token embedding."""
        if self.embedding == "low_rank":
            return TTM.low_rank(self.embedding_rank)
        return TTM(order=self.embedding_order, rank=self.embedding_rank)
