"""One learning rate: how the rates of cores follow from the rate that a dense weight would have.

A step at rate η moves a matrix by at most `reach(d_in, d_out)` · η in spectral norm: √(d_in·d_out) under Adam, which
moves every entry by about η; 0.2·√max(d_in, d_out) under Muon. Core k, as the matrix (d_in^k × d_out^k) that the
product applies (`as_matrices`), moves the weight of K cores to first order by

    ‖ΔW‖ ≤ Σ_k ‖ΔG_k‖ · Π_{j≠k} ‖G_j‖

Its rate η_k is such that each term is a share of what the dense rate η allows a dense weight::

    η_k · reach(d_in^k, d_out^k) · Π_{j≠k} ‖G_j‖  =  η · reach(in, out) · share(K)

The share is 1/K under Adam, whose steps may all push one direction, and 1/√K under Muon, whose steps push all
directions alike and hence add up like random ones. Both were measured (docs/log.md).

In a table of n-grams entries are about one, and σ in the dense table beside it: C_k has the rate η/σ, so that its rows
move as far in proportion as dense ones; with `inner` each of its r₀ + 1 rows takes part in all rows, and η/(σ (r₀ + 1))
moves these as far. Beside longer rows than of norm one, σ counts as 1/√D, theirs. P has η, as a dense weight. Measured,
too.

In a TTM the dense weight is one row. The last core of an adapter starts at zero, and counts as it would have been drawn
otherwise. Source: the bound, to first order in the steps; the norms are those of the cores
as they are. docs/method.md §9.
"""

from collections.abc import Callable
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from comera.nn.tensor_train import TensorTrain
from comera.optim.core_matrices import as_matrices
from comera.tt.init import init_cores
from comera.tt.ngram import NGramSpec
from comera.tt.spec import TTMSpec


class Reach(NamedTuple):
    """How far the steps of an optimizer move a weight.

    `step`: the spectral norm of a step at rate 1 on a matrix (d_in × d_out), at most. `share`: the part of a dense
    weight's step that each of K cores may take.
    """

    step: Callable[[int, int], float]
    share: Callable[[int], float]


ADAM = Reach(step=lambda d_in, d_out: sqrt(d_in * d_out), share=lambda cores: 1 / cores)
MUON = Reach(step=lambda d_in, d_out: 0.2 * sqrt(max(d_in, d_out)), share=lambda cores: 1 / sqrt(cores))

# A row of a dense table gets its gradients far apart, so Adam's second moment has decayed when one comes, and the row
# moves by some 10 (β₂ = 0.99) to 30 (0.999) times the rate. A compressed row moves with its cores, in every step. Where
# the table makes logits, too, every row of a dense one has a gradient in every step.
RARE = 10.0
LEAST_STD = 0.01  # of a table beside n-grams: a rate in proportion to the reciprocal of less would be too high


@torch.no_grad()
def core_rates(train: TensorTrain, reach: Reach = ADAM, *, logits: bool = False) -> list[float] | None:
    """Rates of the cores of a tensor train as multiples of the dense rate, from the cores as they are now.

    logits: whether an output layer multiplies by all rows of the table in every step.
    None where there is nothing to measure: on the meta device, and for a weight of zeros, as of rank 0.
    """
    spec = train.spec
    if isinstance(spec, NGramSpec):
        std = max(min(train.init_std, 1 / sqrt(spec.embedding_dim)), LEAST_STD)
        rate = 1 / std / (1 if spec.inner is None else spec.rows)
        return [*[float(f"{rate:.3g}")] * (spec.order - 1), 1.0]
    cores = [_whole(core) for core in train.cores]
    if train.starts_at_zero and not cores[-1].is_meta and not cores[-1].any():
        generator = torch.Generator().manual_seed(0)  # of its own: the user's draws stay as they are
        cores[-1] = init_cores(spec, train.init_std, generator=generator)[-1]
    if cores[0].is_meta or not all(core.numel() for core in cores):
        return None
    matrices = [as_matrices(spec, k, core.double()[None])[0] for k, core in enumerate(cores)]
    norms = [float(torch.linalg.eigvalsh(_gram(matrix)).amax().clamp_min(0).sqrt()) for matrix in matrices]
    if not all(norms):
        return None
    dense = reach.step(*spec.shape)
    if isinstance(spec, TTMSpec):
        dense = reach.step(1, spec.embedding_dim) * (1 if logits else RARE)
    rates = []
    for matrix, norm in zip(matrices, norms, strict=True):
        moved = reach.step(*matrix.shape[-2:]) * prod(norms) / norm
        rates.append(float(f"{dense * reach.share(spec.order) / moved:.3g}"))
    return rates


def _gram(matrix: Tensor) -> Tensor:
    """G Gᵀ or Gᵀ G, the smaller one."""
    return matrix @ matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix.mT @ matrix


def _whole(core: Tensor) -> Tensor:
    """A core with all of its parts, where `fully_shard` has spread it."""
    whole: Tensor = core.full_tensor() if hasattr(core, "full_tensor") else core.detach()
    return whole
