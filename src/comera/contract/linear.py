"""How a tensor train meets its input (provisional: two products, autograd's backward)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from comera.tt.dense import materialize, merge
from comera.tt.spec import TTMSpec, TTSpec


def tt_linear(x: Tensor, spec: TTSpec, cores: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """x (..., in_features) -> (..., out_features)."""
    rank = spec.ranks[spec.split]
    a_IR = merge(cores[: spec.split]).reshape(-1, rank)[: spec.in_features]
    b_RO = merge(cores[spec.split :]).reshape(rank, -1)[:, : spec.out_features]
    return F.linear(F.linear(x, a_IR.t()), b_RO.t(), bias)


def ttm_linear(x: Tensor, spec: TTMSpec, cores: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """x (..., embedding_dim) -> logits (..., num_embeddings)."""
    return F.linear(x, materialize(spec, cores), bias)
