"""Cores whose materialised weight has a wanted standard deviation."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from comera.tt.spec import Spec


def init_cores(
    spec: Spec,
    std: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Random cores for rank parameters of one; provisional: per-core std only."""
    scale = (std**2 / max(1, prod(spec.ranks))) ** (1 / (2 * spec.order))
    return [torch.randn(s, generator=generator, dtype=dtype, device=device) * scale for s in spec.core_shapes]
