"""LayerNorm(x + part(...)), at the end of a module or in the middle of its forward, in one pass over memory (ops/)."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.mlp import MLP
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, checkpoints, replaced_obstacle, submodule
from comera.fusion.residual import modules_obstacle
from comera.fusion.sums import dropout_of, run_with_sums
from comera.kernels.tracing import traced


@dataclass(frozen=True)
class PostNorm(BlockPattern):
    """How a module holds sums with their norms, norm(part(...) + x), in its forward.

    sums: for each the names of part and norm. The forward does nothing with what a part returns (of several results,
        with the first) but to add it to a tensor, and nothing with the sum but to give it to the norm. A part may be a
        method, or the dropout itself, which with a dotted name ends what is named before the dot.
    qkv: the projections of an attention module that ends so. mlp: an MLP in the middle of the forward (`within`).

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
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        if getattr(module, "chunk_size_feed_forward", 0):
            return "it computes its MLP in chunks"
        for part, norm in self.sums:
            reason = modules_obstacle(dropout_of(module, part), submodule(module, norm))
            if reason is not None:
                return reason
        return replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if traced() or checkpoints(module) or self.obstacle(module):
            contained = self.mlp or self.qkv
            if contained is not None:
                return contained.run(module, cache, *args, **kwargs)
            return self.run_plain(module, *args, **kwargs)
        given = {} if self.qkv is None else self.qkv.stand_ins(module, cache, **kwargs)
        if self.mlp is not None:
            given |= self.mlp.stand_ins(module, cache)
        parts, norms = zip(*self.sums, strict=True)
        return run_with_sums(module, self.method, parts, norms, given, *args, **kwargs)


@dataclass(frozen=True)
class ResidualNorm(BlockPattern):
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
    method = "forward"

    @property
    def _post_norm(self) -> PostNorm:
        return PostNorm(((self.dropout, self.norm),))

    def obstacle(self, module: nn.Module) -> str | None:
        return replaced_obstacle(module, self) or self._post_norm.obstacle(module)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        return self._post_norm.run(module, cache, *args, **kwargs)
