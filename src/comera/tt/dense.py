"""Between cores and dense tensors: merging neighbors, materializing the whole weight, and the way back.

`materialize` is the slow oracle of the tests, and what an export writes.

Shapes: R/S left/right rank, N mode(s).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.tt.blocks import materialize_blocks
from comera.tt.format import check_linear
from comera.tt.spec import BTTSpec, Spec, TTMSpec


def absorb(cores: Sequence[Tensor], rank_params: Sequence[Tensor]) -> list[Tensor]:
    """Multiply the gates, `order - 1` vectors (S,), into the core (R, modes..., S) to their left: G_k D_k.

    In the dtype of the cores; gates may be wider.
    """
    return [(core * d).to(core.dtype) for core, d in zip(cores, rank_params, strict=False)] + [cores[-1]]


def absorb_in_smaller(cores: Sequence[Tensor], rank_params: Sequence[Tensor | None]) -> list[Tensor]:
    """Multiply the gates of each rank into the smaller of the two cores (R, modes..., S) that share it; None for none.

    In a table of plain low rank the other core has a row for each token. In the dtype of the cores, as `absorb`.
    """
    absorbed = list(cores)
    for k, d in enumerate(rank_params):
        left, right = absorbed[k : k + 2]
        if d is not None and left.numel() <= right.numel():
            absorbed[k] = (left * d).to(left.dtype)
        elif d is not None:
            absorbed[k + 1] = (right * d.view(-1, *[1] * (right.dim() - 1))).to(right.dtype)
    return absorbed


def merge(cores: Sequence[Tensor]) -> Tensor:
    """Product of neighboring cores (R, modes..., S) over the ranks that they share, from left to right.

    Its axes: R of the first core, the modes of all cores in order, S of the last core. A rank of 0 gives zeros.
    """
    product_RNS = cores[0]
    for core in cores[1:]:
        product_RNS = torch.tensordot(product_RNS, core, dims=1)
    return product_RNS


def materialize(spec: Spec, cores: Sequence[Tensor]) -> Tensor:
    """The dense weight of a tensor train, of `spec.shape`, padding sliced away.

    cores: `order` tensors of `spec.core_shapes` that have absorbed the gates. Raises SpecError for a spec with an
    activation, for which there is no such weight.

    Example:
        >>> import torch
        >>> from comera.tt import materialize, tt_spec, tt_svd
        >>> weight = torch.randn(24, 36)
        >>> found = tt_svd(weight, tt_spec(24, 36, order=4, rank=36))  # full rank: exact
        >>> torch.allclose(materialize(found.spec, found.cores), weight, atol=1e-5)
        True
    """
    check_linear(spec, "dense weight")
    if isinstance(spec, BTTSpec):
        return materialize_blocks(spec, cores)
    full = merge(cores)
    if isinstance(spec, TTMSpec):
        # (1, m1, n1, m2, n2, ..., 1) -> (m1, m2, ..., n1, n2, ...)
        full = full.reshape([n for pair in zip(spec.row_modes, spec.col_modes, strict=True) for n in pair])
        full = full.permute([*range(0, 2 * spec.order, 2), *range(1, 2 * spec.order, 2)])
    rows, cols = spec.shape
    return full.reshape(spec.padded_shape)[:rows, :cols]


def zero_row(table_VD: Tensor, row: int) -> Tensor:
    """The same table with zeros in one row, which then gets no gradient."""
    return table_VD.index_fill(0, torch.full((1,), row, device=table_VD.device), 0)


def fold(spec: Spec, weight: Tensor) -> Tensor:
    """The dense weight of `spec.shape` with one axis for each core, `spec.sizes`, padded with zeros: the inverse of
    `materialize`."""
    (rows, cols), (padded_rows, padded_cols) = spec.shape, spec.padded_shape
    full = F.pad(weight, (0, padded_cols - cols, 0, padded_rows - rows))
    if isinstance(spec, TTMSpec):
        # (m1, m2, ..., n1, n2, ...) -> (m1, n1, m2, n2, ...)
        full = full.reshape([*spec.row_modes, *spec.col_modes])
        full = full.permute([axis for k in range(spec.order) for axis in (k, spec.order + k)])
    return full.reshape(spec.sizes)


def frobenius_norm(cores: Sequence[Tensor]) -> Tensor:
    """‖W‖_F of the padded weight, a float64 scalar, from `cores` (R, modes..., S) that have absorbed the gates.

    Carries the Gram matrix of the cores so far, M_k = Σ_n G_k[n]ᵀ M_{k-1} G_k[n], from core to core in
    O(order · modes · rank³) operations; W is never formed.
    """
    gram_SS = cores[0].new_ones(1, 1, dtype=torch.float64)
    for core in cores:
        core_RNS = core.double().flatten(1, -2)
        weighted_RNS = torch.tensordot(gram_SS, core_RNS, dims=1)
        gram_SS = torch.tensordot(core_RNS, weighted_RNS, dims=([0, 1], [0, 1]))
    return gram_SS.sum().sqrt()
