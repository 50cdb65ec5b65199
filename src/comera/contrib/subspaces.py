"""Subspaces of gradients: which modes of a tensor are projected, onto what, and how moments follow a new basis.

A gradient G (N_1, ..., N_d) is projected in some of its modes, U_k (N_k, R_k) with orthonormal columns::

    C = G ×_k U_kᵀ                the core, in the projected modes k         G ≈ C ×_k U_k
    U_k ← leading left singular vectors of G ×_{j≠k} U_jᵀ, unfolded in mode k, one mode after the other

A matrix with one projected mode is GaLore's case; with all modes it is one sweep of the higher-order orthogonal
iteration, which without bases to begin with is the sequentially truncated higher-order SVD. No SVD is computed. For a
matrix X (N, E) and S, the old basis and random columns besides it::

    Q R = X (Xᵀ S)                one step of subspace iteration, S (N, R + 8)
    V Λ Vᵀ = (Qᵀ X)(Qᵀ X)ᵀ        the energies Λ = σ² on the way;  U = Q V, the first R columns

Moments M, V of a core follow from basis U to basis U' with S = U'ᵀ U: M ← S M, and V ← (S ∘ S) V, as variances of
independent coordinates do. Row i of S ∘ S sums to less than 1 where new direction i leaves the old subspace; for that
part no second moment is known, and the gradient's own square takes its place.

Source: Halko, Martinsson and Tropp 2011 (arXiv:0909.4061) for Q; De Lathauwer et al. 2000 and Vannieuwenhoven et al.
2012 for the tensors. docs/method.md §9. N mode size, R rank, E product of the other modes.
"""

from collections.abc import Mapping
from math import ceil, prod
from typing import NamedTuple

import torch
from torch import Tensor

Bases = Mapping[int, Tensor]  # of the projected modes

SHORTEST = 16  # of projected modes: shorter ones, such as a kernel's, have nothing to gain
_OVERSAMPLING = 8


class Projection(NamedTuple):
    """How a parameter is projected. shape: that of the tensor it is seen as; ranks: the largest of each such mode."""

    shape: tuple[int, ...]
    ranks: dict[int, int]

    @property
    def core(self) -> int:
        """Elements of a core at these ranks."""
        return prod(self.ranks.get(k, n) for k, n in enumerate(self.shape))

    @property
    def elements(self) -> int:
        """What is kept at these ranks: two moments of the core, and the bases."""
        return 2 * self.core + sum(self.shape[k] * rank for k, rank in self.ranks.items())


def plan(shape: tuple[int, ...], rank: float, *, as_matrix: bool = False, two_sided: bool = False) -> Projection:
    """The projection of a parameter of this shape; of no mode if that would not make the state smaller.

    rank: of each projected mode, or the share of it (float). as_matrix: see it as (N_1, rest). two_sided: project both
    modes of a matrix instead of the shorter one.
    """
    if as_matrix and len(shape) > 2:
        shape = (shape[0], prod(shape[1:]))
    if len(shape) < 2 or not all(shape):
        return Projection(shape, {})
    modes = range(len(shape))
    if len(shape) == 2 and not two_sided:
        modes = range(1, 2) if shape[1] <= shape[0] else range(1)
    ranks = {k: rank if isinstance(rank, int) else ceil(rank * shape[k]) for k in modes if shape[k] >= SHORTEST}
    ranks = {k: r for k, r in ranks.items() if r < shape[k]}
    for k in sorted(ranks, key=lambda k: -ranks[k]):  # no mode of a core has more directions than the others together
        ranks[k] = min(ranks[k], prod(ranks.get(j, n) for j, n in enumerate(shape) if j != k))
    found = Projection(shape, ranks)
    return found if found.elements < 2 * prod(shape) else Projection(shape, {})


def project(tensor: Tensor, bases: Bases) -> Tensor:
    """The core of a tensor, contiguous where anything is projected."""
    for k, basis_NR in bases.items():
        tensor = _mode_product(tensor, basis_NR.mT, k)
    return tensor


def restore(core: Tensor, bases: Bases) -> Tensor:
    """The tensor of a core."""
    for k, basis_NR in bases.items():
        core = _mode_product(core, basis_NR, k)
    return core


def restore_squares(core: Tensor, bases: Bases) -> Tensor:
    """Variances of a tensor's elements, of those of a core's, taken as independent."""
    return restore(core, {k: basis_NR.square() for k, basis_NR in bases.items()})


def refined(
    tensor: Tensor, bases: Bases, ranks: Mapping[int, int], generator: torch.Generator, energy: float | None = None
) -> dict[int, Tensor]:
    """New bases for the modes in `ranks`, which hold their largest ranks.

    bases: those to begin from, in some modes or none. energy: the share of each unfolding's squares that must be kept;
    ranks are as small as that allows. None: they are the largest ones. Elements that are not finite count as zeros.
    """
    tensor = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    tensor = tensor / tensor.abs().amax().clamp_min(torch.finfo(tensor.dtype).tiny)  # squares stay in range
    found = dict(bases)
    for k, rank in ranks.items():
        others = {j: basis for j, basis in found.items() if j != k}
        unfolded_NE = project(tensor, others).movedim(k, 0).flatten(1)
        found[k] = _leading(unfolded_NE, found.get(k), rank, generator, energy)
    return found


def _leading(
    x_NE: Tensor, start_NR: Tensor | None, rank: int, generator: torch.Generator, energy: float | None
) -> Tensor:
    """The leading left singular vectors of X, about; exactly where the rank is nearly N."""
    n = len(x_NE)
    width = rank + _OVERSAMPLING
    if width < n:
        start_NR = x_NE.new_empty(n, 0) if start_NR is None else start_NR[:, :rank]
        drawn = torch.randn(n, width - start_NR.shape[1], generator=generator, dtype=x_NE.dtype)
        s_NW = torch.cat([start_NR, drawn.to(x_NE.device)], 1)
        q_NW = torch.linalg.qr(x_NE @ (x_NE.mT @ s_NW)).Q
        small_WE = q_NW.mT @ x_NE
        energies_W, vectors_WW = torch.linalg.eigh(small_WE @ small_WE.mT)
        vectors = q_NW @ vectors_WW
    else:
        energies_W, vectors = torch.linalg.eigh(x_NE @ x_NE.mT)
    if energy is not None:
        kept_W = energies_W.flip(0).clamp_min(0).cumsum(0)
        rank = min(rank, 1 + int((kept_W < energy * x_NE.square().sum()).sum()))
    basis_NR: Tensor = vectors.flip(1)[:, :rank].contiguous()
    return basis_NR


def carried(first: Tensor, second: Tensor, old: Bases, new: Bases, unknown: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments of a core after a change of its bases.

    unknown: the second moment, in the new bases, of what the old subspace did not hold.
    """
    rotations = {k: basis_NR.mT @ old[k] for k, basis_NR in new.items()}
    squares = {k: rotation.square() for k, rotation in rotations.items()}
    known = torch.ones((), dtype=first.dtype, device=first.device)
    for k, square in squares.items():
        known = known * square.sum(1).view([-1 if j == k else 1 for j in range(first.ndim)])
    return restore(first, rotations), restore(second, squares).add_((1 - known).clamp_min(0) * unknown)


def _mode_product(tensor: Tensor, matrix_RN: Tensor, k: int) -> Tensor:
    """tensor ×_k matrix, contiguous."""
    before, n, after = tensor.shape[:k], tensor.shape[k], tensor.shape[k + 1 :]
    if prod(after) == 1:  # one product of matrices instead of many of a matrix and a vector
        out = tensor.reshape(-1, n) @ matrix_RN.mT
    else:
        out = matrix_RN @ tensor.reshape(prod(before), n, prod(after))
    return out.reshape(*before, len(matrix_RN), *after)
