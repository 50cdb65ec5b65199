"""Blocks whose residual sums are computed together with the norms that follow them (sums.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from comera.fusion.lazy import values_of
from comera.fusion.merge_cache import MergeCache
from comera.fusion.mlp import MLP
from comera.fusion.norm import RMSNorm, rms_norm_obstacle, rms_norm_of
from comera.fusion.obstacles import checkpoints, is_replaced, replaced_obstacle, submodule
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, StandIn, known
from comera.fusion.sums import Part, Sum, dropout_of, layer_norm_obstacle, norm_of_sums
from comera.kernels.tracing import traced


class _ResidualBlock(BlockPattern):
    """A forward that adds what its parts return to its input, and passes the sums to norms."""

    method = "forward"
    first: str | None = None
    """Name of the first norm, whatever that is."""
    mlp: MLP | None = None
    qkv: QKV | None = None

    def parts_and_norms(self) -> tuple[Sequence[str], Sequence[str]]:
        """Names of what is added, and of the other norms. A module may lack some of them."""
        raise NotImplementedError

    def obstacle(self, module: nn.Module) -> str | None:
        if getattr(module, "chunk_size_feed_forward", 0):
            return "it computes its MLP in chunks"
        parts, norms = self.parts_and_norms()
        dropouts = [dropout_of(module, part) for part in parts if hasattr(module, part.partition(".")[0])]
        reasons = (_norm_obstacle(name, submodule(module, name), dropouts) for name in norms if hasattr(module, name))
        return next(filter(None, reasons), None) or replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if traced() or checkpoints(module):
            if (contained := self.mlp or self.qkv) is not None:
                return contained.run(module, cache, *args, **kwargs)
            return self.run_plain(module, *args, **kwargs)
        replaced = {} if self.qkv is None else self.qkv.stand_ins(module, cache, **kwargs)
        replaced |= {} if self.mlp is None else self.mlp.stand_ins(module, cache)
        parts, norms = self.parts_and_norms()
        if self.first is not None:
            norms = (self.first, *norms)
            if args and isinstance(args[0], Tensor) and rms_norm_of(submodule(module, self.first)):
                args = Sum(None, args[0]), *args[1:]  # x and its norm too: the gradients of both meet in one pass
        for name, _, dropout in (part.partition(".") for part in parts):
            if hasattr(module, name):
                part = replaced.get(name, getattr(module, name))
                replaced[name] = Part(part, "" if is_replaced(module, name) else dropout)
        replaced |= {name: norm_of_sums(submodule(module, name)) for name in norms if hasattr(module, name)}
        return values_of(self.run_plain(StandIn.of(module, replaced), *args, **kwargs))


def _norm_obstacle(name: str, norm: nn.Module, dropouts: Sequence[nn.Module]) -> str | None:
    """Why a norm cannot be computed together with the sum before it; None if it can."""
    if any(isinstance(each.pattern, RMSNorm) for each in known(type(norm))):
        reason = rms_norm_obstacle(norm)
        return f"{name}: {reason}" if reason else None
    return next(filter(None, (layer_norm_obstacle(dropout, norm) for dropout in dropouts)), None)


@dataclass(frozen=True)
class PreNorm(_ResidualBlock):
    """How a module holds a pre-norm block, whose forward computes y = x + attention(first(x)), y + mlp(second(y)).

    first, second: names of its norms, of a type registered as `RMSNorm`, or `nn.LayerNorm`. Only an RMSNorm gains from
        being the first.
    parts: names of what the forward adds to x, such as attention: modules or methods, of whose results the first
        counts, or dropouts. "attention.dropout" is a dropout that is the last step of the module, or the method, before
        the dot. Between part and sum there are only dropouts and changes of shape.
    mlp: an MLP whose layers are in the same module.
    switch: name of an attribute that is false in blocks whose norms follow their sums.
    others: names of more norms, such as the one after a decoder's attention to its encoder. Modules without them, and
        without some of the parts, are fused as well.

    Example:
        >>> from comera.fusion import PreNorm, fuse_, register_block
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaDecoderLayer
        >>> class Block(LlamaDecoderLayer):  # of your own model, with the same forward
        ...     pass
        >>> register_block(Block, PreNorm(parts=("self_attn",)))
        >>> config = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4)
        >>> fuse_(Block(config, layer_idx=0)).fused("pre-norm")
        ('',)
    """

    first: str = "input_layernorm"
    parts: tuple[str, ...] = ("self_attn",)
    second: str = "post_attention_layernorm"
    mlp: MLP | None = None
    switch: str | None = None
    others: tuple[str, ...] = ()
    kind = "pre-norm"

    def parts_and_norms(self) -> tuple[Sequence[str], Sequence[str]]:
        return self.parts, (self.second, *self.others)

    def fused_kind(self, module: nn.Module) -> str:
        post_norm = self.switch is not None and not getattr(module, self.switch)
        return "residual norm" if post_norm else self.kind


@dataclass(frozen=True)
class PostNorm(_ResidualBlock):
    """How a module holds sums with their norms, norm(part(...) + x), in its forward.

    sums: for each sum the names of its part, as in `PreNorm`, and of its norm.
    qkv: the projections of an attention module that ends with a norm. mlp: an MLP whose layers are in the same module.

    Example:
        >>> import torch
        >>> from comera.fusion import PostNorm, fuse_, register_block
        >>> class Block(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.mix, self.mlp = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        ...         self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        ...     def forward(self, x):
        ...         x = self.first(x + self.mix(x))
        ...         return self.second(x + self.mlp(x))
        >>> register_block(Block, PostNorm((("mix", "first"), ("mlp", "second"))))
        >>> block, x = Block(64), torch.randn(3, 64)
        >>> before = block(x)
        >>> fuse_(block).fused("residual norm"), torch.allclose(block(x), before, atol=1e-5)
        (('',), True)
    """

    sums: tuple[tuple[str, str], ...]
    qkv: QKV | None = None
    mlp: MLP | None = None
    kind = "residual norm"

    def parts_and_norms(self) -> tuple[Sequence[str], Sequence[str]]:
        return [part for part, _ in self.sums], [norm for _, norm in self.sums]


@dataclass(frozen=True)
class ResidualNorm(_ResidualBlock):
    """How a module holds the end of half a block: forward(z, x) = norm(dropout(dense(z)) + x).

    dense, dropout, norm: names of the layers.

    Example:
        >>> import torch
        >>> from comera.fusion import ResidualNorm, fuse_, register_block
        >>> class Output(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.proj, self.drop = torch.nn.Linear(width, width), torch.nn.Dropout(0.1)
        ...         self.norm = torch.nn.LayerNorm(width)
        ...     def forward(self, z, x):
        ...         return self.norm(self.drop(self.proj(z)) + x)
        >>> register_block(Output, ResidualNorm(dense="proj", dropout="drop", norm="norm"))
        >>> block = Output(64).eval()
        >>> z, x = torch.randn(2, 3, 64)
        >>> before = block(z, x)
        >>> _ = fuse_(block)
        >>> torch.allclose(block(z, x), before, atol=1e-5)
        True
    """

    dense: str = "dense"
    dropout: str = "dropout"
    norm: str = "LayerNorm"
    kind = "residual norm"

    def parts_and_norms(self) -> tuple[Sequence[str], Sequence[str]]:
        return [self.dropout], [self.norm]
