"""The operations of block_product.cpp: y = x W + bias, W a block tensor train.

Shapes: B batch, I/O in/out features, A/C input/output blocks, N/M features in an input/output block, K components.
"""

from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, check_shape, checked, floats, operation, words
from comera.kernels.cpp.memory import empty


def _words(x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None, ranks_AC: Tensor, out_features: int) -> bytes:
    """The weight as block_product.cpp has it. Raises RuntimeError unless its tensors, as kernels read them, fit."""
    if ranks_AC.dim() != 2 or ranks_AC.dtype is not torch.int64 or not (ranks_AC.is_cpu and ranks_AC.is_contiguous()):
        came = f"{list(ranks_AC.shape)} of {ranks_AC.dtype} on {ranks_AC.device}"
        raise RuntimeError(f"expected contiguous ranks (blocks, blocks) of int64 on the CPU, got {came}")
    (a, c), (n, count), m = ranks_AC.shape, r_NK.shape, l_KM.shape[1]
    if ranks_AC.numel():
        least, most = map(int, ranks_AC.aminmax())
        if least < 0 or most > count or int(ranks_AC.sum()) != count:
            raise RuntimeError(f"expected ranks >= 0 with the sum {count}, got {least} to {most}: {ranks_AC.tolist()}")
    elif count:
        raise RuntimeError(f"expected no components without blocks, got {count}")
    features = x_BI.shape[1]
    if features > a * n or out_features > c * m:
        raise RuntimeError(f"expected at most {a * n} and {c * m} features, got {features} and {out_features}")
    sizes = a, c, n, m, features, out_features, count
    return words((*sizes, ranks_AC.data_ptr(), address(r_NK), address(l_KM), address(bias)))


def _checked(
    x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None, out_features: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    for name, tensor in (("x", x_BI), ("R", r_NK), ("L", l_KM)):
        if tensor.dim() != 2:
            raise RuntimeError(f"expected {name} of two dimensions, got {list(tensor.shape)}")
    check_shape("L", l_KM, (r_NK.shape[1], l_KM.shape[1]))
    return floats("x", x_BI), floats("R", r_NK), floats("L", l_KM), checked("bias", bias, out_features)


def _flops(x: Any, r_NK: Any, l_KM: Any, bias: Any, ranks: Any, out_features: int) -> int:
    return int(2 * x[0] * r_NK[1] * (r_NK[0] + l_KM[1]))


@operation(_flops)
def block_product(
    x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None, ranks_AC: Tensor, out_features: int
) -> Tensor:
    """y (B, O) from x (B, I), R (N, K), L (K, M) and the ranks of all blocks (A, C), int64.

    The components are in the order of the blocks. I may be less than A·N and O less than C·M: the rest is padding.

    Raises RuntimeError for shapes and ranks that do not fit each other, or are not on the CPU.
    """
    x_BI, r_NK, l_KM, bias = _checked(x_BI, r_NK, l_KM, bias, out_features)
    weight = _words(x_BI, r_NK, l_KM, bias, ranks_AC, out_features)
    y_BO = empty(x_BI.shape[0], out_features)
    call("block_product", x_BI.shape[0], weight, x_BI, y_BO)
    return y_BO


def _backward_flops(x: Any, dy: Any, r_NK: Any, l_KM: Any, bias: Any, ranks: Any, dx: bool, dr: bool, dl: bool) -> int:
    """h again and ∂L; dh, dx and ∂R."""
    (n, count), (_, m) = r_NK, l_KM
    return int(2 * x[0] * count * (n * (dl + dx + dr) + m * (dl + (dx or dr))))


@operation(_backward_flops)
def block_product_backward(
    x_BI: Tensor,
    dy_BO: Tensor,
    r_NK: Tensor,
    l_KM: Tensor,
    bias: Tensor | None,
    ranks_AC: Tensor,
    wants_x: bool,
    wants_r: bool,
    wants_l: bool,
) -> list[Tensor]:
    """dx, ∂R, and ∂L with ∂bias if there is a bias, each where wanted. Raises RuntimeError as `block_product` does."""
    batch, out_features = x_BI.shape[0], dy_BO.shape[-1]
    x_BI, r_NK, l_KM, bias = _checked(x_BI, r_NK, l_KM, bias, out_features)
    dy_BO = checked("dy", dy_BO, batch, out_features)
    weight = _words(x_BI, r_NK, l_KM, bias, ranks_AC, out_features)
    dx_BI = empty(*x_BI.shape) if wants_x else None
    dr_NK, dl_KM = (torch.empty_like(each) if wants else None for each, wants in ((r_NK, wants_r), (l_KM, wants_l)))
    dbias = torch.empty_like(bias) if wants_l and bias is not None else None
    call("block_product_backward", batch, weight, x_BI, dy_BO, dx_BI, dr_NK, dl_KM, dbias)
    return [made for made in (dx_BI, dr_NK, dl_KM, dbias) if made is not None]
