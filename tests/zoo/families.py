"""The zoo's table: small models of every family from random weights, what they are fed, and where they fall short.

To add a family, add a line. A shortfall that is written here must occur, with this error; docs/zoo.md shows it.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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

    double: whether its own code computes in float64; else what is checked so is in float32. tied: whether table and
    head share a weight. generates: whether it has `generate` with a cache. shortfalls: by the
    name of the check. blocks: whether linear layers become block tensor trains. needs: packages that may be missing.
    rounded: regular expression of parameters whose scale a norm removes, so that all of their gradient is rounding.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    double: bool = True
    tied: bool = False
    blocks: bool = False
    generates: bool = False
    shortfalls: Mapping[str, Shortfall] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    rounded: str = "$^"

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


def captioned() -> dict[str, Tensor]:
    """Sixteen places of an image, id 5, before the text."""
    return {"input_ids": torch.cat([torch.full((2, 16), 5), _ids().clamp(min=6)], 1), **image()}


def speech_and_text() -> dict[str, Tensor]:
    return {"input_features": _random(2, 32, 16), "decoder_input_ids": _ids(2)}


def series() -> dict[str, Tensor]:
    return {"past_values": _random(2, 32, 2)}


def trajectory() -> dict[str, Tensor]:
    made = {"states": _random(2, 6, 8), "actions": _random(2, 6, 4), "rewards": _random(2, 6, 1)}
    times = {"timesteps": torch.arange(6).repeat(2, 1), "attention_mask": torch.ones(2, 6)}
    return {**made, **times, "returns_to_go": _random(2, 6, 1)}


def noisy_latents() -> dict[str, Tensor]:
    return {
        "hidden_states": _random(2, 4, 8, 8),
        "timestep": torch.tensor([3, 7]),
        "class_labels": torch.tensor([1, 2]),
    }


def noisy_images() -> dict[str, Tensor]:
    return {"sample": _random(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}


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
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter", "mask_time", "mask_feature")):
            setattr(config, name, 0.0)
    return config


def hugging_face(kind: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builder of AutoModel{head} for a type of configuration."""

    def build() -> nn.Module:
        config = without_dropout(AutoConfig.for_model(kind, **sizes))
        return getattr(transformers, f"AutoModel{head}").from_config(config)

    return build


class Seq2Seq(nn.Module):
    """`nn.Transformer` with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(64, 4, 2, 2, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return self.head(self.body(src, tgt))


class Recurrent(nn.Module):
    """A language model of 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 64, padding_idx=0)
        self.body = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.table(ids))[0])

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def class_of(where: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builder of a class, "package.module.Class", that takes its sizes as arguments."""

    def build() -> nn.Module:
        module, _, name = where.rpartition(".")
        return getattr(importlib.import_module(module), name)(**sizes)

    return build


def configured(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Builder of a class of transformers that no AutoModel has, and the name of its configuration."""

    def build() -> nn.Module:
        return getattr(transformers, name)(without_dropout(getattr(transformers, config)(**sizes)))

    return build


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


def detection(kind: str, **more: Any) -> Family:
    """A detector with a small ResNet of transformers as its backbone."""
    backbone = {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [16, 32, 32, 64],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage4"],
        "layer_type": "basic",
    }
    sizes = {key: value for key, value in BOTH.items() if "token_id" not in key and key != "vocab_size"}
    build = hugging_face(
        kind, "ForObjectDetection", **sizes, backbone_config=backbone, num_queries=5, num_labels=4, **more
    )
    return Family(kind, build, lambda: {"pixel_values": _random(2, 3, 64, 64)})


VISION: dict[str, Any] = {**ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 10}
PYRAMID: dict[str, Any] = {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1], "num_labels": 10}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROUTED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 4,
    "mamba_n_groups": 1,
}
T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
SOUND: dict[str, Any] = {
    **ENCODER,
    "conv_dim": (32, 32),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "apply_spec_augment": False,
}

_OWN_LAYERS = {
    "conversion": Shortfall(
        "Its layers and tables are of types of its own, for integers.", "expected 80% in compressed"
    ),
    "ties": Shortfall("Its table is of a type of its own and stays dense.", "no attribute 'tt'"),
    "recompute_": Shortfall("Only the head is compressed, and no block.", "but IBertForMaskedLM has none"),
}

_OWN_SAVER = {
    "from_pretrained": Shortfall(
        "Its library would read dense layers without weights, so it refuses to save: `comera.save_pretrained` does.",
        "comera.save_pretrained",
    )
}
_ROWS_OF_MASKS = {
    "compile": Shortfall(
        "Its adapters see as many rows as a mask has, which nobody knows while the model is compiled.", "graph breaks: "
    )
}

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
    causal("xlnet", tied=True, max_position_embeddings=UNKNOWN, d_model=64, n_layer=2, n_head=4, d_inner=128),
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
    seq2seq("t5", **T5),
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
    vision("convnext", hidden_sizes=[32, 64], depths=[1, 1], num_stages=2, image_size=32, patch_size=4),
    Family("wav2vec2", hugging_face("wav2vec2", "ForCTC", **SOUND, vocab_size=VOCABULARY), sound),
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
    # encoders of text
    Family("electra, pretraining", hugging_face("electra", "ForPreTraining", **TEXT, embedding_size=64), text),
    masked("esm", pad_token_id=0, mask_token_id=1, position_embedding_type="rotary"),
    masked("ibert", shortfalls=_OWN_LAYERS),
    masked("nomic_bert"),
    masked("roberta-prelayernorm"),
    masked("roformer", embedding_size=64),
    masked("big_bird", attention_type="original_full"),
    masked("convbert", embedding_size=64, conv_kernel_size=3),
    masked("fnet"),
    masked("deberta"),
    masked("megatron-bert"),
    replace(masked("rembert", input_embedding_size=64, output_embedding_size=64), tied=False),
    masked("nystromformer"),
    masked("xmod", languages=["en_XX"], default_language="en_XX", shortfalls=_ROWS_OF_MASKS),
    masked("layoutlm"),
    # decoders
    causal("gemma", tied=True, **HEADS),
    causal("glm4", **HEADS),
    causal("olmo2"),
    causal("cohere", tied=True),
    causal("stablelm"),
    causal("nemotron"),
    causal("bitnet"),
    causal("apertus"),
    causal("biogpt", tied=True),
    causal("gptj", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64),
    causal("codegen", n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=64),
    causal("gpt_bigcode", tied=True, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    causal("ctrl", tied=True, n_embd=64, n_layer=2, n_head=4, n_positions=64, dff=128),
    causal("mpt", tied=True, d_model=64, n_layers=2, n_heads=4, max_seq_len=64),
    replace(causal("xglm", tied=True, d_model=64, num_layers=2, attention_heads=4, ffn_dim=128), double=False),
    # experts
    causal("qwen2_moe", **ROUTED, num_experts=4, shared_expert_intermediate_size=64),
    causal("olmoe", num_experts=4, num_experts_per_tok=2),
    causal("phimoe", num_local_experts=4),
    causal("granitemoe", tied=True, num_local_experts=4, num_experts_per_tok=2),
    causal("glm4_moe", **HEADS, **ROUTED, n_routed_experts=4, n_group=1, topk_group=1),
    causal("llama4_text", **HEADS, num_local_experts=2, intermediate_size_mlp=128, attention_chunk_size=8),
    causal("minimax", **HEADS, num_local_experts=4, block_size=4),
    # recurrences, alone and beside attention
    causal("rwkv", attention_hidden_size=64, context_length=64, use_cache=False),
    causal("falcon_mamba", tied=True, state_size=8),
    causal("recurrent_gemma", tied=True, lru_width=64, block_types=("recurrent", "attention"), attention_window_size=8),
    causal("bamba", **MAMBA, attn_layer_indices=[1]),
    causal("falcon_h1", **HEADS, **{**MAMBA, "mamba_n_heads": 4}, mamba_d_ssm=64),
    causal(
        "jamba",
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    causal(
        "zamba2",
        tied=True,
        num_hidden_layers=4,
        num_key_value_heads=4,
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_headdim=16,
        mamba_ngroups=1,
        chunk_size=4,
        num_mem_blocks=1,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        hybrid_layer_ids=[1, 3],
    ),
    causal("lfm2", tied=True, layer_types=["conv", "full_attention"], block_ff_dim=128),
    # encoders with decoders
    seq2seq("marian", **BOTH, pad_token_id=0),
    seq2seq("m2m_100", **BOTH),
    replace(seq2seq("nllb-moe", **BOTH, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2), double=False),
    seq2seq(
        "led", **BOTH, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=[4, 4]
    ),
    seq2seq("longt5", **T5, local_radius=4),
    replace(seq2seq("switch_transformers", **T5, num_decoder_layers=2, num_experts=4), double=False),
    seq2seq("umt5", **T5),
    # images, video
    vision("beit", **VISION),
    vision("siglip", vision_config={**ENCODER, "image_size": 32, "patch_size": 8}, num_labels=10),
    vision("swinv2", image_size=32, patch_size=4, embed_dim=32, depths=[1, 1], num_heads=[2, 4], window_size=4),
    vision("segformer", **PYRAMID, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=32),
    vision("pvt_v2", **PYRAMID, num_attention_heads=[1, 1, 2, 2]),
    vision("poolformer", **PYRAMID),
    vision("resnet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10),
    Family(
        "glpn",
        hugging_face("glpn", "ForDepthEstimation", **PYRAMID, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
        image,
    ),
    detection("detr"),
    # one level: torch's convolutions of a single position give bfloat16 gradients that are no numbers, dense ones too
    detection("deformable_detr", num_feature_levels=1),
    Family(
        "yolos",
        hugging_face("yolos", "ForObjectDetection", **{**VISION, "image_size": [32, 32]}, num_detection_tokens=4),
        image,
    ),
    Family(
        "videomae",
        hugging_face("videomae", "ForVideoClassification", **VISION, num_frames=4, tubelet_size=2),
        lambda: {"pixel_values": _random(2, 4, 3, 32, 32)},
    ),
    Family(
        "timesformer",
        hugging_face("timesformer", "ForVideoClassification", **VISION, num_frames=2),
        lambda: {"pixel_values": _random(2, 2, 3, 32, 32)},
    ),
    # sound
    Family("hubert", hugging_face("hubert", "ForAudioClassification", **SOUND), sound),
    Family("wavlm", hugging_face("wavlm", "ForAudioClassification", **SOUND), sound),
    Family(
        "wav2vec2, pretraining",
        configured(
            "Wav2Vec2ForPreTraining",
            "Wav2Vec2Config",
            **SOUND,
            codevector_dim=32,
            proj_codevector_dim=32,
            num_codevectors_per_group=8,
        ),
        sound,
        rounded=r"conv_layers\.0\.conv\.tt\.(cores|rank_params)\.0$",
    ),
    Family(
        "speech_to_text",
        hugging_face(
            "speech_to_text",
            "ForSpeechSeq2Seq",
            **{**BOTH, "max_source_positions": 64, "max_target_positions": 64},
            input_feat_per_channel=16,
            conv_channels=32,
        ),
        speech_and_text,
        tied=True,
        generates=True,
    ),
    Family(
        "moonshine",
        hugging_face(
            "moonshine",
            "ForSpeechSeq2Seq",
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            encoder_num_hidden_layers=2,
            decoder_num_hidden_layers=2,
            encoder_num_attention_heads=4,
            decoder_num_attention_heads=4,
            max_position_embeddings=64,
            decoder_start_token_id=0,
            eos_token_id=None,
        ),
        lambda: {"input_values": _random(2, 2000), "decoder_input_ids": _ids(2)},
        tied=True,
        generates=True,
        rounded=r"encoder\.conv1\.tt\.cores\.0$",
    ),
    # text and images
    Family(
        "blip",
        hugging_face(
            "blip",
            "",
            text_config={**TEXT, "projection_dim": 32, "encoder_hidden_size": 64},
            vision_config={**ENCODER, "image_size": 32, "patch_size": 8, "projection_dim": 32},
            projection_dim=32,
            image_text_hidden_size=32,
        ),
        text_and_image,
    ),
    Family(
        "llava",
        hugging_face(
            "llava",
            "ForImageTextToText",
            text_config={"model_type": "llama", **DECODER},
            vision_config={"model_type": "clip_vision_model", **ENCODER, "image_size": 32, "patch_size": 8},
            image_token_id=5,
            image_seq_length=16,
        ),
        captioned,
    ),
    Family(
        "qwen2_vl",
        hugging_face(
            "qwen2_vl",
            "ForImageTextToText",
            text_config={**DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            vision_config={"depth": 2, "embed_dim": 64, "num_heads": 4, "patch_size": 8, "hidden_size": 64},
        ),
        text,
    ),
    # series, trajectories
    Family(
        "patchtst",
        configured(
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            num_input_channels=2,
            context_length=32,
            patch_length=4,
            patch_stride=4,
            prediction_length=8,
            d_model=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=128,
            scaling=None,
        ),
        series,
    ),
    Family(
        "decision transformer",
        configured(
            "DecisionTransformerModel",
            "DecisionTransformerConfig",
            state_dim=8,
            act_dim=4,
            hidden_size=64,
            n_layer=2,
            n_head=4,
            n_inner=128,
            max_ep_len=32,
        ),
        trajectory,
    ),
    # other libraries
    Family(
        "diffusers' DiT",
        class_of(
            "diffusers.DiTTransformer2DModel",
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=4,
            num_layers=2,
            sample_size=8,
            num_embeds_ada_norm=10,
        ),
        noisy_latents,
        shortfalls=_OWN_SAVER,
        needs=("diffusers",),
    ),
    Family(
        "diffusers' UNet",
        class_of(
            "diffusers.UNet2DModel",
            sample_size=16,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
        ),
        noisy_images,
        shortfalls=_OWN_SAVER,
        needs=("diffusers",),
    ),
    Family(
        "neuraloperator's FNO",
        class_of("neuralop.models.FNO", n_modes=(4, 4), in_channels=3, out_channels=1, hidden_channels=32, n_layers=2),
        images,
        double=False,
        shortfalls={
            "conversion": Shortfall(
                "Its spectral weights are complex tensors and stay dense.", "expected 80% in compressed"
            ),
            "compile": Shortfall(
                "tensorly's products cannot be traced, dense ones neither.", "how to trace the builtin"
            ),
        },
        needs=("neuralop",),
    ),
    Family("nn.Transformer", Seq2Seq, vectors),
    Family("nn.LSTM", Recurrent, sequence, tied=True, shortfalls=NO_BLOCKS),
    Family(
        "timm's ViT",
        class_of(
            "timm.models.vision_transformer.VisionTransformer",
            img_size=32,
            patch_size=8,
            embed_dim=64,
            depth=2,
            num_heads=4,
            num_classes=10,
        ),
        images,
        needs=("timm", "torchvision"),
    ),
    Family(
        "timm's MLP-Mixer",
        class_of(
            "timm.models.mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=64, num_blocks=2, num_classes=10
        ),
        images,
        needs=("timm", "torchvision"),
    ),
    Family(
        "torchvision's ViT",
        class_of(
            "torchvision.models.VisionTransformer",
            image_size=32,
            patch_size=8,
            num_layers=2,
            num_heads=4,
            hidden_dim=64,
            mlp_dim=128,
        ),
        images,
        needs=("torchvision",),
    ),
    Family(
        "torchvision's Swin",
        class_of(
            "torchvision.models.SwinTransformer",
            patch_size=[4, 4],
            embed_dim=32,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=[4, 4],
        ),
        images,
        needs=("torchvision",),
    ),
)
