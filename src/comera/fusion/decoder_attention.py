"""The attention of Hugging Face's models: rotary embedding and causal attention as one operation each (ops/).

`attend` is what their modules call for attention, by the names in `OURS`; `RotaryAttention` is the forward of such a
module, written out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, replaced_obstacle, submodule
from comera.kernels.tracing import traced
from comera.ops.attention import attention
from comera.ops.rotary import rotary

STOCK = "sdpa"
"""Name of torch's fused attention, among the attention functions of transformers."""
CAUSAL = "sdpa_causal"
"""Of the same for texts without padding, as a recipe registers it: under a name that transformers does not know no mask
is made and none checked, so steps do not synchronize."""
OURS = {STOCK: "comera", CAUSAL: "comera_causal"}
"""Names of our attention by those that it replaces."""

_ARGUMENTS = ("hidden_states", "position_embeddings", "attention_mask", "past_key_values")


@dataclass(frozen=True)
class RotaryAttention(BlockPattern):
    """How an attention module with rotary embedding holds its parts, for a forward as Llama's.

    qkv: its projections, which run as one product where they can; or one layer that gives all three concatenated.
    output: name of the layer after attention. dropout: of what follows that. norms: names of the norms of each head's
    queries and keys, in modules that have them.

    Example:
        >>> from comera.fusion import QKV, RotaryAttention, fuse_, register_block
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaAttention
        >>> class Attention(LlamaAttention):  # of your own model, with the same forward
        ...     pass
        >>> register_block(Attention, RotaryAttention(QKV(("q_proj", "k_proj", "v_proj")), output="o_proj"))
        >>> config = LlamaConfig(hidden_size=64, num_attention_heads=4, attn_implementation="sdpa")
        >>> fuse_(Attention(config, layer_idx=0)).fused("rotary attention")
        ('',)
    """

    qkv: QKV
    output: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")
    dropout: str | None = None
    kind = "rotary attention"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        name = module.config._attn_implementation  # type: ignore[union-attr]
        other = None if name in (*OURS, *OURS.values()) else f"it uses the attention {name!r}, not {STOCK!r}"
        return replaced_obstacle(module, self) or other

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        others = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        x_BTI, angles, mask, past = (others.pop(name, None) for name in _ARGUMENTS)
        unknown = len(args) > len(_ARGUMENTS) or angles is None or others.get("output_attentions")
        if unknown or not isinstance(x_BTI, Tensor) or x_BTI.ndim != 3 or traced() or self.obstacle(module):
            return self.qkv.run(module, cache, *args, **kwargs)
        return self._run(module, cache, x_BTI, angles, mask, past, others), None

    def _run(
        self, module: Any, cache: MergeCache, x_BTI: Tensor, angles: Any, mask: Any, past: Any, others: dict[str, Any]
    ) -> Tensor:
        """Projections, norms, rotary embedding, the cache of generation, attention, output."""
        outputs = self.qkv.outputs(module, cache, x_BTI)
        if outputs is None:
            outputs = [submodule(module, name)(x_BTI) for name in self.qkv.layers]
        if len(outputs) == 1:
            outputs = list(outputs[0].chunk(3, -1))
        q, k, v = (y_BTO.unflatten(-1, (-1, module.head_dim)) for y_BTO in outputs)
        if hasattr(module, self.norms[0]):
            q, k = (submodule(module, name)(heads) for name, heads in zip(self.norms, (q, k), strict=True))
        q, k, v = (heads_BTHD.transpose(1, 2) for heads_BTHD in (q, k, v))
        q, k = rotary(q, k, *angles)
        if past is not None:
            k, v = past.update(k, v, module.layer_idx)
        dropout = module.attention_dropout if module.training else 0.0
        scaling = getattr(module, "scaling", None)  # None: by the width of a head
        o_BTHD, _ = attend(module, q, k, v, mask, dropout=dropout, scaling=scaling, **others)
        y_BTO: Tensor = submodule(module, self.output)(o_BTHD.flatten(2))
        return submodule(module, self.dropout)(y_BTO) if self.dropout else y_BTO  # type: ignore[no-any-return]


def attend(
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
    """An attention function of transformers, with the results of its "sdpa".

    Heads (B, H, T, D) -> (B, T, H, D). What ops.attention does not define goes to "sdpa" itself: a paged cache, a
    position bias, a soft cap, and causal attention where there are other keys than the queries' own.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] != 1  # as "sdpa" has it: one query sees all keys
    stock = others.get("cache") or any(others.get(name) is not None for name in ("position_bias", "softcap"))
    if stock or (causal and (torch.compiler.is_compiling() or query.shape[2] != key.shape[2])):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return found
    o_BHTD = attention(query, key, value, attention_mask, dropout=dropout, scale=scaling, is_causal=causal)
    return o_BHTD.transpose(1, 2).contiguous(), None
