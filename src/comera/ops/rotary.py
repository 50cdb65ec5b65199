"""Rotary position embedding of queries and keys: rows turned by the angles of their position (arXiv:2104.09864).

    rows [x, x', rest]:    y = x cos - x' sin,    y' = x' cos' + x sin',    rest stays
    backward               dx = dy cos + dy' sin',    dx' = dy' cos' - dy sin

x and x' are the first and the last R/2 of the R columns that cos and sin have; rest is what a partial embedding leaves
alone. torch writes and reads eight tensors as large as q and k for this, and saves some of them. On a CPU a C++ kernel
(kernels/cpp/csrc/rotary.cpp) takes one pass over both, forward and backward, and saves nothing but cos and sin.

Shapes: B batch, H heads of queries, G of keys, T positions, D width of a head, R columns that turn.
"""

from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp import rotary as cpp
from comera.kernels.select import supports


def rotary(q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """q and k after rotary position embedding, as the models of transformers define it for Llama.

    Args:
        q_BHTD, k_BGTD: queries (B, H, T, D) and keys (B, G, T, D), in any memory layout: none is copied.
        cos_BTR, sin_BTR: (B, T, R), or (1, T, R) for all samples alike; R even, at most D.

    Returns:
        Two tensors of the shapes of q and k, in the dtype of their products with cos. Derivatives of any order.

    Example:
        >>> import torch
        >>> from comera.ops.rotary import rotary
        >>> angles = torch.arange(5)[None, :, None] / torch.tensor([1.0, 100.0, 1.0, 100.0])
        >>> q, k = rotary(torch.ones(2, 8, 5, 4), torch.ones(2, 2, 5, 4), angles.cos(), angles.sin())
        >>> q[0, 0, 0], q.shape
        (tensor([1., 1., 1., 1.]), torch.Size([2, 8, 5, 4]))

    Source: docs/method.md §6.
    """
    operands = q_BHTD, k_BGTD, cos_BTR, sin_BTR
    if not (_fits(*operands) and supports("rotary", *operands)):
        cos, sin = cos_BTR.unsqueeze(1), sin_BTR.unsqueeze(1)
        return _turned(q_BHTD, cos, sin), _turned(k_BGTD, cos, sin)
    turned: tuple[Tensor, Tensor] = _Rotary.apply(*operands, False)
    return turned


def _fits(q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor) -> bool:
    """Whether the kernel has these shapes; torch's operations report what is wrong with others."""
    if not (q_BHTD.ndim == k_BGTD.ndim == 4 and cos_BTR.ndim == 3 and cos_BTR.shape == sin_BTR.shape):
        return False
    (batch, _, length, width), (samples, positions, columns) = q_BHTD.shape, cos_BTR.shape
    if samples not in (1, batch) or positions != length or columns % 2 or columns > width:
        return False
    like_q = k_BGTD.shape == (batch, k_BGTD.shape[1], length, width)
    return like_q and not (cos_BTR.requires_grad or sin_BTR.requires_grad)


def _turned(x_BHTD: Tensor, cos_B1TR: Tensor, sin_B1TR: Tensor) -> Tensor:
    """By torch's operations."""
    columns = cos_B1TR.shape[-1]
    turning, rest = x_BHTD[..., :columns], x_BHTD[..., columns:]
    first, second = turning[..., : columns // 2], turning[..., columns // 2 :]
    y_BHTR = turning * cos_B1TR + torch.cat((-second, first), -1) * sin_B1TR
    return torch.cat((y_BHTR, rest), -1) if rest.shape[-1] else y_BHTR


class _Rotary(torch.autograd.Function):
    """By the kernel. transposed: gradients, by the same operation with other signs; so it is its own derivative."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, transposed: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BTR, sin_BTR)
        ctx.transposed = transposed
        return cpp.rotary(q_BHTD, k_BGTD, cos_BTR, sin_BTR, transposed)

    @staticmethod
    def backward(ctx: Any, dq_BHTD: Tensor, dk_BGTD: Tensor) -> tuple[Tensor | None, ...]:
        return *_Rotary.apply(dq_BHTD, dk_BGTD, *ctx.saved_tensors, not ctx.transposed), None, None, None
