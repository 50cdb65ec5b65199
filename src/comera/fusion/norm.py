"""RMSNorm as one operation, alone and after a residual sum (ops/residual_norm.py)."""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from comera.fusion.merge_cache import MergeCache
from comera.fusion.obstacles import is_hooked, replaced_obstacle
from comera.fusion.registry import BlockPattern, known, patterns_of
from comera.kernels.tracing import traced
from comera.ops.residual_norm import residual_rms_norm


@dataclass(frozen=True)
class RMSNorm(BlockPattern):
    """How a module holds an RMSNorm: forward(x) = x / √(mean of x² + eps) · (offset + weight).

    weight, eps: names of its attributes. offset: what is added to the weight.

    Example:
        >>> import torch
        >>> from comera.fusion import RMSNorm, fuse_, register_block
        >>> class Norm(torch.nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.scale, self.epsilon = torch.nn.Parameter(torch.zeros(width)), 1e-6
        ...     def forward(self, x):
        ...         return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * (1 + self.scale)
        >>> register_block(Norm, RMSNorm(weight="scale", eps="epsilon", offset=1.0))
        >>> norm, x = Norm(64), torch.randn(3, 64)
        >>> before = norm(x)
        >>> fuse_(norm).fused("norm"), torch.allclose(norm(x), before, atol=1e-5)
        (('',), True)
    """

    weight: str = "weight"
    eps: str = "eps"
    offset: float = 0.0
    kind = "norm"
    method = "forward"
    replaced = True

    def obstacle(self, module: nn.Module) -> str | None:
        for name, kind in ((self.weight, Tensor), (self.eps, float)):
            if not isinstance(getattr(module, name), kind):
                return f"its {name} is a {type(getattr(module, name)).__name__}, not a {kind.__name__}"
        return replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or traced() or self.obstacle(module) or not self.fits(module, *args):
            return self.run_plain(module, *args, **kwargs)
        return self.after_sum(None, args[0], module)[1]

    def fits(self, module: nn.Module, *inputs: Any) -> bool:
        """Whether these are tensors of the weight's features, of one shape, whose sum has the weight's dtype, and not
        float64, of which transformers' norms keep float32."""
        weight, first = getattr(module, self.weight), inputs[0]
        if not all(isinstance(x, Tensor) and x.shape == first.shape for x in inputs):
            return False
        dtype = reduce(torch.promote_types, (x.dtype for x in inputs))
        return dtype == weight.dtype != torch.float64 and bool(first.shape[-1:] == weight.shape)

    def after_sum(self, z: Tensor | None, x: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
        """x + z, and the norm of that."""
        return residual_rms_norm(z, x, getattr(module, self.weight), getattr(module, self.eps), self.offset)


def rms_norm_of(norm: nn.Module) -> RMSNorm | None:
    """The pattern by which a norm's type is registered as an RMSNorm; None for other norms."""
    return next((pattern for pattern in patterns_of(norm) if isinstance(pattern, RMSNorm)), None)


def rms_norm_obstacle(norm: nn.Module) -> str | None:
    """Why a norm cannot be computed together with the sum before it as an RMSNorm; None if it can."""
    for pattern, _, _, changed in known(type(norm)):
        if isinstance(pattern, RMSNorm):
            return changed or ("it has hooks" if is_hooked(norm) else pattern.obstacle(norm))
    return f"a {type(norm).__name__} is not registered as an RMSNorm"


def add_and_rms_norm(z: Tensor | None, x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """s = x + z, or x, and norm(s): in one operation where nothing stands in its way."""
    pattern, inputs = rms_norm_of(norm), [x] if z is None else [x, z]
    if pattern is None or rms_norm_obstacle(norm) or not pattern.fits(norm, *inputs):
        s = x if z is None else x + z
        return s, norm(s)
    return pattern.after_sum(z, x, norm)
