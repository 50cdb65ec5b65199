"""What a user would do today to let a narrow dense model read more than a token at a position: hashed tables of
n-grams, tables by position, and short causal convolutions before attention and MLP, a few taps a channel.

    hashed   x_i += s ⊙ P [H_2[h(t_i, t_{i-1})]; …; H_N[h(t_i, …, t_{i-N+1})]],   H_n (rows, dim), h a hash
    summed   x_i += Σ_n T_n[t_{i-n}],   T_n (V, width), n = 1 … N − 1
    conv     y_i = Σ_k w_k ⊙ x_{i-k},   w_0 = 1 and the others 0 at first

Tables read the ids before a position as `comera.nn.NGramTable` does, from the model's cache too. Hashed tables: Engram
(arXiv:2601.07372), over-tokenized transformers (2501.16975), byte-latent transformers (2412.09871). Convolutions:
Primer (2109.08668), Canon layers (Allen-Zhu 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.baselines.common import Replaced, elements
from comera.baselines.narrow import Narrow
from comera.convert.ngrams import CACHES, finish_ngrams_
from comera.errors import ConfigError, check_fields, is_integer
from comera.nn.ngram import attach_ngrams_
from comera.ops.ngram import NGramIds

NORMS = ("input_layernorm", "post_attention_layernorm", "ln_1", "ln_2")
_PRIME, _MODULUS = 1_000_003, 2**31 - 1


@dataclass(frozen=True)
class HashedNGrams(Narrow):
    """A narrow dense model with a hashed table for every order of n-grams.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from comera.baselines import HashedNGrams
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        >>> replaced = HashedNGrams(order=3, rows=500, dim=8).apply_(model)
        >>> sum(p.numel() for p in model.parameters()) - replaced.dense_total  # two tables, P and s
        9088
    """

    dense_layers = False

    order: int = 6
    """The longest n-gram."""
    rows: int = 2840
    """Rows of each table."""
    dim: int = 24
    """Features of a row."""
    hashes: int = 1
    """Tables of each order, with hashes of their own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"order": 2, "rows": 1, "dim": 1, "hashes": 1}
        checks = {name: (is_integer(getattr(self, name), low), f"an integer >= {low}") for name, low in least.items()}
        check_fields(self, "hashed_ngrams.", checks)

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Any:
        return _add_(model, lambda width, _: HashedTables(width, self.order, self.rows, self.dim, self.hashes))


@dataclass(frozen=True)
class SummedTables(Narrow):
    """A narrow dense model that adds a row for each of the ids before, from a table of its position.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from comera.baselines import SummedTables
        >>> sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
        >>> replaced = SummedTables(order=3).apply_(model)
        >>> sum(p.numel() for p in model.parameters()) - replaced.dense_total == 2 * 256 * 64
        True
    """

    dense_layers = False

    order: int = 6
    """Ids that are read, that of the position itself included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "summed_tables.", {"order": (is_integer(self.order, 2), "an integer >= 2")})

    def apply_(self, model: nn.Module, skip: Sequence[str] = ()) -> Any:
        return _add_(model, lambda width, vocabulary: PositionTables(width, vocabulary, self.order))


class HashedTables(nn.Module):
    """Rows of hashed n-grams, projected to the model's width. Input `NGramIds` -> (B, T, width)."""

    def __init__(self, width: int, order: int, rows: int, dim: int, hashes: int) -> None:
        super().__init__()
        self.longest, self.rows, self.hashes = order, rows, hashes
        self.tables = nn.ModuleList([nn.Embedding(rows, dim) for _ in range((order - 1) * hashes)])
        self.out = nn.Linear(dim * len(self.tables), width, bias=False)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        nn.init.normal_(self.out.weight, std=1 / math.sqrt(self.out.in_features))

    def forward(self, ids: NGramIds) -> Tensor:
        rows, tables = [], iter(self.tables)
        earlier = [torch.where(ids.reach >= n, ids.before(n) + 1, 0) for n in range(self.longest)]
        for order in range(2, self.longest + 1):
            for salt in range(self.hashes):
                hashed = torch.full_like(ids.reach, salt)
                for own in earlier[:order]:
                    hashed = (hashed * _PRIME + own) % _MODULUS
                rows.append(next(tables)(hashed % self.rows))
        y: Tensor = self.scale * self.out(torch.cat(rows, -1))
        return y


class PositionTables(nn.Module):
    """The sum of a row for each id before. Input `NGramIds` -> (B, T, width)."""

    def __init__(self, width: int, vocabulary: int, order: int) -> None:
        super().__init__()
        self.longest = order
        self.tables = nn.ModuleList([nn.Embedding(vocabulary, width) for _ in range(order - 1)])

    def forward(self, ids: NGramIds) -> Tensor:
        rows = [table(ids.before(n)) * (ids.reach >= n)[..., None] for n, table in enumerate(self.tables, start=1)]
        return torch.stack(rows).sum(0)


def _add_(model: Any, make: Any) -> Replaced:
    """Put a table beside the input embedding of a model of transformers."""
    if not hasattr(model, "get_input_embeddings"):
        raise ConfigError(f"expected a model of transformers, got a {type(model).__name__}")
    total, embedding = elements(model.parameters()), model.get_input_embeddings()
    table = make(embedding.embedding_dim, embedding.num_embeddings)
    with torch.no_grad():
        std = 1.0 if embedding.weight.is_meta else float(embedding.weight.square().mean().sqrt())
        for each in [table.scale] if isinstance(table, HashedTables) else table.parameters():
            each.mul_(std)
    attach_ngrams_(embedding, table.to(embedding.weight.device))
    finish_ngrams_(model, [embedding])
    return Replaced((), total)


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
