"""Rows of a tensor-train matrix (provisional)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec


def ttm_lookup(ids: Tensor, spec: TTMSpec, cores: Sequence[Tensor], *, padding_idx: int | None = None) -> Tensor:
    """ids (...) -> rows (..., embedding_dim)."""
    return F.embedding(ids, materialize(spec, cores), padding_idx)
