"""dropout(z) + x and the LayerNorm of that, in one pass over memory (ops/residual_norm.py)."""

from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.dropout import Dropout
from comera.fusion.obstacles import call_obstacle
from comera.kernels.tracing import traced
from comera.ops.dtypes import autocast_dtype
from comera.ops.residual_norm import residual_layer_norm


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
    reason = call_obstacle(dropout) or call_obstacle(norm)
    return f"its norm or dropout {reason}" if reason else None


def _fits(z: Tensor, x: Tensor, dropout: Any, norm: Any) -> bool:
    if traced() or modules_obstacle(dropout, norm) or (dropout.training and dropout.p == 1):
        return False
    shapes = z.shape == x.shape and norm.normalized_shape == z.shape[-1:]
    # autocast computes norms of half precision in dtypes of its own
    return shapes and (autocast_dtype(z) is None or torch.promote_types(z.dtype, x.dtype) == torch.float32)
