"""The end of half a post-norm block, LayerNorm(dropout(z) + x), in one pass over memory (ops/residual_norm.py)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.dropout import Dropout
from comera.fusion.merge_cache import MergeCache
from comera.fusion.registry import BlockPattern, is_hooked, replaced_obstacle, submodule
from comera.kernels.tracing import traced
from comera.ops.dtypes import autocast_dtype
from comera.ops.residual_norm import residual_layer_norm


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

    def obstacle(self, module: nn.Module) -> str | None:
        replaced = replaced_obstacle(module, self)
        return replaced or modules_obstacle(submodule(module, self.dropout), submodule(module, self.norm))

    def run(self, module: nn.Module, cache: MergeCache, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 2 or kwargs:
            return self.run_plain(module, *args, **kwargs)
        dense, dropout, norm = (submodule(module, name) for name in (self.dense, self.dropout, self.norm))
        return add_and_layer_norm(dense(args[0]), args[1], dropout, norm)[1]


def add_and_layer_norm(z: Tensor, x: Tensor, dropout: nn.Module, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """s = dropout(z) + x and norm(s): in one operation where nothing stands in its way, else by the modules."""
    if not _fits(z, x, dropout, norm):
        s = dropout(z) + x
        return s, norm(s)
    p = dropout.p if dropout.training else 0.0
    return residual_layer_norm(z, x, norm.weight, norm.bias, norm.eps, p)  # type: ignore[arg-type]


def modules_obstacle(dropout: nn.Module, norm: nn.Module) -> str | None:
    """Why these modules cannot be replaced by one operation; None if they can."""
    if type(norm) is not nn.LayerNorm:
        return f"its norm is a {type(norm).__name__}, not an nn.LayerNorm"
    if type(dropout) not in (nn.Dropout, Dropout):
        return f"its dropout is a {type(dropout).__name__}, not an nn.Dropout"
    if dropout.inplace:
        return "its dropout works in place"
    return "its norm or dropout has hooks" if is_hooked(dropout) or is_hooked(norm) else None


def _fits(z: Tensor, x: Tensor, dropout: Any, norm: Any) -> bool:
    if traced() or modules_obstacle(dropout, norm) or (dropout.training and dropout.p == 1):
        return False
    shapes = z.shape == x.shape and norm.normalized_shape == z.shape[-1:]
    # autocast computes norms of half precision in dtypes of its own
    return shapes and (autocast_dtype(z) is None or torch.promote_types(z.dtype, x.dtype) == torch.float32)
