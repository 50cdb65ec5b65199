"""What `fuse_` knows of Hugging Face's models: the one table of their modules, and their attention function.

Modules are named by where they are defined, so that transformers is never imported from here. Families whose code is a
copy need no entry (same_code.py): Marian, Pegasus and Blenderbot are found by BART's and mBART's. To add a family that
needs one, add its modules to the table and the family to the tests in tests/unit/fusion.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from comera.fusion.causal_lm import CausalLM
from comera.fusion.decoder_attention import OURS, STOCK, RotaryAttention, attend, stock_obstacle
from comera.fusion.embedding_norm import EmbeddingNorm
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm
from comera.fusion.post_norm import PostNorm, ResidualNorm
from comera.fusion.pre_norm import PreNorm
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, Inner, register_block

_Patterns = Mapping[str, BlockPattern | tuple[BlockPattern, ...]]  # by the end of a module's name

_BERT_QKV = QKV(("query", "key", "value"))
_BERT_MLP = MLP(
    method="feed_forward_chunk",
    ups=("intermediate.dense",),
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
)
_LLAMA_QKV = QKV(("q_proj", "k_proj", "v_proj"))
_LLAMA_MLP = MLP(method="forward", ups=("gate_proj", "up_proj"), activation="act_fn", down="down_proj")
_GPT2_MLP = MLP(method="forward", ups=("c_fc",), activation="act", down="c_proj")
_OPT_MLP = MLP(method="forward", ups=("fc1",), activation="activation_fn", down="fc2")
_T5_MLP = MLP(method="forward", ups=("wi",), activation="act", down="wo", dropout="dropout")
_T5_GATED_MLP = MLP(method="forward", ups=("wi_0", "wi_1"), activation="act", down="wo", dropout="dropout")
_DISTILBERT_MLP = MLP(method="ff_chunk", ups=("lin1",), activation="activation", down="lin2")
_ALBERT_MLP = MLP(method="ff_chunk", ups=("ffn",), activation="activation", down="ffn_output")
_MODERNBERT_MLP = MLP(method="forward", ups=("Wi",), activation="act", down="Wo", packed=True, dropout="drop")
_BART_MLP = MLP(method="forward", ups=("fc1",), activation="activation_fn", down="fc2", dropout="activation_dropout")
_WAV2VEC2_MLP = MLP(
    method="forward",
    ups=("intermediate_dense",),
    activation="intermediate_act_fn",
    down="output_dense",
    dropout="intermediate_dropout",
)

_LLAMA_ATTENTION = (_LLAMA_QKV, RotaryAttention(_LLAMA_QKV))
# One layer gives all three: there is nothing to gain from QKV by itself.
_MODERNBERT_ATTENTION = RotaryAttention(QKV(("Wqkv",)))

_BERT_EMBEDDINGS = EmbeddingNorm(("token_type_embeddings", "position_embeddings"))
_BERT: _Patterns = {
    "Embeddings": _BERT_EMBEDDINGS,
    "SelfAttention": _BERT_QKV,
    "Layer": _BERT_MLP,
    "Intermediate": Inner(),
    "SelfOutput": ResidualNorm(),
    "Output": ResidualNorm(),
}
_ALBERT: _Patterns = {
    "Embeddings": _BERT_EMBEDDINGS,
    "Attention": (_BERT_QKV, PostNorm((("output_dropout", "LayerNorm"),), qkv=_BERT_QKV)),
    "Layer": (_ALBERT_MLP, PostNorm((("ff_chunk", "full_layer_layer_norm"),))),
}
_DISTILBERT: _Patterns = {
    "Embeddings": EmbeddingNorm(("position_embeddings",)),
    "DistilBertSelfAttention": QKV(("q_lin", "k_lin", "v_lin")),
    "FFN": _DISTILBERT_MLP,
    "TransformerBlock": PostNorm((("attention", "sa_layer_norm"), ("ffn", "output_layer_norm"))),
}
# The first norm of a block follows a sum of the block before, and by itself torch's LayerNorm is as fast as ours. So
# Phi, with one norm for attention and MLP, has nothing to fuse.
_GPT2_BLOCK = PreNorm("ln_1", ("attn.resid_dropout",), "ln_2")
_OPT_BLOCK = PreNorm(
    "self_attn_layer_norm", ("self_attn", "fc2"), "final_layer_norm", mlp=_OPT_MLP, switch="do_layer_norm_before"
)
_MODERNBERT_BLOCK = PreNorm("attn_norm", ("attn",), "mlp_norm")
_VIT_BLOCK = PreNorm("layernorm_before", ("dropout",), "layernorm_after")
_CLIP_BLOCK = PreNorm("layer_norm1", ("self_attn",), "layer_norm2")
_DINOV2_BLOCK = PreNorm("norm1", ("drop_path",), "norm2")
_WAV2VEC2_BLOCK = PreNorm("layer_norm", ("dropout",), "final_layer_norm")
_OPT: _Patterns = {"Attention": _LLAMA_QKV, "DecoderLayer": (_OPT_MLP, _OPT_BLOCK), "ForCausalLM": CausalLM()}
# Logits get a bias, or the loss is no `ForCausalLMLoss`.
_BART_SUMS = (("self_attn", "self_attn_layer_norm"), ("fc2", "final_layer_norm"))
_BART_CROSS_SUM = ("encoder_attn", "encoder_attn_layer_norm")
_BART: _Patterns = {
    "Attention": _LLAMA_QKV,
    "EncoderLayer": (_BART_MLP, PostNorm(_BART_SUMS, mlp=_BART_MLP)),
    "DecoderLayer": (_BART_MLP, PostNorm((*_BART_SUMS, _BART_CROSS_SUM), mlp=_BART_MLP)),
}
_MBART_BLOCK = PreNorm("self_attn_layer_norm", ("self_attn", "fc2"), "final_layer_norm", mlp=_BART_MLP)
_MBART_CROSS_BLOCK = PreNorm(
    "self_attn_layer_norm",
    ("self_attn", "encoder_attn", "fc2"),
    "final_layer_norm",
    mlp=_BART_MLP,
    others=("encoder_attn_layer_norm",),
)
_MBART: _Patterns = {
    "Attention": _LLAMA_QKV,
    "EncoderLayer": (_BART_MLP, _MBART_BLOCK),
    "DecoderLayer": (_BART_MLP, _MBART_CROSS_BLOCK),
}
_CLIP: _Patterns = {"Attention": _LLAMA_QKV, "MLP": _OPT_MLP, "EncoderLayer": _CLIP_BLOCK}
_WAV2VEC2: _Patterns = {
    "Attention": _LLAMA_QKV,
    "FeedForward": _WAV2VEC2_MLP,
    "EncoderLayer": PostNorm((("dropout", "layer_norm"), ("feed_forward", "final_layer_norm"))),
    "EncoderLayerStableLayerNorm": _WAV2VEC2_BLOCK,
}
# Scores get a learned bias, so attention itself stays transformers'. Sums are in other modules than the norms that
# follow them, and the loss is no `ForCausalLMLoss`.
_T5: _Patterns = {
    "Attention": QKV(("q", "k", "v")),
    "DenseActDense": _T5_MLP,
    "DenseGatedActDense": _T5_GATED_MLP,
    "LayerNorm": RMSNorm(eps="variance_epsilon"),
}
# Gemma 2 and 3 have a norm after attention and MLP too, Granite scales what it adds to the residual sum and its logits.
_SCALED: _Patterns = {
    "Attention": _LLAMA_ATTENTION,
    "MLP": _LLAMA_MLP,
    "RMSNorm": RMSNorm(eps="variance_epsilon"),
}
_LLAMA = {**_SCALED, "DecoderLayer": PreNorm(), "ForCausalLM": CausalLM()}
_GEMMA3 = {**_SCALED, "RMSNorm": RMSNorm(offset=1.0)}
_GEMMA = {**_GEMMA3, "DecoderLayer": PreNorm(), "ForCausalLM": CausalLM()}

# family: where its modules are defined, and the prefix of their names
FAMILIES: dict[str, _Patterns] = {
    "bert.modeling_bert.Bert": _BERT,
    "roberta.modeling_roberta.Roberta": _BERT,
    "electra.modeling_electra.Electra": _BERT,
    "distilbert.modeling_distilbert.": _DISTILBERT,
    "albert.modeling_albert.Albert": _ALBERT,
    "modernbert.modeling_modernbert.ModernBert": {
        "Attention": _MODERNBERT_ATTENTION,
        "MLP": _MODERNBERT_MLP,
        "EncoderLayer": _MODERNBERT_BLOCK,
    },
    "vit.modeling_vit.ViT": {"Attention": _LLAMA_QKV, "MLP": _OPT_MLP, "Layer": _VIT_BLOCK},
    "dinov2.modeling_dinov2.Dinov2": {
        "Attention": _LLAMA_QKV,
        "MLP": _OPT_MLP,
        "SwiGLUFFN": _LLAMA_MLP,
        "Layer": _DINOV2_BLOCK,
    },
    "clip.modeling_clip.CLIP": _CLIP,
    "siglip.modeling_siglip.Siglip": {"Attention": _LLAMA_QKV},
    "wav2vec2.modeling_wav2vec2.Wav2Vec2": _WAV2VEC2,
    "t5.modeling_t5.T5": _T5,
    "bart.modeling_bart.Bart": _BART,
    "mbart.modeling_mbart.MBart": _MBART,
    "whisper.modeling_whisper.Whisper": _MBART,
    "llama.modeling_llama.Llama": _LLAMA,
    "mistral.modeling_mistral.Mistral": _LLAMA,
    "qwen2.modeling_qwen2.Qwen2": _LLAMA,
    "qwen3.modeling_qwen3.Qwen3": _LLAMA,
    "smollm3.modeling_smollm3.SmolLM3": _LLAMA,
    "granite.modeling_granite.Granite": _SCALED,
    "gemma.modeling_gemma.Gemma": _GEMMA,
    "gemma2.modeling_gemma2.Gemma2": _GEMMA3,
    "gemma3.modeling_gemma3.Gemma3": _GEMMA3,
    "phi.modeling_phi.Phi": {"Attention": _LLAMA_ATTENTION, "MLP": _OPT_MLP},
    "opt.modeling_opt.OPT": _OPT,
    "gpt2.modeling_gpt2.GPT2": {"MLP": _GPT2_MLP, "Block": _GPT2_BLOCK, "LMHeadModel": CausalLM()},
}
TABLE = {family + part: patterns for family, parts in FAMILIES.items() for part, patterns in parts.items()}
for _path, _patterns in TABLE.items():
    register_block(f"transformers.models.{_path}", *(_patterns if isinstance(_patterns, tuple) else (_patterns,)))


def fuse_attention_(model: nn.Module, *, enabled: bool) -> tuple[list[str], dict[str, str]]:
    """Let the models of transformers inside `model` use our attention in place of torch's fused one, or back.

    Returns the names of those that fit, and of the others with the reason.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return [], {}
    _register()
    back = {ours: stock for stock, ours in OURS.items()}
    for config in _configs(model):
        config._attn_implementation_internal = back.get(config._attn_implementation, config._attn_implementation)
    names = {name: module for name, module in model.named_modules() if isinstance(module, library.PreTrainedModel)}
    reasons = {name: reason for name, module in names.items() if (reason := _attention_obstacle(module))}
    fused = [name for name in names if name not in reasons]
    kept = {id(names[name].config) for name in reasons}
    for config in (config for name in fused for config in _configs(names[name]) if enabled and id(config) not in kept):
        config._attn_implementation_internal = OURS.get(config._attn_implementation, config._attn_implementation)
    return fused, reasons


def _configs(model: nn.Module) -> Iterator[Any]:
    """The configurations by which modules of transformers choose their attention."""
    found = (getattr(module, "config", None) for module in model.modules())
    return (config for config in found if hasattr(config, "_attn_implementation_internal"))


def _attention_obstacle(model: Any) -> str | None:
    """Why a model cannot use our attention; None if it can."""
    used = model.config._attn_implementation
    if used not in OURS:
        return f"it uses the attention {used!r}, not {STOCK!r}"
    if not model._can_set_attn_implementation():
        return "its code calls torch's attention itself"
    return stock_obstacle(sys.modules.get(type(model).__module__))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if OURS[STOCK] not in AttentionInterface._global_mapping:
        for name in OURS.values():
            AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(OURS[STOCK], sdpa_mask)
