"""The operations of residual_norm.cpp: dropout from a seed, and layer norm of a residual sum, forward and backward."""

import torch
from torch import Tensor

from comera.kernels.cpp.library import call, checked, floats, on_cpu, operation
from comera.kernels.cpp.memory import empty

_LEVELS = 2**16


def rounded(p: float) -> tuple[int, float]:
    """How many of 2¹⁶ equally probable values drop an entry, and the scale of what is kept. 0 <= p < 1."""
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    return dropped, _LEVELS / (_LEVELS - dropped)


def drop(seed: Tensor | None, p: float) -> tuple[Tensor | None, int, float]:
    """The seed, read by the kernel (a captured step draws another one into it), and `rounded`; None for no dropout."""
    if seed is None:
        return None, 0, 1.0
    if not 0 <= p < 1:
        raise RuntimeError(f"expected a dropout probability in [0, 1), got {p}")
    if seed.dtype != torch.int64 or seed.numel() != 1 or not on_cpu(seed):
        raise RuntimeError(f"expected a seed of one int64 on the CPU, got {list(seed.shape)} {seed.dtype}")
    return seed, *rounded(p)


@operation()
def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """f x, contiguous, with f = 0 with probability p, to 2⁻¹⁶, else the scale that keeps the mean; seed: one int64.

    The same seed and p give the same f, whatever the shape, so the operation is its own derivative.
    Raises RuntimeError unless x is float32 on the CPU and the seed one int64.
    """
    x, y = floats("x", x), empty(*x.shape)
    call("dropout", x.numel(), x, *drop(seed, p), y)
    return y


@operation()
def residual_norm(
    z: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    eps: float,
    offset: float = 0.0,
    rms: bool = False,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean, rstd: s = x + f z with the f of `dropout`, or 1 without a seed; y the norm of s over its last
    dimension, times offset + weight; the mean and 1/√(variance + eps) of each row.

    Without z, s is x, and an empty tensor comes in its place. rms: an RMSNorm instead of a LayerNorm, without bias;
    mean is empty, rstd 1/√(mean of s² + eps). rows, int64 of the shape of z without its last dimension: x is a table,
    whose row rows[n] is added to row n of z.
    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU, ValueError for rows that
    the table does not have.
    """
    if rms and bias is not None:
        raise RuntimeError("expected no bias of an RMSNorm, got one")
    shape = x.shape if rows is None else _table_shape(z, x, rows)
    *outer, cols = shape
    x, z = floats("x", x), checked("z", z, *shape)
    rows = None if rows is None else rows.contiguous()
    weight, bias = checked("weight", weight, cols), checked("bias", bias, cols)
    y, s, rstd = empty(*shape), empty(0) if z is None else empty(*shape), empty(*outer)
    mean = empty(0) if rms else empty(*outer)
    given = not rms, rstd.numel(), cols, z, x, rows, len(x), weight, offset, bias, *drop(seed, p), eps
    call("residual_norm", *given, y, s, mean, rstd)
    return y, s, mean, rstd


def _table_shape(z: Tensor | None, x: Tensor, rows: Tensor) -> torch.Size:
    """The shape of z, after a check that rows of the table x can be added to it."""
    if z is None or x.shape != (len(x), z.shape[-1]):
        shapes = None if z is None else list(z.shape)
        raise RuntimeError(f"expected a table of rows for the last dimension of z, got {list(x.shape)} for {shapes}")
    if rows.shape != z.shape[:-1] or rows.dtype != torch.int64 or not on_cpu(rows):
        raise RuntimeError(
            f"expected rows of shape {list(z.shape[:-1])} in int64 on the CPU, got {list(rows.shape)} {rows.dtype}"
        )
    return z.shape


@operation()
def residual_norm_backward(
    dy: Tensor,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    seed: Tensor | None,
    p: float,
    offset: float = 0.0,
    rms: bool = False,
    ds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dz, dweight, dbias from the gradients of y and, where it was used too, of s.

    Without a seed dx is also the gradient of z, and dz is empty; dbias is empty for an RMSNorm.
    Raises RuntimeError as `residual_norm` does.
    """
    *rows, cols = s.shape
    dy, ds, s = checked("dy", dy, *s.shape), checked("ds", ds, *s.shape), floats("s", s)
    mean, rstd = checked("mean", mean, *([0] if rms else rows)), checked("rstd", rstd, *rows)
    weight = checked("weight", weight, cols)
    dx, dz = empty(*s.shape), empty(0) if seed is None else empty(*s.shape)
    dweight, dbias = empty(cols), empty(0) if rms else empty(cols)
    given = not rms, rstd.numel(), cols, dy, ds, s, mean, rstd, weight, offset, *drop(seed, p)
    call("residual_norm_backward", *given, dx, None if seed is None else dz, dweight, None if rms else dbias)
    return dx, dz, dweight, dbias
