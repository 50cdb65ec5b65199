"""Block tensor trains: the dense weight, random cores, and decomposition, all blocks at once.

A block of the weight is a matrix of its own: its best approximation of rank r keeps the r largest singular values, and
the best weight of K components keeps the K largest of all blocks. No error is shared, so the squares just add up.

Shapes: A/C input/output blocks, B = A·C blocks in the order of (A, C), N/M features in an input/output block, K
components of all blocks in that order, P largest rank of a block.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.tt.spec import BTTSpec


@lru_cache(maxsize=64)
def component_index(spec: BTTSpec) -> Tensor:
    """Where the components of each block are: (B, P), K where a block has fewer than P."""
    rank_B = torch.tensor(spec.rows_of_ranks).flatten()
    first_B, place_P = rank_B.cumsum(0) - rank_B, torch.arange(int(rank_B.max()))
    return torch.where(place_P < rank_B[:, None], first_B[:, None] + place_P, spec.ranks[1])


def group(spec: BTTSpec, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Both cores block by block, R (B, N, P) and L (B, P, M), with zeros where a block has fewer than P components."""
    index_BP = component_index(spec).to(cores[0].device)
    r_NK, l_KM = F.pad(cores[0].flatten(0, 1), (0, 1)), F.pad(cores[1].flatten(1), (0, 0, 0, 1))
    return r_NK[:, index_BP].movedim(0, 1), l_KM[index_BP]


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
    rank_BP = (component_index(spec) < spec.ranks[1]).sum(1, keepdim=True).clamp_min(1).sqrt()
    cores = [draw(*shape) for shape in spec.core_shapes]
    r_BNP, l_BPM = group(spec, cores)
    r_BNP, l_BPM = r_BNP / sqrt(spec.sizes[0]), l_BPM / rank_BP.unsqueeze(-1)
    square = ((r_BNP.mT @ r_BNP) * (l_BPM @ l_BPM.mT)).sum(dtype=torch.float64)
    scale = std * sqrt(prod(spec.padded_shape)) / float(square.sqrt()) if square else 0.0
    return ungroup(r_BNP, l_BPM * scale, component_index(spec) < spec.ranks[1])


def block_svd(weight: Tensor, spec: BTTSpec, delta: float | None) -> tuple[BTTSpec, list[Tensor]]:
    """Spec and cores of the best approximation of a float64 weight by blocks of at most the ranks of `spec`.

    delta: Frobenius norm that may be dropped beyond what these ranks drop; None drops nothing more.
    """
    u_BNP, s_BP, vh_BPM = torch.linalg.svd(fold_blocks(spec, weight), full_matrices=False)
    caps_B1 = torch.tensor(spec.rows_of_ranks, device=weight.device).flatten()[:, None]
    kept_BP = torch.arange(s_BP.shape[1], device=weight.device) < caps_B1
    if delta is not None:
        kept_BP &= _largest(s_BP, _count_above(s_BP, delta))
    return _cut(spec, u_BNP, s_BP, vh_BPM, kept_BP)


def block_singular_values(spec: BTTSpec, cores: Sequence[Tensor]) -> Tensor:
    """Those of all blocks, K in descending order, from cores that have absorbed the gates."""
    _, s_BP, _ = _svd_of_cores(spec, cores)
    return s_BP[component_index(spec) < spec.ranks[1]].sort(descending=True).values


def round_blocks(
    spec: BTTSpec, cores: Sequence[Tensor], caps: BTTSpec, count: int, delta: float | None
) -> tuple[BTTSpec, list[Tensor], float]:
    """Spec, cores and the Frobenius norm of what is dropped when the `count` largest singular values stay, in no block
    more than the ranks of `caps`. delta: as for `block_svd`."""
    u_BNP, s_BP, vh_BPM = _svd_of_cores(spec, cores)
    place_P, device = torch.arange(s_BP.shape[1]), s_BP.device
    own_B, caps_B = (torch.tensor(each.rows_of_ranks).flatten() for each in (spec, caps))
    kept_BP = (place_P < torch.minimum(own_B, caps_B)[:, None]).to(device)
    if delta is not None:
        count = min(count, _count_above(s_BP, delta))
    kept_BP &= _largest(torch.where(kept_BP, s_BP, -1.0), count)
    dropped = float(s_BP[~kept_BP].norm())
    return *_cut(spec, u_BNP, s_BP, vh_BPM, kept_BP), dropped


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
    """A mask of the `count` largest values, the first ones among equals."""
    order = s_BP.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(s_BP.numel(), dtype=torch.bool, device=s_BP.device)
    mask[order[:count]] = True
    return mask.view_as(s_BP)


def _cut(spec: BTTSpec, u_BNP: Tensor, s_BP: Tensor, vh_BPM: Tensor, kept_BP: Tensor) -> tuple[BTTSpec, list[Tensor]]:
    """Balanced cores U √S and √S V of the singular values that are kept."""
    root_BP = s_BP.sqrt()
    cores = ungroup(u_BNP * root_BP[:, None, :], vh_BPM * root_BP[..., None], kept_BP)
    return spec.with_block_ranks(kept_BP.sum(1).tolist()), cores
