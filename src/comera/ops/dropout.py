"""Dropout whose masks are cheap on a CPU: random numbers of 16 bits.

    y = f x,   dx = f dy,   f = keep / (1 - p)

torch draws a float64 per element from one thread, 10 to 18 ns each, a seventh of a compressed training step. A C++
kernel (kernels/cpp/csrc/residual_norm.cpp) derives the mask from a seed, 0.3 ns an element, and again in the backward,
so no mask is saved; without the kernel a draw of 64 bits serves four elements, 3 ns each. Probabilities are rounded to
multiples of 2⁻¹⁶ and the scale follows the rounded one: the mean stays exact.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import residual_norm as cpp
from comera.ops.chunking import chunks
from comera.ops.once import keep_for_recompute


def dropout(x: Tensor, p: float) -> Tensor:
    """x with each element zeroed with probability p and the others scaled by 1/(1 - p), on a CPU, outside a trace.

    x: any floating dtype. 0 <= p < 1. Derivatives of any order.
    """
    dropped: Tensor = _Seeded.apply(x, p, None) if select.supports("residual_norm", x) else _Masked.apply(x, p)
    return dropped


def new_seed() -> Tensor:
    """One int64 from torch's global generator, fixed by `torch.manual_seed`; a replay of the forward gets it again.

    To be called inside an autograd.Function, or where nothing needs a gradient.
    """
    return keep_for_recompute(lambda: torch.empty((), dtype=torch.int64).random_(-(2**63), None))


def keep_mask(shape: Sequence[int], p: float) -> tuple[Tensor, float]:
    """A boolean CPU tensor that is false with probability `p`, to 2⁻¹⁶, and the scale of what is kept.

    Drawn from torch's global generator, so `torch.manual_seed` fixes it. 0 <= p < 1.
    """
    dropped, scale = cpp.rounded(p)

    def draw() -> Tensor:
        keep = torch.empty(prod(shape), dtype=torch.bool)
        for part in chunks(keep.numel(), 1, keep.device):
            some = keep[part]
            draws = torch.empty(-(-some.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
            torch.ge(draws.view(torch.int16)[: some.numel()], dropped - 2**15, out=some)
        return keep.view(*shape)

    return keep_for_recompute(draw), scale


def as_integers(keep: Tensor) -> Tensor:
    """The same memory as integers 0 and 1: a product with these takes a third of the time of one with booleans."""
    return keep.view(torch.uint8)


class _Seeded(torch.autograd.Function):
    """The mask follows from a seed, which is all that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor | None) -> Tensor:
        seed = new_seed() if seed is None else seed
        ctx.p = p
        ctx.save_for_backward(seed)
        y: Tensor = cpp.dropout(x, seed, p)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _Seeded.apply(dy, ctx.p, *ctx.saved_tensors), None, None


class _Masked(torch.autograd.Function):
    """The mask is saved, a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        keep, ctx.scale = keep_mask(x.shape, p)
        ctx.save_for_backward(keep)
        return _scaled(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (keep,) = ctx.saved_tensors
        return (dy * keep * ctx.scale if torch.is_grad_enabled() else _scaled(dy, keep, ctx.scale)), None


def _scaled(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """scale · keep · x, chunk by chunk: one pass over memory."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, flat, keep = x.reshape(-1), y.view(-1), as_integers(keep).view(-1)
    for part in chunks(flat.numel(), 1, flat.device):
        torch.mul(x[part], keep[part], out=flat[part]).mul_(scale)
    return y
