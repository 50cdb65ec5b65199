"""fuse_: what surrounds the compressed layers of a model, made as cheap as they are.

Once products are ten times smaller, masks of dropout, score matrices of attention and wide activations decide the time
and the memory of a step. `fuse_` replaces six things in place; parameters, their names and the results stay.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera.fusion.merge_cache import merge_together_
from comera.fusion.mlp import fuse_feed_forward_
from comera.fusion.qkv import share_inputs_
from comera.fusion.residual import fuse_residual_norms_
from comera.kernels import select
from comera.ops.attention import attention
from comera.ops.dropout import Dropout

_NAME = "comera"  # among the attention functions of transformers
_STOCK = "sdpa"


@dataclass(frozen=True)
class FuseReport:
    """What `fuse_` found. feed_forward, residual: names of the modules. shared_input: names of attention modules whose
    queries, keys and values are made together. merged: how many chains are merged together. dropout: how many.
    attention: of transformers, or not. no_kernels: why there are no native kernels for a CPU, None where there are."""

    feed_forward: tuple[str, ...]
    residual: tuple[str, ...]
    shared_input: tuple[str, ...]
    merged: int
    dropout: int
    attention: bool
    no_kernels: str | None = None

    def __str__(self) -> str:
        shared = f"{len(self.shared_input)} groups of projections"
        parts = [f"{len(self.feed_forward)} feed-forward parts", shared, f"{self.merged} chains merged together"]
        parts += [f"{len(self.residual)} residual norms", f"{self.dropout} dropouts"]
        kernels = f"; no native kernels for the CPU: {self.no_kernels}" if self.no_kernels else ""
        return ", ".join([*parts, "attention"] if self.attention else parts) + kernels


def fuse_(model: nn.Module, *, enabled: bool = True) -> FuseReport:
    """Make the surroundings of compressed layers cheap, in place; `enabled=False` takes it back.

    - Feed-forward parts of tensor trains (of registered types, see `register_feed_forward`) never hold their wide
      activation.
    - Layer norm of a residual sum, in modules of transformers that end with one, takes one pass over memory on a CPU.
    - Queries, keys and values of attention modules of transformers come from one product with their input.
    - Chains of the same modes are merged together, once in a forward of `model`, however often their layers are called.
    - `nn.Dropout` draws cheaper masks on a CPU: other random numbers than before from the same seed.
    - Models of transformers with its stock fused attention get `nn.attention`, for dropout on a CPU.

    Results are the same to rounding, but for dropout's masks. Calling it again changes nothing. Returns what was found.
    """
    feed_forward = fuse_feed_forward_(model, enabled=enabled)
    residual = fuse_residual_norms_(model, enabled=enabled)
    shared_input = share_inputs_(model, enabled=enabled)
    merged = merge_together_(model, enabled=enabled)
    kinds = (nn.Dropout, Dropout) if enabled else (Dropout, nn.Dropout)
    count = 0
    for module in model.modules():
        if type(module) in kinds:
            module.__class__ = kinds[1]  # the same object, under the class that draws as wanted
            count += 1
    found = (tuple(feed_forward), tuple(residual), tuple(shared_input))
    return FuseReport(*found, merged, count, _fuse_attention_(model, enabled), select.unavailable_reason())


def _fuse_attention_(model: nn.Module, enabled: bool) -> bool:
    """Let the models of transformers inside `model` that use its fused attention use ours, or the other way round."""
    library = sys.modules.get("transformers.modeling_utils")  # never imported from here
    if library is None:
        return False
    _register()
    here, there = (_STOCK, _NAME) if enabled else (_NAME, _STOCK)
    found = False
    for module in model.modules():
        if isinstance(module, library.PreTrainedModel):
            if module.config._attn_implementation == here:
                module.set_attn_implementation(there)
            found |= module.config._attn_implementation == there
    return found


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
