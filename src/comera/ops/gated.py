"""The hidden activation of a feed-forward block as one operation: act(y), or with a gate (SwiGLU, GeGLU) act(g) · u.

    forward    h = act(g) u      or without a gate, of y = g,   h = act(g)
    backward   dg = act'(g) u dh,   du = act(g) dh              dg = act'(g) dh

Saved are g and u; act(g) is made again. torch's own operations keep it, and traverse five hidden tensors forward
and nine backward for SwiGLU in place of three and five; GELU by its tanh is eight operations in some models of
transformers. The kernel: kernels/cpp/csrc/gated.cpp.
"""

from typing import Any

import torch
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import gated as cpp
from comera.ops.activations import ACTIVATIONS


def gated(g: Tensor, u: Tensor, activation: str) -> Tensor:
    """act(g) · u.

    Args:
        g, u: the gate before its activation, and what it lets through: (..., hidden_features). Of different shapes or
            dtypes, they meet as torch's operations would have it.
        activation: a name in `ACTIVATIONS`.

    Returns:
        Of the shape and dtype of g. Differentiable to any order.

    Raises:
        ValueError: for an unknown activation.

    Source: docs/method.md §7.
    """
    _check(activation)
    if g.shape != u.shape or g.dtype != u.dtype:
        return _formula(g, u, activation)
    h: Tensor = _Gated.apply(g, u, activation)
    return h


class _Gated(torch.autograd.Function):
    """The formulas at the top of the file. u: None without a gate."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor | None, activation: str) -> Tensor:
        ctx.activation = activation
        ctx.save_for_backward(g, u)
        by_kernel = select.supports("gated", *_given(g, u))
        return cpp.gated(g, u, activation) if by_kernel else _formula(g, u, activation)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        g, u = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
            return *_differentiable(dh, g, u, ctx.activation), None
        act, act_backward = ACTIVATIONS[ctx.activation]
        if select.supports("gated", dh, *_given(g, u)):
            dg, du = (*cpp.gated_backward(dh, g, u, ctx.activation), None)[:2]
        elif u is None:
            dg, du = act_backward(dh, g), None
        else:
            dg, du = act_backward(dh * u, g), dh * act(g)
        wants_g, wants_u, _ = ctx.needs_input_grad
        return dg if wants_g else None, du if wants_u else None, None


def activated(y: Tensor, activation: str) -> Tensor:
    """act(y).

    Args:
        y: any shape. activation: a name in `ACTIVATIONS`.

    Returns:
        Of the shape and dtype of y. Differentiable to any order.

    Raises:
        ValueError: for an unknown activation.

    Source: docs/method.md §7.
    """
    _check(activation)
    if not select.supports("gated", y):
        return ACTIVATIONS[activation][0](y)
    h: Tensor = _Gated.apply(y, None, activation)
    return h


def _check(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")


def _given(g: Tensor, u: Tensor | None) -> list[Tensor]:
    return [g] if u is None else [g, u]


def _formula(g: Tensor, u: Tensor | None, activation: str) -> Tensor:
    h = ACTIVATIONS[activation][0](g)
    return h if u is None else h * u


def _differentiable(dh: Tensor, g: Tensor, u: Tensor | None, activation: str) -> tuple[Tensor | None, ...]:
    """The gradients of g and u, which can be differentiated again."""
    wanted = [t for t in _given(g, u) if t.requires_grad]
    grads = iter(torch.autograd.grad(_formula(g, u, activation), wanted, dh, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in (g, u))
