"""What `fuse_` knows of Hugging Face's models: the one table of their modules, and their attention function.

Modules are named by where they are defined, so that transformers is never imported from here. To add a model family,
add its modules to the table and the family to the tests in tests/unit/fusion.
"""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from comera.fusion.causal_lm import CausalLM
from comera.fusion.mlp import MLP
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, register_block
from comera.fusion.residual import ResidualNorm, add_and_norm
from comera.ops.attention import attention


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

_BERT = {"SelfAttention": _BERT_QKV, "Layer": _BERT_MLP, "SelfOutput": ResidualNorm(), "Output": ResidualNorm()}
_LLAMA = {"Attention": _LLAMA_QKV, "MLP": _LLAMA_MLP, "ForCausalLM": CausalLM()}

# family: where its modules are defined, and the prefix of their names
FAMILIES: dict[str, Mapping[str, BlockPattern]] = {
    "bert.modeling_bert.Bert": _BERT,
    "roberta.modeling_roberta.Roberta": _BERT,
    "llama.modeling_llama.Llama": _LLAMA,
    "mistral.modeling_mistral.Mistral": _LLAMA,
    "qwen2.modeling_qwen2.Qwen2": _LLAMA,
    "qwen3.modeling_qwen3.Qwen3": _LLAMA,
    "gpt2.modeling_gpt2.GPT2": {"MLP": _GPT2_MLP, "LMHeadModel": CausalLM()},
}
TABLE = {family + part: pattern for family, parts in FAMILIES.items() for part, pattern in parts.items()}
for _path, _pattern in TABLE.items():
    register_block(f"transformers.models.{_path}", _pattern)

_NAME = "comera"  # of our attention, among the attention functions of transformers
_STOCK = "sdpa"


def fuse_attention_(model: nn.Module, *, enabled: bool) -> tuple[list[str], dict[str, str]]:
    """Let the models of transformers inside `model` use our attention in place of torch's fused one, or back.

    Returns the names of those that fit, and of the others with the reason.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return [], {}
    _register()
    here, there = (_STOCK, _NAME) if enabled else (_NAME, _STOCK)
    fused: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, library.PreTrainedModel):
            if module.config._attn_implementation == here:
                module.set_attn_implementation(there)
            if module.config._attn_implementation == there:
                fused.append(name)
            else:
                left[name] = f"it uses the attention {module.config._attn_implementation!r}, not {_STOCK!r}"
    return fused, left


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        plain = not (causal and attention_mask is None) and not others.get("cache")
        if not plain or others.get("position_bias") is not None:
            result: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
            )
            return result
        o_BHTD = attention(query, key, value, attention_mask, dropout=dropout, scale=scaling)
        return o_BHTD.transpose(1, 2).contiguous(), None

    if _NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(_NAME, forward)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
