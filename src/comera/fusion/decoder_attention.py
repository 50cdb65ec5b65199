"""The attention of Hugging Face's models: rotary embedding and causal attention as one operation each (ops/).

`attend` is what their modules call for attention, by the names in `OURS`. `RotaryAttention` runs the forward of such a
module with another rotary embedding.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.obstacles import replaced_obstacle
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, StandIn, own_type, resolved
from comera.fusion.same_code import code_of, held_by, innermost
from comera.kernels.tracing import traced
from comera.ops.attention import attention
from comera.ops.rotary import rotary

STOCK = "sdpa"
"""Name of torch's fused attention, among the attention functions of transformers."""
CAUSAL = "sdpa_causal"
"""Name of the same for texts without padding, as a recipe registers it. For a name that it does not know transformers
makes and checks no mask, so steps do not synchronize."""
OURS = {STOCK: "comera", CAUSAL: "comera_causal"}
"""Names of our attention by the names that it replaces."""

_ROTARY = "apply_rotary_pos_emb"
_ROTARIES = ("transformers.models.llama.modeling_llama", "transformers.models.modernbert.modeling_modernbert")
"""Modules of transformers whose function of that name computes what `rotary` does."""


@dataclass(frozen=True)
class RotaryAttention(BlockPattern):
    """How an attention module with rotary embedding holds its projections. Its forward calls `apply_rotary_pos_emb` of
    its file, with the code of Llama's.

    qkv: the projections, which run as one product where they can; or one layer that gives all three concatenated.
    output, norms, dropout: without effect; they named what else the forward calls.

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
    whole = False  # but for the rotary embedding

    @property
    def names(self) -> tuple[str, ...]:
        return *self.qkv.names, _ROTARY

    def obstacle(self, module: nn.Module) -> str | None:
        if (reason := replaced_obstacle(module, self)) is not None:
            return reason
        used = innermost(own_type(module).forward).__globals__.get(_ROTARY)
        return None if _is_known_rotary(used) else f"its {_ROTARY} is not one that is known"

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if traced() or self.obstacle(module):
            return self.qkv.run(module, cache, *args, **kwargs)
        forward = _with_globals(own_type(module).forward, {_ROTARY: _turned})
        return forward(StandIn(module, self.qkv.stand_ins(module, cache, **kwargs)), *args, **kwargs)


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' `apply_rotary_pos_emb`."""
    if unsqueeze_dim == 1:
        return rotary(q, k, cos, sin)
    q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _is_known_rotary(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    files = (resolved(file, function.__module__) for file in _ROTARIES)
    known = (code_of(file, _ROTARY) for file in files if file is not None)
    return any(code.content == code_of(function).content and not code.changed_whole for code in known)


def _with_globals(function: Any, replaced: Mapping[str, Any]) -> Callable[..., Any]:
    """A copy of a function, decorators included, for which some names of its file mean something else."""
    inner = getattr(function, "__wrapped__", None)
    names, cells = function.__globals__, function.__closure__
    if isinstance(inner, FunctionType):
        other = CellType(_with_globals(inner, replaced))
        cells = tuple(other if held_by(cell) is inner else cell for cell in cells or ())
    else:
        names = {**names, **replaced}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


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

    Heads (B, H, T, D) -> (B, T, H, D). What ops.attention does not define goes to "sdpa" itself: a position bias, a
    soft cap, and causal attention where there are other keys than the queries' own.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal and attention_mask is None and query.shape[2] != 1  # as "sdpa" has it: one query sees all keys
    stock = any(others.get(name) is not None for name in ("position_bias", "softcap"))
    compiled = torch.compiler.is_compiling()
    stock = stock or (causal and (compiled or query.shape[2] != key.shape[2]))
    if stock or (not compiled and stock_obstacle()):
        stock_attention = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS[STOCK]
        found: tuple[Tensor, None] = stock_attention(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return found
    o_BHTD = attention(query, key, value, attention_mask, dropout=dropout, scale=scaling, is_causal=causal)
    return o_BHTD.transpose(1, 2).contiguous(), None


def stock_obstacle(file: ModuleType | None = None) -> str | None:
    """Why `attend` cannot stand in for the "sdpa" of transformers; None if it can. file: of a model, which may have
    other attention functions."""
    library = sys.modules["transformers.modeling_utils"]
    used = getattr(file, "ALL_ATTENTION_FUNCTIONS", library.ALL_ATTENTION_FUNCTIONS)[STOCK]
    own = sys.modules["transformers.integrations.sdpa_attention"]
    if used is not own.sdpa_attention_forward:
        return f"its attention {STOCK!r} is not transformers' own"
    return code_of(own, "sdpa_attention_forward").changed_whole
