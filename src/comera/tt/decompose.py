"""From a dense weight to cores (TT-SVD), and from cores to cores of smaller ranks (rounding).

Both go through the inner ranks from left to right and truncate one unfolding at a time by an SVD (Oseledets 2011,
"Tensor-train decomposition", algorithms 1 and 2). Their squared errors add up: for a total relative error ε, each of
the order−1 truncations may drop singular values of norm δ = ε ‖W‖ / sqrt(order−1).

Block tensor trains (BTT) have one inner rank, and each block is decomposed by itself (blocks.py).

A rank of the result is at most its cap, and at most what the modes and the rank before allow. Without `rel_error`
nothing else is dropped: directions with singular value 0 stay and can be trained. With it (0.0 counts) a rank keeps
only what exceeds δ and the rounding of float64 (1e-12 ‖W‖); a weight of zeros then has rank 0. If one cap is 0, all
ranks are 0.

All arithmetic is float64. Cores come back in the dtype of the input, each with the same Frobenius norm (unless W = 0),
so that training starts from balanced cores.

Shapes: R/S left/right rank, N mode(s).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.blocks import block_singular_values, block_svd, round_blocks
from comera.tt.dense import fold, materialize
from comera.tt.format import check_linear
from comera.tt.spec import BTTSpec, Spec, check_cores

_ROUNDING = 1e-12  # relative norm of the singular values that float64 leaves where exact arithmetic has zeros


@dataclass(frozen=True)
class Decomposition:
    """Cores of `spec.core_shapes`, with the ranks that were found, and the relative Frobenius error of the weight."""

    spec: Spec
    cores: list[Tensor]
    error: float


@torch.no_grad()
def tt_svd(weight: Tensor, spec: Spec, *, rel_error: float | None = None) -> Decomposition:
    """Decompose a dense weight into cores, by TT-SVD (algorithm 1; docs/method.md §1).

    The error is at most sqrt(order−1) times that of the best cores of the same ranks. It is measured after the cast to
    the weight's dtype (0 for a weight of zeros).

    weight: (rows, columns) of `spec.shape`, floating-point. spec: modes, and caps for the ranks. rel_error: relative
    Frobenius error to allow, in [0, 1), with ranks as small as it permits; by default ranks are as large as the caps.
    Raises SpecError for another shape, a dtype that is not floating-point, NaN or infinity.

    Example:
        >>> import torch
        >>> from comera.tt import tt_spec, tt_svd
        >>> weight = torch.outer(torch.arange(1.0, 25.0), torch.ones(36))
        >>> found = tt_svd(weight, tt_spec(24, 36, order=4, rank=8), rel_error=0.01)
        >>> print(found.spec, found.error < 1e-6)
        TT 6·4 / 6·6 ranks 2-1-1 True
    """
    check_linear(spec, "cores that a weight decomposes into: draw them at random (init='random')")
    if tuple(weight.shape) != spec.shape:
        raise SpecError(f"expected a weight of shape {spec.shape} for {spec}, got {tuple(weight.shape)}")
    _check_finite("the weight", weight)
    dense = weight.double()
    norm = float(dense.norm())
    delta = _delta(rel_error, norm, spec.order)
    if isinstance(spec, BTTSpec):
        spec, found = block_svd(dense, spec, delta)
    else:
        rest, ranks, found = fold(spec, dense), [1], []
        for k, cap in enumerate(_caps(spec)):
            unfolding = rest.reshape(ranks[k] * spec.sizes[k], prod(spec.sizes[k + 1 :]))
            core, rest, _ = _truncate(unfolding, cap, delta)
            found.append(core)
            ranks.append(core.shape[1])
        spec, found = spec.with_ranks((*ranks, 1)), [*found, rest]
    cores = _finish(spec, found, weight.dtype)
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
    """Compress cores to smaller ranks or to a given error (algorithm 2); the dense weight is never formed.

    The error is that of the truncation, padding included, before the cast to the dtype of the first core.

    cores: `order` tensors of `spec.core_shapes` that have absorbed the gates. ranks: caps, one integer or all order+1;
    those of `spec` by default. rel_error: relative Frobenius error to allow, in [0, 1).
    Raises SpecError for other shapes, ranks that do not fit the modes, NaN or infinity.

    Example:
        >>> import torch
        >>> from comera.tt import init_cores, round_cores, tt_spec
        >>> spec = tt_spec(64, 64, order=4, rank=16)
        >>> rounded = round_cores(spec, init_cores(spec, 0.1), ranks=4)
        >>> print(rounded.spec)
        TT 8·8 / 8·8 ranks 4-4-4
        >>> 0 < rounded.error < 1
        True
    """
    _check_operands(spec, cores)
    if isinstance(spec, BTTSpec):
        return _round_blocks(spec, cores, ranks, rel_error)
    caps = _caps(spec if ranks is None else spec.with_ranks(ranks))
    rounded = _right_orthogonal(cores)
    norm = float(rounded[0].norm())
    delta = _delta(rel_error, norm, spec.order)
    new_ranks, dropped = [1], 0.0
    for k, cap in enumerate(caps):
        rounded[k], rest_SS, lost = _truncate(rounded[k].flatten(0, 1), cap, delta)
        rounded[k + 1] = torch.tensordot(rest_SS, rounded[k + 1], dims=1)
        new_ranks.append(rest_SS.shape[0])
        dropped += lost**2
    spec = spec.with_ranks((*new_ranks, 1))
    return Decomposition(spec, _finish(spec, rounded, cores[0].dtype), sqrt(dropped) / norm if norm else 0.0)


@torch.no_grad()
def singular_values(spec: Spec, cores: Sequence[Tensor]) -> list[Tensor]:
    """Singular values of the unfolding at each inner rank, `order - 1` descending float64 vectors.

    The dense weight is never formed. Dropping a singular value σ at one rank makes a Frobenius error of σ.

    cores: as for `round_cores`. Raises SpecError for other shapes, NaN or infinity.
    """
    _check_operands(spec, cores)
    if isinstance(spec, BTTSpec):
        return [block_singular_values(spec, cores)]
    train = _right_orthogonal(cores)
    values = []
    for k in range(spec.order - 1):
        _, sigma, vh = torch.linalg.svd(train[k].flatten(0, 1), full_matrices=False)
        values.append(sigma)
        train[k + 1] = torch.tensordot(sigma[:, None] * vh, train[k + 1], dims=1)
    return values


def _round_blocks(
    spec: BTTSpec, cores: Sequence[Tensor], ranks: int | Sequence[int] | None, rel_error: float | None
) -> Decomposition:
    """`round_cores`: one integer caps the rank of every block, all three ranks the number of components."""
    caps = spec.with_ranks(ranks) if isinstance(ranks, int) else spec
    count = caps.ranks[1] if ranks is None or isinstance(ranks, int) else spec.with_ranks(ranks).ranks[1]
    spec, found, error = round_blocks(spec, cores, caps, count, _delta(rel_error, 1.0, spec.order))
    return Decomposition(spec, _finish(spec, found, cores[0].dtype), error)


def _right_orthogonal(cores: Sequence[Tensor]) -> list[Tensor]:
    """Cores (R, N, S) in float64, all but the first with orthonormal rows (R, N·S); the first has the whole norm."""
    train = [core.double().flatten(1, -2) for core in cores]
    for k in range(len(train) - 1, 0, -1):
        q, r = torch.linalg.qr(train[k].flatten(1).mT)
        train[k] = q.mT.reshape(q.shape[1], *train[k].shape[1:])
        train[k - 1] = torch.tensordot(train[k - 1], r.mT, dims=1)
    return train


def _check_operands(spec: Spec, cores: Sequence[Tensor]) -> None:
    check_linear(spec, "singular values that rounding could drop")
    check_cores(spec, cores)
    for k, core in enumerate(cores):
        _check_finite(f"core {k}", core)


def _truncate(matrix: Tensor, cap: int, delta: float | None) -> tuple[Tensor, Tensor, float]:
    """Orthonormal columns, the remainder, and the Frobenius norm of what was dropped: matrix ≈ columns @ remainder."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    tails = s.square().flip(0).cumsum(0).flip(0).sqrt()  # tails[r]: norm of all that a rank r drops; descending
    rank = min(cap, len(s))
    if delta is not None:
        rank = min(rank, int((tails > delta).sum()))
    return u[:, :rank], s[:rank, None] * vh[:rank], float(tails[rank]) if rank < len(s) else 0.0


def _delta(rel_error: float | None, norm: float, order: int) -> float | None:
    """Norm that one truncation may drop; at least the rounding of float64, which would count as rank otherwise."""
    if rel_error is None:
        return None
    if not 0 <= rel_error < 1:
        raise SpecError(f"rel_error is a relative Frobenius error and must lie in [0, 1), got {rel_error}")
    return norm * max(rel_error / sqrt(max(1, order - 1)), _ROUNDING)


def _caps(spec: Spec) -> tuple[int, ...]:
    """Caps of the inner ranks; a single cap of 0 makes the weight zero, and so all ranks."""
    return spec.inner_ranks if all(spec.inner_ranks) else (0,) * len(spec.inner_ranks)


def _finish(spec: Spec, cores: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cores in the shapes of the spec, of equal Frobenius norm, cast."""
    norms = [float(core.norm()) for core in cores]
    if all(norms):
        level = prod(norm ** (1 / spec.order) for norm in norms)
        cores = [core * (level / norm) for core, norm in zip(cores, norms, strict=True)]
    return [core.reshape(shape).to(dtype) for core, shape in zip(cores, spec.core_shapes, strict=True)]


def _check_finite(what: str, tensor: Tensor) -> None:
    if tensor.is_meta or not tensor.is_floating_point():
        raise SpecError(f"{what} must be a floating-point tensor with data, got {tensor.dtype} on {tensor.device}")
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise SpecError(f"{what} holds NaN or infinity in {bad} of {tensor.numel()} entries and cannot be decomposed")
