"""Small models of families of transformers beyond BERT's and Llama's, what they read, and one forward and backward."""

from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

import comera

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
T5 = {"d_model": 48, "d_kv": 12, "d_ff": 80, "num_heads": 3, "num_layers": 2, "vocab_size": 50}
T5["decoder_start_token_id"] = 0
BART: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}
VISION = {"image_size": 32, "patch_size": 8}
WAV2VEC2 = SIZES | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 24,
    "num_labels": 7,
    "initializer_range": 0.2,  # with less, hardly anything of the sound reaches the logits
    "apply_spec_augment": False,  # it draws numpy's random numbers
}
# name -> type of configuration, head, sizes
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "electra": ("electra", "MaskedLM", SIZES | {"embedding_size": 24}),
    "distilbert": (
        "distilbert",
        "MaskedLM",
        {"dim": 48, "n_layers": 2, "n_heads": 3, "hidden_dim": 80, "vocab_size": 50, "max_position_embeddings": 64},
    ),
    "albert": ("albert", "MaskedLM", SIZES | {"embedding_size": 24, "inner_group_num": 1}),
    "modernbert": (
        "modernbert",
        "MaskedLM",
        SIZES | {"pad_token_id": 0, "global_attn_every_n_layers": 2, "local_attention": 8, "mlp_bias": True},
    ),
    "vit": ("vit", "ImageClassification", SIZES | VISION | {"num_labels": 7}),
    "dinov2": ("dinov2", "ImageClassification", SIZES | VISION | {"mlp_ratio": 2, "num_labels": 7}),
    "dinov2, gated": (
        "dinov2",
        "ImageClassification",
        SIZES | VISION | {"mlp_ratio": 2, "use_swiglu_ffn": True, "num_labels": 7},
    ),
    "clip": (
        "clip",
        "ImageClassification",
        {"vision_config": SIZES | VISION | {"hidden_act": "gelu"}, "num_labels": 7},
    ),
    "siglip": (
        "siglip",
        "ImageClassification",
        {"vision_config": SIZES | VISION | {"vision_use_head": False}, "num_labels": 7},
    ),
    "wav2vec2": ("wav2vec2", "AudioClassification", WAV2VEC2),
    "wav2vec2, pre-norm": ("wav2vec2", "AudioClassification", WAV2VEC2 | {"do_stable_layer_norm": True}),
    "hubert": ("hubert", "AudioClassification", WAV2VEC2),
    "gpt2": (
        "gpt2",
        "CausalLM",
        {
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 3,
            "n_inner": 80,
            "vocab_size": 50,
            "n_positions": 64,
            "pad_token_id": 1,
        },
    ),
    "opt": ("opt", "CausalLM", SIZES | {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt, post-norm": ("opt", "CausalLM", SIZES | {"ffn_dim": 80, "do_layer_norm_before": False}),
    "t5": ("t5", "Seq2SeqLM", T5 | {"feed_forward_proj": "relu"}),
    "t5, gated": ("t5", "Seq2SeqLM", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", "Seq2SeqLM", BART),
    "plbart": ("plbart", "Seq2SeqLM", BART),
    "marian": ("marian", "Seq2SeqLM", BART),
    "blenderbot small": ("blenderbot-small", "Seq2SeqLM", BART),
    "mbart": ("mbart", "Seq2SeqLM", BART),
    "m2m 100": ("m2m_100", "Seq2SeqLM", BART),
    "pegasus": ("pegasus", "Seq2SeqLM", BART),
    "blenderbot": ("blenderbot", "Seq2SeqLM", BART),
    "whisper": ("whisper", "SpeechSeq2Seq", BART | WHISPER),
}
BARTS = ("bart", "plbart", "marian", "blenderbot small")  # with norms after their sums
MBARTS = ("mbart", "m2m 100", "pegasus", "blenderbot", "whisper")  # with norms before
FORMATS = {"dense": None, "tt": comera.TT(order=4, rank=6), "btt": comera.BTT(rank=1)}
CAUSAL = ("gpt2", "opt", "opt, post-norm")
SEQ2SEQ = tuple(name for name, (_, head, _) in MODELS.items() if "Seq2Seq" in head)


def model(name: str, form: str = "tt", drop: float = 0.0, **sizes: Any) -> Any:
    torch.manual_seed(0)
    kind, head, own = MODELS[name]
    config = AutoConfig.for_model(kind, **own | sizes)
    for each in (config, *(getattr(config, name) for name in config.sub_configs)):
        for key, value in vars(each).items():
            if "drop" in key and isinstance(value, float):
                setattr(each, key, drop)
    made = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for parameter in made.parameters():  # norms away from 1, biases away from 0
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    if (linear := FORMATS[form]) is not None:
        comera.tensorize_(made, comera.TensorizeConfig(linear=linear, embedding=None))
    return made.train()


def inputs(name: str, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    head = MODELS[name][1]
    if head == "ImageClassification":
        return {"pixel_values": torch.randn(6, 3, 32, 32, generator=generator), "labels": torch.arange(6)}
    if head == "AudioClassification":
        return {"input_values": torch.randn(6, 250, generator=generator), "labels": torch.arange(6)}
    ids = torch.randint(3, 50, (4, 20), generator=generator)
    if head == "SpeechSeq2Seq":
        return {"input_features": torch.randn(4, 8, 32, generator=generator), "labels": ids}
    found = {"input_ids": ids, "labels": ids.flip(1)}
    if padded:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][1, 13:] = 0
    return found


def cache_keyword(made: nn.Module) -> str:
    """What a model calls its cache of generation: "cache", until transformers 5.23 "past_key_values"."""
    return "cache" if "cache" in signature(made.forward).parameters else "past_key_values"


def trained(made: Any, name: str, **options: Any) -> dict[str, Tensor]:
    """The loss, the logits and all gradients."""
    torch.manual_seed(1)
    made.zero_grad()
    out = made(**inputs(name) | options)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}
