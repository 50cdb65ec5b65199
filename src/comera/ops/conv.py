"""y = conv(x, W) + bias, W a tensor train.

A convolution is a linear map from the entries under its kernel, input channels × kernel positions, to output channels.
So its weight has factors like any other, W = A B, and A is the kernel of a convolution to r channels:

    P = conv(x, A)         with the stride, padding and dilation of the layer
    y = conv(P, B) + bias  with a kernel of one position

No patch is copied out of x (im2col), and torch's own convolutions do all the work. In G groups, each with an input of
its own, A serves every group: P has G · r channels, and B mixes those of one group.

Where the ranks are so high that W itself takes no more multiplications, I · O against r · (G · I + O) for each output
position, or where a rank is 0, there is one convolution with W = A B.

Shapes: R rank, I entries under the kernel (input channels of a group times kernel positions), O output channels.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from comera.errors import SpecError
from comera.kernels.tracing import unrecorded_by_jit
from comera.ops.activations import ACTIVATIONS
from comera.ops.dtypes import product_dtype, without_autocast, working_dtype
from comera.ops.merge import merge
from comera.tt.spec import TTSpec, check_cores

_CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def tt_conv(
    input: Tensor,
    spec: TTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    kernel_size: Sequence[int],
    gates: Sequence[Tensor] | None = None,
    threshold: float = 0.0,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    margins: tuple[Sequence[int], str] | None = None,
) -> Tensor:
    """y = conv(x, W) + bias; with an activation in `spec`, y = conv(act(conv(x, A)), B) + bias.

    Args:
        input: x (batch, channels, *positions) or (channels, *positions), in any memory format.
        spec: of a weight whose input features are input channels (of a group) × kernel positions, the latter last, and
            whose output features are output channels.
        cores: `order` tensors of `spec.core_shapes`.
        bias: (out_channels,).
        kernel_size: one to three sizes: the dimensions of the convolution.
        gates: `order - 1` vectors of `spec.inner_ranks`; ones by default. A gate at or below `threshold` counts as 0.
        stride, padding, dilation, groups: as torch's convolutions take them.
        margins: what is added to x first, where it is not zeros: sizes and mode of `torch.nn.functional.pad`.

    Returns:
        (batch, out_channels, *positions), or without the batch, in x's dtype, which must be the cores', or in
        autocast's dtype: then only the convolutions run in it. Half-precision cores are merged in float32.

    Raises:
        SpecError: when x, cores or bias do not fit `spec`.
        TypeError: when the dtypes of x and cores differ outside of autocast.

    Source: docs/method.md §4.
    """
    dims = len(kernel_size)
    unrecorded_by_jit(_check_shapes, input, spec, cores, bias, kernel_size, groups)
    dtype = product_dtype(input, cores[0])
    x = input.to(dtype)
    with without_autocast(x):
        gates = [cores[0].new_ones(rank) for rank in spec.inner_ranks] if gates is None else gates
        (factors,) = merge([spec], [[*cores, *gates]], threshold, working_dtype(x), [None])
        a_RI, b_RO = factors
        x = x.to(a_RI.dtype) if margins is None else F.pad(x.to(a_RI.dtype), margins[0], mode=margins[1])
        bias = None if bias is None else bias.to(dtype).to(a_RI.dtype)
        conv, where = _CONVOLUTIONS[dims], (stride, padding, dilation, groups)
        if _takes_fewer(spec, groups):
            kernel = a_RI.repeat(groups, 1).reshape(-1, spec.in_features // prod(kernel_size), *kernel_size)
            p = conv(x, kernel, None, *where)
            if spec.activation:
                act, _ = ACTIVATIONS[spec.activation]
                p = act(p)
            y = conv(p, b_RO.t().reshape(*b_RO.shape[::-1], *[1] * dims), bias, groups=groups)
        else:
            w_OI = b_RO.t() @ a_RI
            y = conv(x, w_OI.reshape(spec.out_features, -1, *kernel_size), bias, *where)
        return y.to(dtype)  # type: ignore[no-any-return]


def _takes_fewer(spec: TTSpec, groups: int) -> bool:
    """Whether the factors take fewer multiplications than the weight; torch knows no convolution to no channels."""
    rank, (ins, outs) = spec.ranks[spec.split], spec.shape
    return rank > 0 and (spec.activation is not None or rank * (groups * ins + outs) < ins * outs)


def _check_shapes(
    input: Tensor, spec: TTSpec, cores: Sequence[Tensor], bias: Tensor | None, kernel_size: Sequence[int], groups: int
) -> None:
    check_cores(spec, cores)
    dims, (ins, outs) = len(kernel_size), spec.shape
    if dims not in _CONVOLUTIONS or ins % max(1, prod(kernel_size)) or outs % groups:
        raise SpecError(
            f"expected a kernel of one to three sizes whose product divides the {ins} input features of {spec}, and a "
            f"number of groups that divides its {outs} output features, got {tuple(kernel_size)} and {groups}"
        )
    channels = groups * ins // prod(kernel_size)
    if input.ndim not in (dims + 1, dims + 2) or input.shape[-1 - dims] != channels:
        raise SpecError(
            f"expected an input ({channels}, {dims} sizes), or a batch of them, for {spec} with a kernel of "
            f"{tuple(kernel_size)}, got shape {tuple(input.shape)}"
        )
    if bias is not None and bias.shape != (outs,):
        raise SpecError(f"expected a bias of shape ({outs},) for {spec}, got {tuple(bias.shape)}")
