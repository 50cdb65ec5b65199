"""Random cores whose dense weight has a given standard deviation."""

from collections.abc import Callable
from functools import partial
from math import isfinite, prod, sqrt

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.activations import SECOND_MOMENTS
from comera.tt.blocks import random_cores
from comera.tt.dense import frobenius_norm, merge
from comera.tt.ngram import NGramSpec, random_ngram_cores
from comera.tt.spec import BTTSpec, Spec, TTMSpec, TTSpec


def init_cores(
    spec: Spec,
    std: float,
    *,
    generator: torch.Generator | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> list[Tensor]:
    """Random cores whose dense weight has the standard deviation `std`, for gates of one.

    Gaussian cores multiply their unevenness: the norms of rows grow unequal, entries get heavy tails and the singular
    values spread, the more the higher the order. So each mode's slice of a core is a random isometry (semi-orthogonal
    matrix), which gives every row of the weight (a feature, a token) about the same norm. All cores have entries of
    about the same size, s = (std² / Π r_k)^(1 / 2·order). See docs/method.md §9. Cores of a block tensor train are
    Gaussian: a weight of two cores without shared parameters has no such unevenness.

    std: root mean square of the weight, padding included; met up to rounding, not only on average. With an activation
    between the factors, that of a weight which gives outputs of the same size. N-gram tables have no such weight: their
    cores are Gaussian, whatever the std. generator: draws on
    its own device; the CPU's by default, so that a seed gives the same cores on every device. dtype: that of the cores;
    they are drawn in float32, or in float64 for that dtype, and cast.
    Raises SpecError for a std that is negative or not finite.

    Example:
        >>> import torch
        >>> from comera.tt import init_cores, materialize, tt_spec
        >>> spec = tt_spec(768, 3072, order=6, rank=30)
        >>> cores = init_cores(spec, 0.02, generator=torch.Generator().manual_seed(0))
        >>> [tuple(core.shape) for core in cores]
        [(1, 12, 12), (12, 8, 30), (30, 8, 30), (30, 12, 30), (30, 16, 16), (16, 16, 1)]
        >>> round(materialize(spec, cores).std().item(), 4)
        0.02
    """
    if not (isfinite(std) and std >= 0):
        raise SpecError(f"the std of a dense weight must be finite and >= 0, got {std} for {spec}")
    device_drawn = generator.device if generator else torch.device("cpu")
    wide = torch.promote_types(dtype, torch.float32)
    draw = partial(torch.randn, generator=generator, device=device_drawn, dtype=wide)
    if isinstance(spec, BTTSpec):
        return [core.to(device=device, dtype=dtype) for core in random_cores(spec, std, draw)]
    if isinstance(spec, NGramSpec):
        return [core.to(device=device, dtype=dtype) for core in random_ngram_cores(spec, draw)]
    rows = spec.row_modes if isinstance(spec, TTMSpec) else spec.sizes
    cores = []
    for shape, mode in zip(spec.core_shapes, rows, strict=True):
        # one slice per row mode (TT: per mode): left rank × (column mode · right rank)
        core = _isometries(mode, shape[0], prod(shape[1:]) // mode, draw).transpose(0, 1).reshape(shape)
        cores.append(core * sqrt(core.numel()) / core.norm() if core.numel() else core)
    if isinstance(spec, TTSpec) and spec.activation:
        return [core.to(device=device, dtype=dtype) for core in _around_activation(spec, spec.activation, std, cores)]
    norm = float(frobenius_norm(cores))
    scale = (std * sqrt(prod(spec.padded_shape)) / norm) ** (1 / spec.order) if norm else 0.0
    return [(core * scale).to(device=device, dtype=dtype) for core in cores]


def _around_activation(spec: TTSpec, activation: str, std: float, cores: list[Tensor]) -> list[Tensor]:
    """Cores scaled so that inputs of unit variance reach the activation with unit variance, and outputs have the
    variance that a weight of this std would give them (docs/method.md §9)."""
    rank, features = spec.ranks[spec.split], spec.in_features
    rows, cols = spec.padded_shape
    passed = SECOND_MOMENTS[activation]
    into, out = sqrt(rows * rank / features), std * sqrt(features * cols / passed)  # Frobenius norms of A and B
    scaled = []
    for half, wanted in ((cores[: spec.split], into), (cores[spec.split :], out)):
        norm = float(merge(half).norm())
        scale = (wanted / norm) ** (1 / len(half)) if norm else 0.0
        scaled += [core * scale for core in half]
    return scaled


def _isometries(count: int, rows: int, columns: int, draw: Callable[..., Tensor]) -> Tensor:
    """Random semi-orthogonal matrices (count, rows, columns): Q Qᵀ = I, or Qᵀ Q = I where rows > columns.

    As many as fit are slices of one orthogonal matrix, so that together they treat every direction alike too.
    """
    short, long = sorted((rows, columns))
    if short == 0:
        return draw(count, rows, columns)
    per_draw = min(count, long // short)
    gauss = draw(-(-count // per_draw), long, per_draw * short)
    q, r = torch.linalg.qr(gauss)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform over the orthogonal matrices (Mezzadri 2007)
    if long == 1:
        q = q + gauss  # a 1 × 1 isometry is only a sign, and equal slices would stay equal features
    slices: Tensor = q.mT.reshape(-1, short, long)[:count]
    return slices if rows == short else slices.mT
