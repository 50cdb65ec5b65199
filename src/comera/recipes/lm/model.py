"""Stock causal language models of transformers, built from sizes: the family of Llama or of GPT-2."""

from dataclasses import dataclass, replace
from typing import Any, Literal

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

from comera.convert import TT, TTM, TensorizeConfig
from comera.errors import ConfigError, check_fields

Family = Literal["llama", "gpt2"]
CLASSES: dict[Family, type[PreTrainedModel]] = {"llama": LlamaForCausalLM, "gpt2": GPT2LMHeadModel}
# torch's fused attention, causal by its own flag: no mask is made, none is checked, and steps do not synchronize.
_ATTENTION = "comera_causal"
AttentionInterface.register(_ATTENTION, sdpa_attention_forward)


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
        if self.family not in ("llama", "gpt2"):
            raise ConfigError(f"model.family must be one of llama, gpt2, got {self.family!r}")
        names = ("hidden", "layers", "heads", "kv_heads", "ffn", "max_positions")
        sizes = {name: getattr(self, name) for name in names}
        valid = {name: (size is None or size >= 1, "at least 1") for name, size in sizes.items()}
        check_fields(self, "model.", valid)
        check_fields(self, "model.", {"dropout": (0 <= self.dropout < 1, "in [0, 1)")})
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
        size = self.hidden / self.heads
        heads = min(
            (n for n in range(1, hidden + 1) if hidden % n == 0 and hidden // n % even == 0),
            key=lambda n: max(hidden / n / size, size * n / hidden),
        )
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


# The formats of linear layers, by name; arguments: settings, TT-rank.
FORMATS = {"tt": lambda config, rank: TT(order=config.order, rank=rank)}


@dataclass(frozen=True)
class CompressConfig:
    """Formats of the compressed layers; only the method comera uses them."""

    format: Literal["tt"] = "tt"
    """Format of linear layers: tt, a tensor train."""
    order: int = 6
    """Cores in the tensor train of a linear layer."""
    rank: int | tuple[int, ...] = 30
    """Initial TT-rank of linear layers: one value, clipped where the modes allow less, or one per inner rank."""
    embedding_order: int = 4
    """Cores in the TT-matrix of the token embedding."""
    embedding_rank: int | tuple[int, ...] = 32
    """Initial TT-rank of the token embedding."""
    head: Literal["share", "untie", "dense"] = "untie"
    """Output head: share the embedding's cores, untie it in the format of linear layers, or as a dense weight."""
    head_rank: int | tuple[int, ...] = 64
    """Initial TT-rank of an output head of its own."""

    def __post_init__(self) -> None:
        check_fields(self, "compress.", {"format": (self.format in FORMATS, f"one of {', '.join(FORMATS)}")})

    def tensorize(self, family: Family) -> TensorizeConfig:
        """The conversion; learned positions stay dense."""
        make = FORMATS[self.format]
        overrides: dict[str, TT | TTM | None] = {"*.wpe": None} if family == "gpt2" else {}
        if self.head != "share":
            overrides["lm_head"] = make(self, self.head_rank) if self.head == "untie" else None
        return TensorizeConfig(
            linear=make(self, self.rank),
            embedding=TTM(order=self.embedding_order, rank=self.embedding_rank),
            overrides=overrides,
            tied="share" if self.head == "share" else "untie",
        )


def dense_model(config: ModelConfig, vocab_size: int, context: int, separator: int) -> PreTrainedModel:
    """A stock model with fresh weights, for texts without padding."""
    about = config.transformers(vocab_size, context, separator)
    about._attn_implementation = _ATTENTION
    return CLASSES[config.family](about)
