"""From cores to dense tensors: merging neighbours, and materialising the whole weight.

Shapes: R/S left/right rank, N mode(s). `materialize` is the slow oracle of the tests, and the export.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comera.tt.spec import Spec, TTMSpec


def absorb(cores: Sequence[Tensor], rank_params: Sequence[Tensor]) -> list[Tensor]:
    """Fold each bond's rank parameters into the core left of it: G_k D_k.

    cores: `order` tensors (R, modes..., S); rank_params: `order - 1` vectors (S,).
    Returns `order` tensors of the cores' shapes.
    """
    return [core * d for core, d in zip(cores, rank_params, strict=False)] + [cores[-1]]


def merge(cores: Sequence[Tensor]) -> Tensor:
    """Product of neighbouring cores over their shared bonds, left to right.

    cores: tensors (R, modes..., S). Returns (R_first, modes of all cores in order..., S_last).
    An empty bond gives zeros.
    """
    product_RNS = cores[0]
    for core in cores[1:]:
        product_RNS = torch.tensordot(product_RNS, core, dims=1)
    return product_RNS


def materialize(spec: Spec, cores: Sequence[Tensor]) -> Tensor:
    """The dense weight of a chain, padding sliced away.

    cores: `spec.order` tensors with the rank parameters absorbed.
    Returns (in_features, out_features) for a TTSpec, (num_embeddings, embedding_dim) for a TTMSpec.
    """
    full = merge(cores)
    if isinstance(spec, TTMSpec):
        # (1, m1, n1, m2, n2, ..., 1) -> (m1, m2, ..., n1, n2, ...)
        full = full.reshape([n for pair in zip(spec.row_modes, spec.col_modes, strict=True) for n in pair])
        full = full.permute([*range(0, 2 * spec.order, 2), *range(1, 2 * spec.order, 2)])
    rows, cols = spec.shape
    return full.reshape(_padded_rows(spec), -1)[:rows, :cols]


def _padded_rows(spec: Spec) -> int:
    rows = 1
    for mode in spec.row_modes if isinstance(spec, TTMSpec) else spec.in_modes:
        rows *= mode
    return rows
