"""One learning rate: how the rates of cores follow from the rate that a dense weight would have.

Under Adam, a step at rate η moves every entry by about η, and so a matrix by at most η·√(d_in·d_out) in spectral norm.
Core k, as the matrix (d_in^k × d_out^k) that the product applies, moves the weight of K cores to first order by

    ‖ΔW‖ ≤ Σ_k ‖ΔG_k‖ · Π_{j≠k} ‖G_j‖

Its rate η_k is such that each term is 1/K of what the dense rate η allows a dense weight::

    η_k · √(d_in^k · d_out^k) · Π_{j≠k} ‖G_j‖  =  η · √(in · out) / K

TT: input cores are (r_{k-1}·n_k × r_k), output cores (r_{k-1} × m_k·r_k). BTT: R is block-diagonal with blocks (b ×
components of the input block), L with blocks (components of the output block × d): the largest of them counts. TTM,
where a row is looked up: the slice of an id's digit, (r_{k-1} × n_k·r_k), and for the dense rate one row.
Source: the bound, to first order in the steps; the norms are those of the cores as they are. docs/method.md §9.
"""

from collections.abc import Sequence
from math import prod, sqrt

import torch
from torch import Tensor

from comera.nn.tensor_train import TensorTrain
from comera.tt.blocks import group
from comera.tt.spec import BTTSpec, TTMSpec

# A row of a dense table gets its gradients far apart, so Adam's second moment has decayed when one comes, and the row
# moves by some 10 (β₂ = 0.99) to 30 (0.999) times the rate. A compressed row moves with its cores, in every step.
RARE = 10.0


@torch.no_grad()
def core_rates(train: TensorTrain) -> list[float] | None:
    """Rates of the cores of a tensor train as multiples of the dense rate, from the cores as they are now.

    None where there is nothing to measure: on the meta device, and for a weight of zeros, as of rank 0.
    """
    spec = train.spec
    cores = [_whole(core) for core in train.cores]
    if cores[0].is_meta or not all(core.numel() for core in cores):
        return None
    matrices = _matrices(train, cores)
    norms = [float(torch.linalg.eigvalsh(_gram(matrix)).amax().clamp_min(0).sqrt()) for matrix in matrices]
    if not all(norms):
        return None
    dense = sqrt(prod(spec.shape)) if not isinstance(spec, TTMSpec) else RARE * sqrt(spec.embedding_dim)
    rates = []
    for matrix, norm in zip(matrices, norms, strict=True):
        moved = sqrt(prod(matrix.shape[-2:])) * prod(norms) / norm
        rates.append(float(f"{dense / spec.order / moved:.3g}"))
    return rates


def _matrices(train: TensorTrain, cores: Sequence[Tensor]) -> list[Tensor]:
    """The cores as the product applies them, each a matrix or a batch of equally large ones, in float64."""
    spec, cores = train.spec, [core.double() for core in cores]
    if isinstance(spec, BTTSpec):
        r_BNP, l_BPM = (blocks.unflatten(0, spec.blocks) for blocks in group(spec, cores))
        return [r_BNP.movedim(1, 2).flatten(2), l_BPM.movedim(0, 1).flatten(1, 2)]
    if isinstance(spec, TTMSpec):
        return [core.movedim(1, 0).flatten(2) for core in cores]
    return [core.flatten(0, 1) if k < spec.split else core.flatten(1) for k, core in enumerate(cores)]


def _gram(matrix: Tensor) -> Tensor:
    """G Gᵀ or Gᵀ G, the smaller one."""
    return matrix @ matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix.mT @ matrix


def _whole(core: Tensor) -> Tensor:
    """A core with all of its parts, where `fully_shard` has spread it."""
    whole: Tensor = core.full_tensor() if hasattr(core, "full_tensor") else core.detach()
    return whole
