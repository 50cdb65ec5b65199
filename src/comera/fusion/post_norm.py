"""Sums and their norms in the middle of a forward, LayerNorm(x + part(...)), in one pass over memory (ops/)."""

from dataclasses import dataclass
from inspect import Signature, signature
from typing import Any

from torch import Tensor, nn

from comera.fusion.dropout import Dropout
from comera.fusion.merge_cache import MergeCache
from comera.fusion.qkv import QKV
from comera.fusion.registry import BlockPattern, StandIn, checkpoints, replaced_obstacle, submodule
from comera.fusion.residual import add_and_norm, modules_obstacle
from comera.kernels.tracing import traced

_NO_DROPOUT = nn.Dropout(0.0).eval()


@dataclass(frozen=True)
class PostNorm(BlockPattern):
    """How a module holds sums with their norms, norm(part(...) + x), in its forward.

    sums: for each the names of part and norm. The forward does nothing with what a part returns (of several results,
        with the first) but to add it to a tensor, and nothing with the sum but to give it to the norm. A part may be a
        method, or the dropout itself.
    qkv: the projections of an attention module that ends so.

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
    kind = "residual norm"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        if getattr(module, "chunk_size_feed_forward", 0):
            return "it computes its MLP in chunks"
        for part, norm in self.sums:
            dropout = submodule(module, part)
            reason = modules_obstacle(dropout if _is_dropout(dropout) else _NO_DROPOUT, submodule(module, norm))
            if reason is not None:
                return reason
        return replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        if traced() or checkpoints(module) or self.obstacle(module):
            if self.qkv is not None:
                return self.qkv.run(module, cache, *args, **kwargs)
            return self.run_plain(module, *args, **kwargs)
        given = {} if self.qkv is None else self.qkv.stand_ins(module, cache, *args, **kwargs)
        for part, norm in self.sums:
            given |= {part: _Part(submodule(module, part)), norm: _Norm(submodule(module, norm))}
        return getattr(type(module), self.method)(StandIn(module, given), *args, **kwargs)


class _Part:
    """A part whose result waits for what it is added to."""

    def __init__(self, part: Any) -> None:
        self._part = part

    @property
    def __signature__(self) -> Signature:  # callers look at it
        return signature(self._part)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_dropout(self._part):
            (z,) = args
            return _Term(z, self._part)
        results = self._part(*args, **kwargs)
        return (_Term(results[0]), *results[1:]) if isinstance(results, tuple) else _Term(results)


class _Term:
    """dropout(z), to be added to something."""

    def __init__(self, z: Tensor, dropout: nn.Module = _NO_DROPOUT) -> None:
        self.z, self.dropout = z, dropout

    def __add__(self, x: Tensor) -> "_Sum":
        return _Sum(self, x)

    __radd__ = __add__


class _Sum:
    """dropout(z) + x, which the norm is to compute."""

    def __init__(self, term: _Term, x: Tensor) -> None:
        self.term, self.x = term, x


class _Norm:
    """The norm of such a sum."""

    def __init__(self, norm: nn.Module) -> None:
        self._norm = norm

    def __call__(self, total: _Sum) -> Tensor:
        return add_and_norm(total.term.z, total.x, total.term.dropout, self._norm)


def _is_dropout(part: Any) -> bool:
    return type(part) in (nn.Dropout, Dropout)
