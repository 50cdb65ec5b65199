"""From a dense weight to cores (TT-SVD), and from cores to fewer numbers (rounding).

Both sweep over the bonds from left to right and truncate one unfolding at a time by an SVD (Oseledets 2011,
"Tensor-train decomposition", algorithms 1 and 2). Squared errors of the bonds add up, so for a relative error ε in
total each of the order−1 bonds may drop singular values of norm δ = ε ‖W‖ / sqrt(order−1).

Ranks of the result: at most the caps, and at most what the modes and the ranks before allow. Without `rel_error`
nothing else is dropped, so directions of singular value 0 stay and can be trained. With it (0.0 counts) a bond keeps
only what exceeds δ and the rounding of float64 (1e-12 ‖W‖); a weight of zeros then has rank 0. A cap of 0 on one bond
empties them all.

Shapes: R/S left/right rank, N mode(s). All arithmetic is float64; cores come back in the dtype of the input, each
with the same Frobenius norm (unless W = 0), so that training starts from balanced cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.dense import fold, materialize
from comera.tt.spec import Spec

_ROUNDING = 1e-12  # relative norm of the singular values that float64 leaves where exact arithmetic has zeros


@dataclass(frozen=True)
class Decomposition:
    """Cores of a weight with their spec (the ranks that were found) and the relative Frobenius error made."""

    spec: Spec
    cores: list[Tensor]
    error: float


@torch.no_grad()
def tt_svd(weight: Tensor, spec: Spec, *, rel_error: float | None = None) -> Decomposition:
    """Cores of a dense weight, at most sqrt(order−1) times worse than the best ones of the same ranks.

    weight: (rows, columns) of `spec.shape`, any floating dtype; `spec.ranks` are caps.
    rel_error: wanted relative Frobenius error, in [0, 1); the caps still hold.
    The error returned is measured against the returned cores, their cast included (0 for a weight of zeros).
    Raises SpecError for another shape, a dtype that is not floating, NaN or infinity.
    """
    if tuple(weight.shape) != spec.shape:
        raise SpecError(f"expected a weight of shape {spec.shape} for {spec}, got {tuple(weight.shape)}")
    _check_numbers("the weight", weight)
    dense = weight.double()
    norm = float(dense.norm())
    delta = _delta(rel_error, norm, spec.order)
    rest, ranks, chain = fold(spec, dense), [1], []
    for k, cap in enumerate(_caps(spec)):
        unfolding = rest.reshape(ranks[k] * spec.sizes[k], prod(spec.sizes[k + 1 :]))
        core, rest, _ = _truncate(unfolding, cap, delta)
        chain.append(core)
        ranks.append(core.shape[1])
    spec = spec.with_ranks((*ranks, 1))
    cores = _finish(spec, [*chain, rest], weight.dtype)
    error = float((dense - materialize(spec, [core.double() for core in cores])).norm())
    return Decomposition(spec, cores, error / norm if norm else error)


@torch.no_grad()
def round_cores(
    spec: Spec,
    cores: Sequence[Tensor],
    *,
    ranks: int | Sequence[int] | None = None,
    rel_error: float | None = None,
) -> Decomposition:
    """Re-compress a chain to smaller ranks or to a given error; the dense weight is never formed.

    cores: `spec.order` tensors of `spec.core_shapes`, rank parameters absorbed.
    ranks: caps, one integer or all order+1 (default: those of `spec`). rel_error: wanted relative error, in [0, 1).
    The error returned is that of the truncation, padding included, before the cores are cast back.
    Raises SpecError for other shapes, ranks that do not fit the modes, NaN or infinity.
    """
    _check_cores(spec, cores)
    caps = _caps(spec if ranks is None else spec.with_ranks(ranks))
    chain = _right_orthogonal(cores)
    norm = float(chain[0].norm())
    delta = _delta(rel_error, norm, spec.order)
    # left to right: truncate, and hand what remains to the next core
    new_ranks, dropped = [1], 0.0
    for k, cap in enumerate(caps):
        chain[k], rest_SS, lost = _truncate(chain[k].flatten(0, 1), cap, delta)
        chain[k + 1] = torch.tensordot(rest_SS, chain[k + 1], dims=1)
        new_ranks.append(rest_SS.shape[0])
        dropped += lost**2
    spec = spec.with_ranks((*new_ranks, 1))
    return Decomposition(spec, _finish(spec, chain, cores[0].dtype), sqrt(dropped) / norm if norm else 0.0)


@torch.no_grad()
def singular_values(spec: Spec, cores: Sequence[Tensor]) -> list[Tensor]:
    """Singular values of the unfolding at each inner bond, descending, float64; the dense weight is never formed.

    cores: as in `round_cores`. Dropping σ at one bond makes a Frobenius error of σ. Raises SpecError as it does.
    """
    _check_cores(spec, cores)
    chain = _right_orthogonal(cores)
    values = []
    for k in range(spec.order - 1):
        _, sigma, vh = torch.linalg.svd(chain[k].flatten(0, 1), full_matrices=False)
        values.append(sigma)
        chain[k + 1] = torch.tensordot(sigma[:, None] * vh, chain[k + 1], dims=1)
    return values


def _right_orthogonal(cores: Sequence[Tensor]) -> list[Tensor]:
    """Cores (R, N, S) in float64, all but the first with orthonormal rows (R, N·S), so that it alone has the norm."""
    chain = [core.double().flatten(1, -2) for core in cores]
    for k in range(len(chain) - 1, 0, -1):
        q, r = torch.linalg.qr(chain[k].flatten(1).mT)
        chain[k] = q.mT.reshape(q.shape[1], *chain[k].shape[1:])
        chain[k - 1] = torch.tensordot(chain[k - 1], r.mT, dims=1)
    return chain


def _check_cores(spec: Spec, cores: Sequence[Tensor]) -> None:
    came = tuple(tuple(core.shape) for core in cores)
    if came != spec.core_shapes:
        raise SpecError(f"expected cores of shapes {spec.core_shapes} for {spec}, got {came}")
    for k, core in enumerate(cores):
        _check_numbers(f"core {k}", core)


def _truncate(matrix: Tensor, cap: int, delta: float | None) -> tuple[Tensor, Tensor, float]:
    """Orthonormal columns, the rest, and the Frobenius norm of what was dropped: matrix ≈ columns @ rest."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    tails = s.square().flip(0).cumsum(0).flip(0).sqrt()  # tails[r]: norm of all that a rank r drops; descending
    rank = min(cap, len(s))
    if delta is not None:
        rank = min(rank, int((tails > delta).sum()))
    return u[:, :rank], s[:rank, None] * vh[:rank], float(tails[rank]) if rank < len(s) else 0.0


def _delta(rel_error: float | None, norm: float, order: int) -> float | None:
    """Norm that one bond may drop; never below the rounding of float64, which else would count as rank."""
    if rel_error is None:
        return None
    if not 0 <= rel_error < 1:
        raise SpecError(f"rel_error is a relative Frobenius error and must lie in [0, 1), got {rel_error}")
    return norm * max(rel_error / sqrt(max(1, order - 1)), _ROUNDING)


def _caps(spec: Spec) -> tuple[int, ...]:
    """Caps of the inner bonds; an empty bond empties the chain."""
    return spec.inner_ranks if all(spec.inner_ranks) else (0,) * len(spec.inner_ranks)


def _finish(spec: Spec, cores: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cores in the shapes of the spec, of equal Frobenius norm, cast."""
    norms = [float(core.norm()) for core in cores]
    if all(norms):
        level = prod(norm ** (1 / spec.order) for norm in norms)
        cores = [core * (level / norm) for core, norm in zip(cores, norms, strict=True)]
    return [core.reshape(shape).to(dtype) for core, shape in zip(cores, spec.core_shapes, strict=True)]


def _check_numbers(what: str, tensor: Tensor) -> None:
    if tensor.is_meta or not tensor.is_floating_point():
        raise SpecError(f"{what} must hold floating-point numbers, got {tensor.dtype} on {tensor.device}")
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise SpecError(f"{what} holds NaN or infinity in {bad} of {tensor.numel()} entries and cannot be decomposed")
