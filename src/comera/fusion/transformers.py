"""What `fuse_` knows of Hugging Face's models: the one table of their modules, and their attention function.

Modules are named by where they are defined, so that transformers is never imported from here. To add a model family,
add its modules to the table and the family to the tests in tests/unit/fusion.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from comera.fusion.causal_lm import CausalLM
from comera.fusion.decoder_attention import OURS, STOCK, RotaryAttention, attend
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm
from comera.fusion.pre_norm import PreNorm
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, register_block
from comera.fusion.residual import ResidualNorm, add_and_norm

_Patterns = Mapping[str, BlockPattern | tuple[BlockPattern, ...]]  # by the end of a module's name


def _bert_output(layer: Any, input: Tensor, output: Tensor) -> Tensor:
    return add_and_norm(output, input, layer.output.dropout, layer.output.LayerNorm)


def _gpt2_output(mlp: Any, input: Tensor, output: Tensor) -> Tensor:
    return mlp.dropout(output)  # type: ignore[no-any-return]


_BERT_QKV = QKV(("query", "key", "value"))
_BERT_MLP = MLP(
    method="feed_forward_chunk",
    ups=("intermediate.dense",),
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    finish=_bert_output,
)
_LLAMA_QKV = QKV(("q_proj", "k_proj", "v_proj"))
_LLAMA_MLP = MLP(method="forward", ups=("gate_proj", "up_proj"), activation="act_fn", down="down_proj")
_GPT2_MLP = MLP(method="forward", ups=("c_fc",), activation="act", down="c_proj", finish=_gpt2_output)

_LLAMA_ATTENTION = (_LLAMA_QKV, RotaryAttention(_LLAMA_QKV))
_PHI_ATTENTION = (_LLAMA_QKV, RotaryAttention(_LLAMA_QKV, output="dense", norms=("q_layernorm", "k_layernorm")))

_BERT = {"SelfAttention": _BERT_QKV, "Layer": _BERT_MLP, "SelfOutput": ResidualNorm(), "Output": ResidualNorm()}
# Gemma 2 and 3 have a norm after attention and MLP too, Granite scales what it adds to the residual sum and its logits.
_SCALED: _Patterns = {
    "Attention": _LLAMA_ATTENTION,
    "MLP": _LLAMA_MLP,
    "RMSNorm": RMSNorm(eps="variance_epsilon"),
}
_LLAMA = {**_SCALED, "DecoderLayer": PreNorm(), "ForCausalLM": CausalLM()}
_GEMMA2 = {**_SCALED, "Attention": _LLAMA_QKV, "RMSNorm": RMSNorm(offset=1.0)}  # caps its scores
_GEMMA3 = {**_GEMMA2, "Attention": _LLAMA_ATTENTION}
_GEMMA = {**_GEMMA3, "DecoderLayer": PreNorm()}

# family: where its modules are defined, and the prefix of their names
FAMILIES: dict[str, _Patterns] = {
    "bert.modeling_bert.Bert": _BERT,
    "roberta.modeling_roberta.Roberta": _BERT,
    "llama.modeling_llama.Llama": _LLAMA,
    "mistral.modeling_mistral.Mistral": _LLAMA,
    "qwen2.modeling_qwen2.Qwen2": _LLAMA,
    "qwen3.modeling_qwen3.Qwen3": _LLAMA,
    "smollm3.modeling_smollm3.SmolLM3": {**_LLAMA, "Attention": _LLAMA_QKV},  # without positions in some layers
    "granite.modeling_granite.Granite": _SCALED,
    "gemma.modeling_gemma.Gemma": _GEMMA,
    "gemma2.modeling_gemma2.Gemma2": _GEMMA2,
    "gemma3.modeling_gemma3.Gemma3": _GEMMA3,
    "phi.modeling_phi.Phi": {"Attention": _PHI_ATTENTION},
    "gpt2.modeling_gpt2.GPT2": {"MLP": _GPT2_MLP, "LMHeadModel": CausalLM()},
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
    swap = OURS if enabled else {ours: stock for stock, ours in OURS.items()}
    fused: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel):
            if (other := swap.get(module.config._attn_implementation)) is not None:
                module.set_attn_implementation(other)
            if module.config._attn_implementation in swap.values():
                fused.append(name)
            else:
                left[name] = f"it uses the attention {module.config._attn_implementation!r}, not {STOCK!r}"
    return fused, left


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if OURS[STOCK] not in AttentionInterface._global_mapping:
        for name in OURS.values():
            AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(OURS[STOCK], sdpa_mask)
