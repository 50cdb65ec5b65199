"""The end of half a transformer block: layer norm of a residual sum, after dropout, in one pass over memory each way.

    y = LayerNorm(dropout(z) + x)

A CPU takes as long for these as for the compressed layers around them: three operations forward and five backward, each
of which reads and writes all of a wide tensor. Kept for the backward: the sum, and a seed in place of a mask.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.kernels import select
from comera.kernels.cpp import residual_norm as kernels
from comera.ops.dropout import Dropout, new_seed
from comera.ops.dtypes import autocast_dtype

# of transformers, known by where they are defined, so that it is never imported from here
_LIBRARY = {
    "bert.modeling_bert.BertSelfOutput",
    "bert.modeling_bert.BertOutput",
    "roberta.modeling_roberta.RobertaSelfOutput",
    "roberta.modeling_roberta.RobertaOutput",
}


def residual_norm(z: Tensor, x: Tensor, dropout: nn.Module, norm: nn.Module) -> Tensor:
    """norm(dropout(z) + x): in one operation where the kernel takes it, else by the modules.

    z, x: one shape. The kernel is for float32 on a CPU, outside of autocast and torch.compile, for exactly
    `nn.LayerNorm` over the last dimension and `nn.Dropout` (ours too), neither of them with hooks or in place. Its
    masks are others than those of `nn.Dropout` from the same seed. Derivatives of any order.
    """
    if not _fits(z, x, dropout, norm):
        out: Tensor = norm(dropout(z) + x)
        return out
    p = dropout.p if dropout.training else 0.0
    y: Tensor
    y, _ = _ResidualNorm.apply(z, x, norm.weight, norm.bias, p, norm.eps)
    return y


def fuse_residual_norms_(model: nn.Module, *, enabled: bool = True) -> list[str]:
    """Let the modules of transformers that end with one run `residual_norm` (`enabled`), or what their class has.

    Returns the names of the modules that fit, the same ones each time: those of a known type whose forward nobody else
    has replaced.
    """
    found = []
    for name, module in model.named_modules():
        if not _is_known(type(module)) or not _is_free(module):
            continue
        if enabled:
            module.forward = MethodType(forward, module)
        else:
            vars(module).pop("forward", None)
        found.append(name)
    return found


def forward(module: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    """Under the name of the method that it stands in for: a pickled module comes back with its class's own."""
    return residual_norm(module.dense(hidden_states), input_tensor, module.dropout, module.LayerNorm)


def _is_known(kind: type[nn.Module]) -> bool:
    where, _, name = kind.__module__.partition("transformers.models.")
    return not where and kind.__module__ in sys.modules and f"{name}.{kind.__name__}" in _LIBRARY


def _is_free(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) in (forward, type(module).forward)


def _fits(z: Tensor, x: Tensor, dropout: Any, norm: Any) -> bool:
    if type(norm) is not nn.LayerNorm or type(dropout) not in (nn.Dropout, Dropout) or dropout.inplace:
        return False
    if z.shape != x.shape or norm.normalized_shape != z.shape[-1:] or (dropout.training and dropout.p == 1):
        return False
    given = [t for t in (z, x, norm.weight, norm.bias) if t is not None]
    return (
        not (_hooked(dropout) or _hooked(norm))
        and autocast_dtype(z) is None
        and select.supports("residual_norm", *given)
    )


def _hooked(module: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return "forward" in vars(module) or any(getattr(module, kind) for kind in kinds)


class _ResidualNorm(torch.autograd.Function):
    """s = x + f z,  y = LayerNorm(s). s is an output, which nobody is given: so what the backward does with it can be
    differentiated again, back to z and x."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        seed = new_seed() if p else None
        y, s, mean, rstd = kernels.residual_norm(z, x, weight, bias, seed, p, eps)
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
            dx, dz, dweight, dbias = kernels.residual_norm_backward(dy, s, mean, rstd, weight, seed, ctx.p)
            dx = dx if ds is None else dx + ds
            dz = _dropped(dx, seed, ctx.p) if ds is not None or seed is None else dz
        needed = zip(ctx.needs_input_grad, (dz, dx, dweight, dbias, None, None), strict=True)
        return tuple(grad if needs else None for needs, grad in needed)


def _dropped(dx: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """f dx, with a derivative."""
    return dx if seed is None else dx * kernels.dropout(torch.ones_like(dx), seed, p)


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
