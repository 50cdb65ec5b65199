"""Short causal convolutions, a few taps a channel, before attention and MLP: they let a layer see its neighbors for
almost nothing (Primer, arXiv:2109.08668; Canon layers, Allen-Zhu 2025).

    y_i = Σ_k w_k ⊙ x_{i-k},   w_0 = 1 and the others 0 at first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines.common import Replaced, elements, is_integer
from comera.baselines.narrow import Narrow
from comera.convert.ngrams import CACHES
from comera.errors import ConfigError, check_fields

NORMS = ("input_layernorm", "post_attention_layernorm", "ln_1", "ln_2")


@dataclass(frozen=True)
class NarrowConv(Narrow):
    """A narrow dense model with short causal convolutions before attention and MLP of each block.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from comera.baselines import NarrowConv
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        >>> replaced = NarrowConv(taps=4).apply_(model)
        >>> sum(p.numel() for p in model.parameters()) - replaced.dense_total == 2 * 4 * 64
        True
    """

    dense_layers = False

    taps: int = 4
    """How many positions a convolution sees, its own included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "narrow_conv.", {"taps": (is_integer(self.taps, 2), "an integer >= 2")})

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Any:
        total = elements(model.parameters())
        add_short_convs_(model, self.taps)
        return Replaced((), total)


class ShortConv(nn.Module):
    """y_i = Σ_k w_k ⊙ x_{i-k} over (B, T, width), nothing before the first position.

    Whole sequences only: what earlier calls saw is in no cache.
    """

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.zeros(taps, width))
        nn.init.ones_(self.taps[0])

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.taps[0]
        for k in range(1, len(self.taps)):
            y = y + F.pad(x, (0, 0, k, 0))[:, : x.shape[1]] * self.taps[k]
        return y


def add_short_convs_(model: nn.Module, taps: int) -> None:
    """Let a convolution follow the norms before attention and MLP of each block, in place.

    Raises ConfigError for a model without norms of known names.
    """
    found = [
        (module, name)
        for module in model.modules()
        for name in NORMS
        if isinstance(module._modules.get(name), nn.Module)
    ]
    if not found:
        raise ConfigError(f"expected blocks with one of {', '.join(NORMS)}, got a {type(model).__name__} without")
    for module, name in found:
        norm = module.get_submodule(name)
        (width,) = norm.get_parameter("weight").shape
        conv = ShortConv(width, taps).to(norm.get_parameter("weight").device)
        setattr(module, name, nn.Sequential(norm, conv).train(norm.training))
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    model.register_forward_pre_hook(_refuse_caches, with_kwargs=True)


def _refuse_caches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A call that goes on from an earlier one would be wrong in silence."""
    cache = next((kwargs[name] for name in CACHES if kwargs.get(name) is not None), None)
    if cache is not None and cache.get_seq_length():
        raise ConfigError(
            "expected whole sequences for short convolutions, which keep nothing in a cache, got one with "
            f"{cache.get_seq_length()} positions: generate with use_cache=False"
        )
