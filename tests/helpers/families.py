"""Small models of families of transformers beyond BERT's and Llama's, what they read, and one forward and backward."""

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
    "vit": ("vit", "ImageClassification", SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 7}),
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
}
FORMATS = {"dense": None, "tt": comera.TT(order=4, rank=6), "btt": comera.BTT(rank=1)}
CAUSAL = ("gpt2", "opt", "opt, post-norm")


def model(name: str, form: str = "tt", drop: float = 0.0, **sizes: Any) -> Any:
    torch.manual_seed(0)
    kind, head, own = MODELS[name]
    config = AutoConfig.for_model(kind, **own | sizes)
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, drop)
    made = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    for parameter in made.parameters():  # norms away from 1, biases away from 0
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.5)
    if (linear := FORMATS[form]) is not None:
        comera.tensorize_(made, comera.TensorizeConfig(linear=linear, embedding=None))
    return made.train()


def inputs(name: str, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(6, 3, 32, 32, generator=generator), "labels": torch.arange(6)}
    ids = torch.randint(3, 50, (4, 20), generator=generator)
    found = {"input_ids": ids, "labels": ids.flip(1)}
    if padded:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][1, 13:] = 0
    return found


def trained(made: Any, name: str, **options: Any) -> dict[str, Tensor]:
    """The loss, the logits and all gradients."""
    torch.manual_seed(1)
    made.zero_grad()
    out = made(**inputs(name) | options)
    out.loss.backward()
    grads = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    return {"loss": out.loss.detach(), "logits": out.logits.detach(), **grads}
