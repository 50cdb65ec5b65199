"""Layer norm of a residual sum after dropout, in one pass over memory each way: y = LayerNorm(dropout(z) + x).

    forward    s = x + f z,   y = LayerNorm(s)
    backward   ds by the layer norm's gradient,   dx = ds,   dz = f ds

This ends each half of a post-norm transformer block. On a CPU torch's three operations forward and five backward, each
of which reads and writes whole hidden tensors, take as long as the compressed layers around them. Saved are the sum,
its statistics, and a seed in place of a mask. The kernel: kernels/cpp/csrc/residual_norm.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels.cpp import residual_norm as cpp
from comera.ops.dropout import new_seed


def residual_norm(z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float) -> Tensor:
    """LayerNorm(dropout(z, p) + x) over the last dimension.

    z, x: float32 on a CPU, of one shape. weight, bias: of the last dimension, or None. 0 <= p < 1; 0 for evaluation.
    The masks differ from those of `nn.Dropout` with the same seed. Derivatives of any order.
    """
    y: Tensor
    y, _ = _ResidualNorm.apply(z, x, weight, bias, p, eps)
    return y


class _ResidualNorm(torch.autograd.Function):
    """s is an output too, which no caller sees: so the backward can be differentiated again, back to z and x."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        seed = new_seed() if p else None
        y, s, mean, rstd = cpp.residual_norm(z, x, weight, bias, seed, p, eps)
        ctx.p, ctx.eps = p, eps
        ctx.save_for_backward(s, mean, rstd, weight, bias, seed)
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        s, mean, rstd, weight, bias, seed = ctx.saved_tensors
        dweight = dbias = None
        if dy is None:  # s alone was used, by a backward that was differentiated
            assert ds is not None
            dx, dz = ds, _dropped(ds, seed, ctx.p)
        elif torch.is_grad_enabled():  # create_graph: by torch's own autograd
            dx, dweight, dbias = _differentiable(dy, s, weight, bias, ctx.eps)
            dx = dx if ds is None else dx + ds
            dz = _dropped(dx, seed, ctx.p)
        else:
            dx, dz, dweight, dbias = cpp.residual_norm_backward(dy, s, mean, rstd, weight, seed, ctx.p)
            dx = dx if ds is None else dx + ds
            dz = _dropped(dx, seed, ctx.p) if ds is not None or seed is None else dz
        needed = zip(ctx.needs_input_grad, (dz, dx, dweight, dbias, None, None), strict=True)
        return tuple(grad if needs else None for needs, grad in needed)


def _dropped(dx: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """f dx, with a derivative."""
    return dx if seed is None else dx * cpp.dropout(torch.ones_like(dx), seed, p)


def _differentiable(
    dy: Tensor, s: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of s, weight and bias, which can be differentiated again."""
    inputs = (s, weight, bias)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    y = F.layer_norm(s, s.shape[-1:], weight, bias, eps)
    grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    ds, dweight, dbias = (next(grads) if t is not None and t.requires_grad else None for t in inputs)
    assert ds is not None  # an output of what needs gradients
    return ds, dweight, dbias
