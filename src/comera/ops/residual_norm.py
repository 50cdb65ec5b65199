"""Norms of residual sums in one pass over memory each way.

    LayerNorm   s = x + f z,   y = (s - mean) / √(variance + eps) · weight + bias           f: dropout
    RMSNorm     s = x + z,     y = s / √(mean of s² + eps) · (offset + weight)
    backward    dx = ds + the norm's gradient of dy,   dz = f dx        without z: s = x

Each half of a post-norm transformer block ends so, and only y goes on. The second half of a pre-norm block begins so,
and the sum goes on beside its norm. On a CPU torch's operations, each of which reads and writes whole hidden tensors,
take as long as the compressed layers around them: for LayerNorm with dropout three forward and five backward, for
transformers' RMSNorm five and ten. Saved are the sum, the statistics of its rows, and a seed in place of a mask. The
kernel: kernels/cpp/csrc/residual_norm.cpp.

Rejected: LayerNorm without a sum before it by this kernel. torch's is as fast, alone and with the residual's gradient
added to its own (1,024 rows of 512, forward and backward on one core: 0.34 ms both, then 0.48 and 0.47).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import residual_norm as cpp
from comera.kernels.cpp.library import on_cpu
from comera.kernels.tracing import traced
from comera.ops.dropout import dropout, new_seed
from comera.ops.dtypes import merge_dtype, without_autocast


def residual_layer_norm(
    z: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    p: float = 0.0,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A residual sum after dropout and its LayerNorm over the last dimension.

    Args:
        z, x: (..., features), of one shape; where autocast has left one of them in half precision, s is in float32. z
            None: no sum, and no dropout.
        weight, bias: (features), of the dtype of s, or None for a norm without.
        eps: added to the variance.
        p: the probability of dropout of z, 0 <= p < 1; 0 for evaluation. The masks differ from those of `nn.Dropout`
            with the same seed.
        rows: (...), int64: x is a table (rows, features) instead, of which row rows[n] is added to row n of z.

    Returns:
        s = x + dropout(z), or x, and its norm. Derivatives of any order.

    Raises:
        IndexError or, by the kernel, ValueError: `rows` that the table does not have.

    Example:
        >>> import torch
        >>> from comera.ops.residual_norm import residual_layer_norm
        >>> z, x = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
        >>> s, y = residual_layer_norm(z, x, weight=None, bias=torch.ones(2), eps=0.0)
        >>> s.tolist(), y.tolist()
        ([[4.0, 6.0]], [[0.0, 2.0]])

    Source: docs/method.md §7.
    """
    z, x = _in_dtype_of_sum(z, x)
    operands = [t for t in (z, x, weight, bias) if t is not None]
    if not select.supports("residual_norm", *operands):
        x = x if rows is None else F.embedding(rows, x)
        s = x if z is None else x + _dropout(z, p)
        return s, F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    y, s = _ResidualNorm.apply(z, x, weight, bias, 0.0 if z is None else p, eps, 0.0, False, rows)
    return s, y


def residual_rms_norm(
    z: Tensor | None, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """A residual sum and its RMSNorm over the last dimension.

    Args:
        z, x: (..., features), of one shape; where autocast has left one of them in half precision, s is in float32. z
            None: no sum.
        weight: (features), of the dtype of s, or None for a norm without.
        eps: added to the mean of squares.
        offset: added to the weight: 1 for Gemma, whose weights start at 0.

    Returns:
        s = x + z, or x, and its norm. Derivatives of any order.

    Example:
        >>> import torch
        >>> from comera.ops.residual_norm import residual_rms_norm
        >>> s, y = residual_rms_norm(torch.ones(2, 4), torch.ones(2, 4), torch.full((4,), 3.0), eps=0.0)
        >>> s[0, 0].item(), y[0, 0].item()
        (2.0, 3.0)

    Source: docs/method.md §7.
    """
    z, x = _in_dtype_of_sum(z, x)
    operands = [t for t in (z, x, weight) if t is not None]
    if not select.supports("residual_norm", *operands):
        s = x if z is None else x + z
        return s, _rms_norm(s, weight, eps, offset)
    y, s = _ResidualNorm.apply(z, x, weight, None, 0.0, eps, offset, True, None)
    return s, y


class _ResidualNorm(torch.autograd.Function):
    """s is an output even where it is not used, so that the backward can be differentiated again, back to z and x."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        p: float,
        eps: float,
        offset: float,
        rms: bool,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        seed = new_seed() if p else None
        y, s, mean, rstd = cpp.residual_norm(z, x, weight, bias, seed, p, eps, offset, rms, rows)
        s = x if z is None else s
        ctx.p, ctx.eps, ctx.offset, ctx.rms, ctx.table_rows = p, eps, offset, rms, len(x)
        ctx.save_for_backward(s, mean, rstd, weight, bias, seed, rows)
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        s, mean, rstd, weight, bias, seed, rows = ctx.saved_tensors
        dx = dweight = dbias = None
        if dy is None:  # s alone was used
            dx = ds
            dz = _dropped(dx, seed, ctx.p)
        elif torch.is_grad_enabled():  # create_graph: by torch's own autograd
            dx, dweight, dbias = _differentiable(dy, s, weight, bias, ctx)
            dx = ds if dx is None else dx if ds is None else dx + ds
            dz = _dropped(dx, seed, ctx.p)
        else:
            settings = seed, ctx.p, ctx.offset, ctx.rms
            dx, dz, dweight, dbias = cpp.residual_norm_backward(dy, s, mean, rstd, weight, *settings, ds)
            dz = dx if seed is None else dz
        if rows is not None and dx is not None:
            dx = torch.ops.aten.embedding_backward(dx, rows, ctx.table_rows, -1, False, False)
        needed = zip(ctx.needs_input_grad, (dz, dx, dweight, dbias, *[None] * 5), strict=True)
        return tuple(grad if needs else None for needs, grad in needed)


def _in_dtype_of_sum(z: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """z and x as the kernel adds them. Elsewhere the addition converts them, without a copy."""
    if z is None or z.dtype == x.dtype or not on_cpu(x) or traced():
        return z, x
    dtype = torch.promote_types(z.dtype, x.dtype)
    return z.to(dtype), x.to(dtype)


def _dropout(z: Tensor, p: float) -> Tensor:
    """By torch, with cheap masks on a CPU."""
    if not p:
        return z
    return dropout(z, p) if on_cpu(z) and not traced() else F.dropout(z, p)


def _dropped(dx: Tensor | None, seed: Tensor | None, p: float) -> Tensor | None:
    """f dx, with a derivative."""
    return dx if dx is None or seed is None else dx * cpp.dropout(torch.ones_like(dx), seed, p)


def _differentiable(
    dy: Tensor, s: Tensor, weight: Tensor | None, bias: Tensor | None, ctx: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of s, weight and bias, which can be differentiated again."""
    inputs = (s, weight, bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if ctx.rms:
        y = _rms_norm(s, weight, ctx.eps, ctx.offset)
    else:
        y = F.layer_norm(s, s.shape[-1:], weight, bias, ctx.eps)
    grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    ds, dweight, dbias = (next(grads) if t is not None and t.requires_grad else None for t in inputs)
    return ds, dweight, dbias


def _rms_norm(s: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """By torch: in float32 for half precision, in which offset + weight would lose digits."""
    dtype = merge_dtype(s.dtype) if offset else s.dtype
    gain = weight.to(dtype) + offset if offset and weight is not None else weight
    with without_autocast(s):
        return F.rms_norm(s.to(dtype), s.shape[-1:], gain, eps).to(s.dtype)
