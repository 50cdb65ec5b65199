"""The operations of residual_norm.cpp: dropout from a seed, and layer norm of a residual sum, forward and backward."""

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, check_seed, checked, operation
from comera.kernels.cpp.memory import empty

_LEVELS = 2**16


def rounded(p: float) -> tuple[int, float]:
    """How many of 2¹⁶ equally probable values drop an entry, and the scale of what is kept. 0 <= p < 1."""
    dropped = min(round(p * _LEVELS), _LEVELS - 1)
    return dropped, _LEVELS / (_LEVELS - dropped)


def _drop(seed: Tensor | None, p: float) -> tuple[int, int, float]:
    """Address of the seed (a captured step draws another one into it), and `rounded`."""
    if seed is None:
        return 0, 0, 1.0
    if not 0 <= p < 1:
        raise RuntimeError(f"expected a dropout probability in [0, 1), got {p}")
    return check_seed(seed).data_ptr(), *rounded(p)


@operation("dropout(Tensor x, Tensor seed, float p) -> Tensor")
def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """f x, contiguous, with f = 0 with probability p, to 2⁻¹⁶, else the scale that keeps the mean; seed: one int64.

    The same seed and p give the same f, whatever the shape, so the operation is its own derivative.
    Raises RuntimeError unless x is float32 on the CPU and the seed one int64.
    """
    x = checked("x", x, *x.shape)
    y = empty(*x.shape)
    call("dropout", x.numel(), x.data_ptr(), *_drop(seed, p), y.data_ptr(), torch.get_num_threads())
    return y


@operation(
    "residual_norm(Tensor z, Tensor x, Tensor? weight, Tensor? bias, Tensor? seed, float p, float eps)"
    " -> (Tensor y, Tensor s, Tensor mean, Tensor rstd)"
)
def residual_norm(
    z: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, seed: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, s, mean, rstd: s = x + f z with the f of `dropout`, or 1 without a seed; y the layer norm of s over its last
    dimension; the mean and 1/√(variance + eps) of each row.

    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    *rows, cols = z.shape
    z, x = checked("z", z, *z.shape), checked("x", x, *z.shape)
    weight = None if weight is None else checked("weight", weight, cols)
    bias = None if bias is None else checked("bias", bias, cols)
    y, s, mean, rstd = empty(*z.shape), empty(*z.shape), empty(*rows), empty(*rows)
    given = mean.numel(), cols, z.data_ptr(), x.data_ptr(), address(weight), address(bias), *_drop(seed, p), eps
    made = y.data_ptr(), s.data_ptr(), mean.data_ptr(), rstd.data_ptr()
    call("residual_norm", *given, *made, torch.get_num_threads())
    return y, s, mean, rstd


@operation(
    "residual_norm_backward(Tensor dy, Tensor s, Tensor mean, Tensor rstd, Tensor? weight, Tensor? seed, float p)"
    " -> (Tensor dx, Tensor dz, Tensor dweight, Tensor dbias)"
)
def residual_norm_backward(
    dy: Tensor, s: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dz, dweight, dbias. dx is the gradient of s too; without a seed it is also that of z, and dz is empty.

    Raises RuntimeError as `residual_norm` does.
    """
    *rows, cols = s.shape
    dy, s = checked("dy", dy, *s.shape), checked("s", s, *s.shape)
    mean, rstd = checked("mean", mean, *rows), checked("rstd", rstd, *rows)
    weight = None if weight is None else checked("weight", weight, cols)
    dx, dz = empty(*s.shape), empty(0) if seed is None else empty(*s.shape)
    dweight, dbias = empty(cols), empty(cols)
    given = dy.data_ptr(), s.data_ptr(), mean.data_ptr(), rstd.data_ptr(), address(weight), *_drop(seed, p)
    made = dx.data_ptr(), 0 if seed is None else dz.data_ptr(), dweight.data_ptr(), dbias.data_ptr()
    call("residual_norm_backward", mean.numel(), cols, *given, *made, torch.get_num_threads())
    return dx, dz, dweight, dbias
