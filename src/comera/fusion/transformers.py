"""What `fuse_` knows of Hugging Face's models and of PyTorch's own layers: the one table of their blocks; and the
attention function of the former.

Blocks are named by where they are defined, so that transformers is never imported from here. A family whose code is a
copy needs no entry (same_code.py): Mistral's MLP is found by Llama's, Marian by BART. To add a block, add it to the
table and its family to the tests in tests/unit/fusion.

Of PyTorch's transformer layers the attention stays torch's. So does the fast path that an encoder layer takes without
gradients in evaluation: its forward runs as it is, on a stand-in that shows it the weights of the layer.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from comera.fusion.causal_lm import CausalLM
from comera.fusion.decoder_attention import OURS, STOCK, RotaryAttention, attend, stock_obstacle
from comera.fusion.embedding_norm import EmbeddingNorm
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, Inner, register_block
from comera.fusion.residual_blocks import PostNorm, PreNorm, ResidualNorm

_LLAMA_QKV = QKV(("q_proj", "k_proj", "v_proj"))
_LLAMA_ATTENTION = (_LLAMA_QKV, RotaryAttention(_LLAMA_QKV))
_BERT_QKV = QKV(("query", "key", "value"))
_BERT_EMBEDDINGS = EmbeddingNorm(("token_type_embeddings", "position_embeddings"))
_OPT_MLP = MLP("forward", ups=("fc1",), activation="activation_fn", down="fc2")
_BART_MLP = MLP("forward", ups=("fc1",), activation="activation_fn", down="fc2", dropout="activation_dropout")
_BART_SUMS = (("self_attn", "self_attn_layer_norm"), ("fc2", "final_layer_norm"))
_BART_CROSS_SUM = ("encoder_attn", "encoder_attn_layer_norm")
_MBART_BLOCK = PreNorm("self_attn_layer_norm", ("self_attn", "fc2"), "final_layer_norm", mlp=_BART_MLP)
_MBART_CROSS_BLOCK = replace(
    _MBART_BLOCK, parts=("self_attn", "encoder_attn", "fc2"), others=("encoder_attn_layer_norm",)
)

_TORCH_MLP = MLP("_ff_block", ups=("linear1",), activation="activation", down="linear2", dropout="dropout")
# The same names whether norms come first or not; in the latter case every norm follows a sum.
_TORCH_SUMS = PreNorm("norm1", ("_sa_block.dropout1", "_ff_block.dropout2"), "norm2", switch="norm_first")
_TORCH_CROSS_SUMS = replace(
    _TORCH_SUMS, parts=("_sa_block.dropout1", "_mha_block.dropout2", "_ff_block.dropout3"), others=("norm3",)
)

# One of all blocks that are the same code, by file and name. Not fused are
# - losses that are no `ForCausalLMLoss`, or whose logits get a bias (BART's and T5's),
# - T5's attention, whose scores get a learned bias, and its sums, which are in other modules than their norms,
# - the sums of Gemma 2 and 3, which have norms after attention and MLP, too, and of Granite, which scales what it adds,
# - LayerNorm by itself, as torch's is as fast as ours: the first norm of a block, and Phi's, of attention and MLP both.
BLOCKS: dict[str, BlockPattern | tuple[BlockPattern, ...]] = {
    "bert.BertEmbeddings": _BERT_EMBEDDINGS,
    "bert.BertSelfAttention": _BERT_QKV,
    "bert.BertLayer": MLP(
        "feed_forward_chunk",
        ups=("intermediate.dense",),
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
    ),
    "bert.BertIntermediate": Inner(),
    "bert.BertOutput": ResidualNorm(),
    "roberta.RobertaEmbeddings": _BERT_EMBEDDINGS,
    "distilbert.Embeddings": EmbeddingNorm(("position_embeddings",)),
    "distilbert.DistilBertSelfAttention": QKV(("q_lin", "k_lin", "v_lin")),
    "distilbert.FFN": MLP("ff_chunk", ups=("lin1",), activation="activation", down="lin2"),
    "distilbert.TransformerBlock": PostNorm((("attention", "sa_layer_norm"), ("ffn", "output_layer_norm"))),
    "albert.AlbertEmbeddings": _BERT_EMBEDDINGS,
    "albert.AlbertAttention": (_BERT_QKV, PostNorm((("output_dropout", "LayerNorm"),), qkv=_BERT_QKV)),
    "albert.AlbertLayer": (
        MLP("ff_chunk", ups=("ffn",), activation="activation", down="ffn_output"),
        PostNorm((("ff_chunk", "full_layer_layer_norm"),)),
    ),
    "modernbert.ModernBertAttention": RotaryAttention(QKV(("Wqkv",))),  # one layer gives all three
    "modernbert.ModernBertMLP": MLP("forward", ups=("Wi",), activation="act", down="Wo", packed=True, dropout="drop"),
    "modernbert.ModernBertEncoderLayer": PreNorm("attn_norm", ("attn",), "mlp_norm"),
    "vit.ViTAttention": _LLAMA_QKV,
    "vit.ViTLayer": PreNorm("layernorm_before", ("dropout",), "layernorm_after"),
    "dinov2.Dinov2Layer": PreNorm("norm1", ("drop_path",), "norm2"),
    "clip.CLIPAttention": _LLAMA_QKV,
    "clip.CLIPMLP": _OPT_MLP,
    "clip.CLIPEncoderLayer": PreNorm("layer_norm1", ("self_attn",), "layer_norm2"),
    "siglip.SiglipAttention": _LLAMA_QKV,
    "wav2vec2.Wav2Vec2Attention": _LLAMA_QKV,
    "wav2vec2.Wav2Vec2FeedForward": MLP(
        "forward",
        ups=("intermediate_dense",),
        activation="intermediate_act_fn",
        down="output_dense",
        dropout="intermediate_dropout",
    ),
    "wav2vec2.Wav2Vec2EncoderLayer": PostNorm((("dropout", "layer_norm"), ("feed_forward", "final_layer_norm"))),
    "wav2vec2.Wav2Vec2EncoderLayerStableLayerNorm": PreNorm("layer_norm", ("dropout",), "final_layer_norm"),
    "t5.T5Attention": QKV(("q", "k", "v")),
    "t5.T5DenseActDense": MLP("forward", ups=("wi",), activation="act", down="wo", dropout="dropout"),
    "t5.T5DenseGatedActDense": MLP("forward", ups=("wi_0", "wi_1"), activation="act", down="wo", dropout="dropout"),
    "t5.T5LayerNorm": RMSNorm(eps="variance_epsilon"),
    "bart.BartAttention": _LLAMA_QKV,
    "bart.BartEncoderLayer": (_BART_MLP, PostNorm(_BART_SUMS, mlp=_BART_MLP)),
    "bart.BartDecoderLayer": (_BART_MLP, PostNorm((*_BART_SUMS, _BART_CROSS_SUM), mlp=_BART_MLP)),
    "mbart.MBartEncoderLayer": (_BART_MLP, _MBART_BLOCK),
    "mbart.MBartDecoderLayer": (_BART_MLP, _MBART_CROSS_BLOCK),
    "whisper.WhisperAttention": _LLAMA_QKV,
    "whisper.WhisperDecoderLayer": (_BART_MLP, _MBART_CROSS_BLOCK),
    "llama.LlamaAttention": _LLAMA_ATTENTION,
    "llama.LlamaMLP": MLP("forward", ups=("gate_proj", "up_proj"), activation="act_fn", down="down_proj"),
    "llama.LlamaRMSNorm": RMSNorm(eps="variance_epsilon"),
    "llama.LlamaDecoderLayer": PreNorm(),
    "llama.LlamaForCausalLM": CausalLM(),
    "mistral.MistralAttention": _LLAMA_ATTENTION,
    "qwen2.Qwen2Attention": _LLAMA_ATTENTION,
    "qwen3.Qwen3Attention": _LLAMA_ATTENTION,
    "smollm3.SmolLM3Attention": _LLAMA_ATTENTION,
    "gemma2.Gemma2Attention": _LLAMA_ATTENTION,
    "gemma3.Gemma3Attention": _LLAMA_ATTENTION,
    "gemma3.Gemma3RMSNorm": RMSNorm(offset=1.0),
    "phi.PhiAttention": _LLAMA_ATTENTION,
    "opt.OPTAttention": _LLAMA_QKV,
    "opt.OPTDecoderLayer": (_OPT_MLP, replace(_MBART_BLOCK, mlp=_OPT_MLP, switch="do_layer_norm_before")),
    "opt.OPTForCausalLM": CausalLM(),
    "gpt2.GPT2MLP": MLP("forward", ups=("c_fc",), activation="act", down="c_proj"),
    "gpt2.GPT2Block": PreNorm("ln_1", ("attn.resid_dropout",), "ln_2"),
    "gpt2.GPT2LMHeadModel": CausalLM(),
}
for _path, _patterns in BLOCKS.items():
    _family, _, _name = _path.partition(".")
    _given = _patterns if isinstance(_patterns, tuple) else (_patterns,)
    register_block(f"transformers.models.{_family}.modeling_{_family}.{_name}", *_given)
register_block("torch.nn.modules.transformer.TransformerEncoderLayer", _TORCH_MLP, _TORCH_SUMS)
register_block("torch.nn.modules.transformer.TransformerDecoderLayer", _TORCH_MLP, _TORCH_CROSS_SUMS)


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
