"""The zoo's table: small models of every family from random weights, what they are fed, and where they fall short.

To add a family, add a line. A shortfall that is written here must occur, with this error; docs/zoo.md shows it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

VOCABULARY, LENGTH = 256, 8


@dataclass(frozen=True)
class Shortfall:
    """What a family cannot do yet. reason: for the page. match: regular expression in the error that it ends with."""

    reason: str
    match: str


@dataclass(frozen=True)
class Family:
    """build: -> a model of random weights without dropout. inputs: -> the keywords of a forward, for two samples.

    tied: whether table and head share a weight. generates: whether it has `generate` with a cache. shortfalls: by the
    name of the check. blocks: whether linear layers become block tensor trains. needs: packages that may be missing.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    tied: bool = False
    blocks: bool = False
    generates: bool = False
    shortfalls: Mapping[str, Shortfall] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> str | None:
        """Why it cannot be built here, or None."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{absent[0]} is not installed" if absent else None


# --- shortfalls ------------------------------------------------------------------------------------------------------

NO_BLOCKS = {"recompute_": Shortfall("It has no blocks with two compressed layers.", "expected blocks")}


# --- inputs ----------------------------------------------------------------------------------------------------------


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ids(seed: int = 1) -> Tensor:
    return torch.randint(4, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def text() -> dict[str, Tensor]:
    return {"input_ids": _ids()}


def pair() -> dict[str, Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(2)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": _random(2, 3, 32, 32)}


def sound() -> dict[str, Tensor]:
    return {"input_values": _random(2, 400)}


def spectrum() -> dict[str, Tensor]:
    return {"input_features": _random(2, 16, 32), "decoder_input_ids": _ids(2)}


def text_and_image() -> dict[str, Tensor]:
    return {**text(), **image()}


def vectors() -> dict[str, Tensor]:
    return {"src": _random(2, LENGTH, 64), "tgt": _random(2, LENGTH, 64)}


def sequence() -> dict[str, Tensor]:
    return {"ids": _ids()}


def images() -> dict[str, Tensor]:
    return {"x": _random(2, 3, 32, 32)}


# --- builders --------------------------------------------------------------------------------------------------------

ENCODER: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
UNKNOWN = "unknown to this configuration"
TEXT: dict[str, Any] = {**ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
BOTH: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 0,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same configuration, and those inside it, without anything random."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            without_dropout(value)
        elif isinstance(value, float) and any(word in name for word in ("drop", "pdrop", "mask_time", "mask_feature")):
            setattr(config, name, 0.0)
    return config


def hugging_face(kind: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builder of AutoModel{head} for a type of configuration."""

    def build() -> nn.Module:
        config = without_dropout(AutoConfig.for_model(kind, **sizes))
        model: nn.Module = getattr(transformers, f"AutoModel{head}").from_config(config)
        return model

    return build


class Seq2Seq(nn.Module):
    """`nn.Transformer` with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(64, 4, 2, 2, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(src, tgt))
        return out


class Recurrent(nn.Module):
    """A language model of 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 64, padding_idx=0)
        self.body = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.table(ids))[0])
        return out

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def timm_vit() -> nn.Module:
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}
    model: nn.Module = timm.models.vision_transformer.VisionTransformer(**sizes)
    return model


def torchvision_vit() -> nn.Module:
    import torchvision

    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
    model: nn.Module = torchvision.models.VisionTransformer(**sizes)
    return model


# --- the table -------------------------------------------------------------------------------------------------------


def masked(kind: str, name: str = "", shortfalls: Mapping[str, Shortfall] | None = None, **sizes: Any) -> Family:
    build = hugging_face(kind, "ForMaskedLM", **{**TEXT, **sizes})
    return Family(name or kind, build, text, tied=True, shortfalls=shortfalls or {})


def causal(
    kind: str, name: str = "", *, tied: bool = False, shortfalls: Mapping[str, Shortfall] | None = None, **sizes: Any
) -> Family:
    sizes = {**DECODER, **sizes, "tie_word_embeddings": tied}
    build = hugging_face(kind, "ForCausalLM", **{key: value for key, value in sizes.items() if value != UNKNOWN})
    return Family(name or kind, build, text, tied=tied, generates=True, shortfalls=shortfalls or {})


def seq2seq(kind: str, shortfalls: Mapping[str, Shortfall] | None = None, **sizes: Any) -> Family:
    build = hugging_face(kind, "ForSeq2SeqLM", **sizes)
    return Family(kind, build, pair, tied=True, generates=True, shortfalls=shortfalls or {})


def vision(kind: str, shortfalls: Mapping[str, Shortfall] | None = None, **sizes: Any) -> Family:
    return Family(kind, hugging_face(kind, "ForImageClassification", **sizes), image, shortfalls=shortfalls or {})


VISION: dict[str, Any] = {**ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 10}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}

FAMILIES: tuple[Family, ...] = (
    masked("bert"),
    masked("roberta"),
    masked("xlm-roberta"),
    masked("distilbert", dim=64, n_layers=2, n_heads=4, hidden_dim=128),
    masked("electra", embedding_size=64),
    masked("albert", embedding_size=64),
    masked("mpnet"),
    masked("longformer", attention_window=[4, 4]),
    masked("modernbert", global_attn_every_n_layers=2, local_attention=4, pad_token_id=0),
    masked("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    causal(
        "xlnet",
        tied=True,
        max_position_embeddings=UNKNOWN,
        d_model=64,
        n_layer=2,
        n_head=4,
        d_inner=128,
    ),
    masked("squeezebert", embedding_size=64),
    causal("gpt2", tied=True, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    causal("gpt_neo", tied=True, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    causal("gpt_neox"),
    causal("bloom", tied=True, n_layer=2, n_head=4),
    causal("starcoder2", tied=True),
    causal("opt", tied=True, ffn_dim=128, word_embed_proj_dim=64),
    causal("llama"),
    causal("llama", "llama, tied", tied=True),
    causal("mistral", sliding_window=4),
    causal("qwen2", tied=True),
    causal("qwen3", head_dim=16),
    causal("phi3"),
    causal("gemma2", tied=True, **HEADS),
    causal("gemma3_text", "gemma3", tied=True, **HEADS),
    causal("falcon", tied=True),
    causal("mixtral", num_local_experts=4),
    causal("gpt_oss", **HEADS, num_local_experts=4),
    causal("qwen3_moe", **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
    causal(
        "deepseek_v3",
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    causal("mamba", tied=True, state_size=8),
    causal("mamba2", tied=True, state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=4),
    seq2seq(
        "t5", vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0
    ),
    seq2seq("bart", **BOTH, scale_embedding=True),
    seq2seq("mbart", **BOTH, scale_embedding=True),
    seq2seq("pegasus", **BOTH, scale_embedding=True),
    Family(
        "whisper",
        hugging_face(
            "whisper",
            "ForSpeechSeq2Seq",
            **{**BOTH, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 64, "pad_token_id": 0},
        ),
        spectrum,
        tied=True,
        generates=True,
    ),
    vision("vit", **VISION),
    vision("dinov2", **VISION, mlp_ratio=2),
    vision("swin", image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4),
    vision(
        "convnext",
        hidden_sizes=[32, 64],
        depths=[1, 1],
        num_stages=2,
        image_size=32,
        patch_size=4,
    ),
    Family(
        "wav2vec2",
        hugging_face(
            "wav2vec2",
            "ForCTC",
            **ENCODER,
            vocab_size=VOCABULARY,
            conv_dim=(32, 32),
            conv_stride=(5, 4),
            conv_kernel=(10, 4),
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            num_feat_extract_layers=2,
            apply_spec_augment=False,
        ),
        sound,
    ),
    Family(
        "clip",
        hugging_face(
            "clip",
            "",
            text_config={**TEXT, "projection_dim": 32, "eos_token_id": 2},
            vision_config={**ENCODER, "image_size": 32, "patch_size": 8, "projection_dim": 32},
            projection_dim=32,
        ),
        text_and_image,
    ),
    Family("nn.Transformer", Seq2Seq, vectors),
    Family("nn.LSTM", Recurrent, sequence, tied=True, shortfalls=NO_BLOCKS),
    Family("timm's ViT", timm_vit, images, needs=("timm", "torchvision")),
    Family("torchvision's ViT", torchvision_vit, images, needs=("torchvision",)),
)
