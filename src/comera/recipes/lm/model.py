"""Stock causal language models of transformers, built from sizes: the family of Llama or of GPT-2."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.pytorch_utils import Conv1D

from comera.baselines.narrow import nearest_heads
from comera.convert import BTT, TT, TTM, TensorizeConfig, TensorizeReport, tensorize_
from comera.errors import ConfigError, check_fields
from comera.fusion.decoder_attention import CAUSAL
from comera.recipes.config import Format, Formats

Family = Literal["llama", "gpt2"]
CLASSES: dict[Family, type[PreTrainedModel]] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
_INTO_RESIDUAL = ("o_proj", "down_proj", "c_proj")  # layers that end a branch


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the transformer."""

    family: Family = "llama"
    """llama: RMSNorm, SwiGLU, rotary positions; gpt2: LayerNorm, GELU, learned positions."""
    hidden: int = 256
    """Width of the model."""
    layers: int = 6
    """Number of blocks."""
    heads: int = 4
    """Attention heads per block."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by several queries' heads; llama only. Default: heads."""
    ffn: int | None = None
    """Width of the feed-forward layers. Default: 8/3 hidden, rounded up to a multiple of 16, for llama; 4 hidden for
    gpt2."""
    dropout: float = 0.0
    """Dropout of attention, and for gpt2 also of hidden states."""
    max_positions: int | None = None
    """Longest text that the model reads, in tokens. Default: data.block_size, as it sees no longer one in training."""
    tie: bool = True
    """Output head and token embedding share their weight."""

    def __post_init__(self) -> None:
        checks = {
            "family": (self.family in CLASSES, f"one of {', '.join(CLASSES)}"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1)"),
        }
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "max_positions"):
            size = getattr(self, name)
            checks[name] = (size is None or size >= 1, "at least 1")
        check_fields(self, "model.", checks)
        if self.hidden % self.heads:
            raise ConfigError(f"model.hidden must be a multiple of model.heads, got {self.hidden} and {self.heads}")
        if self.family == "llama" and self.hidden // self.heads % 2:
            raise ConfigError(f"model.heads: expected heads of even size, got {self.hidden} / {self.heads}: change one")
        if self.kv_heads and self.family == "gpt2":
            raise ConfigError("model.kv_heads: gpt2 has as many as heads: leave it out, or take model.family llama")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(f"model.heads must be a multiple of model.kv_heads, got {self.heads} and {self.kv_heads}")

    def feed_forward(self) -> int:
        """Width of the feed-forward layers."""
        usual = 4 * self.hidden if self.family == "gpt2" else -(-8 * self.hidden // 48) * 16
        return self.ffn or usual

    def narrowed(self, hidden: int) -> "ModelConfig":
        """The same family and depth, `hidden` wide: heads of about the same size, other widths in proportion."""
        even = 2 if self.family == "llama" else 1
        heads = nearest_heads(hidden, self.hidden / self.heads, even)
        share = hidden / self.hidden
        fewer = (self.kv_heads or 0) * share
        kv_heads = self.kv_heads and max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, fewer))
        ffn = self.ffn and max(16, round(self.ffn * share / 16) * 16)
        return replace(self, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn)

    def transformers(self, vocab_size: int, context: int, separator: int) -> PretrainedConfig:
        """The configuration of transformers. context: the longest text, in tokens. separator: the token between
        documents."""
        tokens: dict[str, Any] = {"vocab_size": vocab_size, "bos_token_id": separator, "eos_token_id": separator}
        shared = {**tokens, "tie_word_embeddings": self.tie, "use_cache": False}  # but for `generate`, which asks
        if self.family == "gpt2":
            return GPT2Config(
                n_positions=context,
                n_embd=self.hidden,
                n_layer=self.layers,
                n_head=self.heads,
                n_inner=self.feed_forward(),
                resid_pdrop=self.dropout,
                embd_pdrop=self.dropout,
                attn_pdrop=self.dropout,
                **shared,
            )
        return LlamaConfig(
            max_position_embeddings=context,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            intermediate_size=self.feed_forward(),
            attention_dropout=self.dropout,
            **shared,
        )


_RANKS = {"tt": 30, "btt": 8, "dense": 0}
_HEAD_RANKS = {"tt": 64, "btt": 2, "dense": 0}


@dataclass(frozen=True)
class CompressConfig(Formats):
    """Formats of the compressed layers; only the method comera uses them."""

    format: Format = "btt"
    order: int = 6
    rank: int | tuple[int, ...] | None = None
    """Initial rank of linear layers: one value, clipped where the modes or blocks allow less, or for tt all order + 1,
    ones at both ends. Default: 30 for tt, 8 for btt."""
    blocks: tuple[int, int] | None = (4, 4)
    """Input and output blocks of linear layers but the head; btt only. Fewer, larger ones of a higher rank run faster
    and learned more. None: about the square roots of the features."""
    embedding: Literal["low_rank", "ttm", "dense"] = "low_rank"
    """Format of the token embedding: low_rank, a product of two matrices in which every token has `embedding_rank`
    parameters of its own, or ttm, a TT-matrix, which is much smaller and learns less. A small table, such as one of
    bytes, is better left dense."""
    embedding_order: int = 4
    embedding_rank: int | tuple[int, ...] = 32
    head: Literal["share", "untie", "dense"] | None = None
    """Output head: share the embedding's cores, untie it in the format of linear layers, or as a dense weight.
    Default: share, or untie where model.tie is off."""
    head_rank: int | tuple[int, ...] | None = None
    """Initial rank of an output head of its own. Default: 64 for tt, 2 for btt."""
    head_blocks: tuple[int, int] | None = None
    """Input and output blocks of an output head of its own; btt only. None: about the square roots of the features."""

    embeddings = ("ttm", "low_rank", "dense")

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = (None, "share", "untie", "dense")
        check_fields(self, "compress.", {"head": (self.head in heads, "share, untie or dense")})
        for tie in (True, False):
            self.tensorize(ModelConfig(tie=tie))  # refuses what no layer can have

    def tensorize_(self, model: PreTrainedModel, sizes: ModelConfig) -> TensorizeReport:
        """Convert a `dense_model` that was made on the meta device: it gets memory and values on the default device,
        those that `dense_model` gives, while its dense weights never exist. On the meta device it stays there."""
        config = self.tensorize(sizes)
        device = torch.empty(0).device
        if device.type == "meta":
            return tensorize_(model, config)

        def initialize() -> None:
            type(model).initialize_weights(model)
            _initialize_(model, sizes)

        vars(model)["initialize_weights"] = initialize  # what draws a model from the meta device calls it
        try:
            return tensorize_(model, config, device=device)
        finally:
            del vars(model)["initialize_weights"]

    @property
    def converts(self) -> bool:
        """Whether any layer becomes a compressed one; a model may have n-grams alone."""
        return (self.format, self.embedding) != ("dense", "dense")

    def tensorize(self, model: ModelConfig) -> TensorizeConfig:
        """The conversion; learned positions stay dense."""
        overrides: dict[str, TT | TTM | BTT | None] = {"*.wpe": None} if model.family == "gpt2" else {}
        head = self.head or ("share" if model.tie else "untie")
        if head != "share":
            rank = _HEAD_RANKS[self.format] if self.head_rank is None else self.head_rank
            overrides["lm_head"] = self.linear(rank, self.head_blocks) if head == "untie" else None
        return TensorizeConfig(
            linear=self.linear(_RANKS[self.format] if self.rank is None else self.rank, self.blocks),
            embedding=self.table(),
            overrides=overrides,
            tied="share" if head == "share" else "untie",
        )


@torch.no_grad()
def _initialize_(model: nn.Module, config: ModelConfig) -> None:
    """Weights for a model of any width, where transformers has the same std for all (docs/method.md §9)."""
    for name, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.ndim != 2:
            continue
        if isinstance(layer, nn.Embedding):  # rows of norm 1 where they are the head's, too
            std = 1 / math.sqrt(config.hidden) if config.tie else 1.0
        elif name == "lm_head":
            if config.tie:
                continue
            std = 1 / config.hidden  # nearly even logits
        else:
            std = 1 / math.sqrt(weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1])
            if name.endswith(_INTO_RESIDUAL):
                std /= math.sqrt(2 * config.layers)
        weight.normal_(std=std)


def dense_model(config: ModelConfig, vocab_size: int, context: int, separator: int) -> PreTrainedModel:
    """A stock model with fresh weights, for texts without padding."""
    about = config.transformers(vocab_size, context, separator)
    about._attn_implementation = CAUSAL
    model = CLASSES[config.family](about)
    _initialize_(model, config)
    return model
