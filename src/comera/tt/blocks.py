"""Block tensor trains: the dense weight, random cores, and decomposition, all blocks at once.

A block of the weight is a matrix of its own: its best approximation of rank r keeps the r largest singular values, and
the best weight of K components keeps the K largest of all blocks. No error is shared, so the squares just add up.

Shapes: A/C input/output blocks, B = A·C blocks in the order of (A, C), N/M features in an input/output block, K
components of all blocks in that order, P largest rank of a block.
"""

from collections.abc import Callable, Sequence
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.tt.spec import BTTSpec


def ranks_of_blocks(spec: BTTSpec, device: torch.device) -> Tensor:
    """(B,)"""
    return torch.tensor(spec.rows_of_ranks, device=device).flatten()


def component_mask(spec: BTTSpec, device: torch.device) -> Tensor:
    """Which of P places in each block has a component: (B, P); True once for each component, in their order."""
    place_P = torch.arange(max(map(max, spec.rows_of_ranks)), device=device)
    return place_P < ranks_of_blocks(spec, device)[:, None]


def in_places(spec: BTTSpec, values: Tensor, dim: int) -> Tensor:
    """Components along `dim` (..., K, ...) in the places of their blocks (..., B, P, ...), zeros in empty ones."""
    counts = [rank for row in spec.rows_of_ranks for rank in row]
    shape = len(counts), max(counts)
    if spec.ranks[1] < prod(shape):
        own_BP = component_mask(spec, values.device)
        index_BP = torch.where(own_BP, own_BP.flatten().cumsum(0).view_as(own_BP) - 1, spec.ranks[1])
        zero = values.new_zeros(1).expand(*values.shape[:dim], 1, *values.shape[dim + 1 :])
        values = torch.cat([values, zero], dim).index_select(dim, index_BP.flatten())
    found: Tensor = values.unflatten(dim, shape)
    return found


def out_of_places(spec: BTTSpec, values: Tensor, dim: int) -> Tensor:
    """Undoes `in_places`: (..., B, P, ...) as (..., K, ...)."""
    flat = values.flatten(dim, dim + 1)
    if spec.ranks[1] == flat.shape[dim]:
        return flat
    return flat.index_select(dim, component_mask(spec, values.device).flatten().nonzero().squeeze(1))


def group(spec: BTTSpec, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both cores block by block, R (B, N, P) and L (B, P, M), with zeros where a block has fewer than P components."""
    r_NK, l_KM = cores[0].flatten(0, 1), cores[1].flatten(1)
    return in_places(spec, r_NK, 1).movedim(0, 1), in_places(spec, l_KM, 0)


def ungroup(r_BNP: Tensor, l_BPM: Tensor, kept_BP: Tensor) -> list[Tensor]:
    """The cores of the components that are kept."""
    return [r_BNP.movedim(1, 0)[:, kept_BP].unsqueeze(0), l_BPM[kept_BP].unsqueeze(-1)]


def materialize_blocks(spec: BTTSpec, cores: Sequence[Tensor]) -> Tensor:
    """The dense weight of `spec.shape` from cores that have absorbed the gates."""
    r_BNP, l_BPM = group(spec, cores)
    full: Tensor = (r_BNP @ l_BPM).unflatten(0, spec.blocks).transpose(1, 2).reshape(spec.padded_shape)
    return full[: spec.in_features, : spec.out_features]


def fold_blocks(spec: BTTSpec, weight: Tensor) -> Tensor:
    """A dense weight of `spec.shape` as its blocks (B, N, M), zero-padded; undoes `materialize_blocks`."""
    (rows, cols), (padded_rows, padded_cols) = spec.shape, spec.padded_shape
    full = F.pad(weight, (0, padded_cols - cols, 0, padded_rows - rows))
    return full.reshape(*spec.in_modes, *spec.out_modes).transpose(1, 2).flatten(0, 1)


def random_cores(spec: BTTSpec, std: float, draw: Callable[..., Tensor]) -> list[Tensor]:
    """Gaussian cores whose weight has the root mean square `std`: components of unit variance for inputs of unit
    variance (R: 1/sqrt(N)), and in L what is left."""
    cores = [draw(*shape) for shape in spec.core_shapes]
    own_BP = component_mask(spec, cores[0].device)
    r_BNP, l_BPM = group(spec, cores)
    r_BNP, l_BPM = r_BNP / sqrt(spec.sizes[0]), l_BPM / own_BP.sum(1).clamp_min(1).sqrt()[:, None, None]
    square = ((r_BNP.mT @ r_BNP) * (l_BPM @ l_BPM.mT)).sum(dtype=torch.float64)
    scale = std * sqrt(prod(spec.padded_shape)) / float(square.sqrt()) if square else 0.0
    return ungroup(r_BNP, l_BPM * scale, own_BP)


def block_svd(weight: Tensor, spec: BTTSpec, delta: float | None) -> tuple[BTTSpec, list[Tensor]]:
    """Spec and cores of the best approximation of a float64 weight by blocks of at most the ranks of `spec`.

    delta: Frobenius norm that may be dropped beyond what these ranks drop; None drops nothing more.
    """
    u_BNP, s_BP, vh_BPM = torch.linalg.svd(fold_blocks(spec, weight), full_matrices=False)
    caps_B1 = ranks_of_blocks(spec, weight.device)[:, None]
    kept_BP = torch.arange(s_BP.shape[1], device=weight.device) < caps_B1
    if delta is not None:
        kept_BP &= _largest(s_BP, _count_above(s_BP, delta))
    return _cut(spec, u_BNP, s_BP, vh_BPM, kept_BP)


def block_singular_values(spec: BTTSpec, cores: Sequence[Tensor]) -> Tensor:
    """Those of all blocks, K in descending order, from cores that have absorbed the gates."""
    _, s_BP, _ = _svd_of_cores(spec, cores)
    return s_BP[component_mask(spec, s_BP.device)].sort(descending=True).values


def round_blocks(
    spec: BTTSpec, cores: Sequence[Tensor], caps: BTTSpec, count: int, rel_delta: float | None
) -> tuple[BTTSpec, list[Tensor], float]:
    """Spec, cores and the relative Frobenius norm of what is dropped when the `count` largest singular values stay, in
    no block more than the ranks of `caps`. rel_delta: as delta for `block_svd`, relative to the norm of the weight."""
    u_BNP, s_BP, vh_BPM = _svd_of_cores(spec, cores)
    device, norm = s_BP.device, float(s_BP.norm())
    least_B = torch.minimum(ranks_of_blocks(spec, device), ranks_of_blocks(caps, device))
    kept_BP = torch.arange(s_BP.shape[1], device=device) < least_B[:, None]
    if rel_delta is not None:
        delta = rel_delta * norm
        count = min(count, _count_above(s_BP, delta))
    kept_BP &= _largest(torch.where(kept_BP, s_BP, -1.0), count)
    dropped = float(s_BP[~kept_BP].norm())
    return *_cut(spec, u_BNP, s_BP, vh_BPM, kept_BP), dropped / norm if norm else 0.0


def _svd_of_cores(spec: BTTSpec, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition of each block, (B, N, P), (B, P) and (B, P, M), without forming the blocks."""
    r_BNP, l_BPM = group(spec, [core.double() for core in cores])
    left_BNP, r_BPP = torch.linalg.qr(r_BNP)
    right_BMP, l_BPP = torch.linalg.qr(l_BPM.mT)
    u_BPP, s_BP, vh_BPP = torch.linalg.svd(r_BPP @ l_BPP.mT)
    return left_BNP @ u_BPP, s_BP, vh_BPP @ right_BMP.mT


def _count_above(s_BP: Tensor, delta: float) -> int:
    """The smallest number of singular values that can stay when the norm of the others is at most `delta`."""
    tails = s_BP.flatten().sort().values.square().cumsum(0).sqrt()
    return int((tails > delta).sum())


def _largest(s_BP: Tensor, count: int) -> Tensor:
    """A mask of the `count` largest values, among equals as many of each block."""
    order = s_BP.mT.flatten().argsort(descending=True, stable=True)  # so equal ones are of all blocks
    mask = torch.zeros(s_BP.numel(), dtype=torch.bool, device=s_BP.device)
    mask[order[:count]] = True
    return mask.view_as(s_BP.mT).mT


def _cut(spec: BTTSpec, u_BNP: Tensor, s_BP: Tensor, vh_BPM: Tensor, kept_BP: Tensor) -> tuple[BTTSpec, list[Tensor]]:
    """Balanced cores U √S and √S V of the singular values that are kept.

    Where s is zero, but kept, U stays at the scale of the others: of two zeros, no gradient would ever move either.
    """
    dead_BP = s_BP <= 1e-14 * s_BP.max() if s_BP.numel() else s_BP > 0
    live, rows, cols = s_BP[~dead_BP & kept_BP], u_BNP.shape[1], vh_BPM.shape[2]
    random = (sqrt(rows) + sqrt(cols)) / sqrt(max(1, spec.in_features))  # of a weight as layers begin with it
    root_BP = s_BP.masked_fill(dead_BP, 0).sqrt()
    left_BP = root_BP.masked_fill(dead_BP, sqrt(float(live.mean()) if len(live) else random))
    cores = ungroup(u_BNP * left_BP[:, None, :], vh_BPM * root_BP[..., None], kept_BP)
    return spec.with_block_ranks(kept_BP.sum(1).tolist()), cores
