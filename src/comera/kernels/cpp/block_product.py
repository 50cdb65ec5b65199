"""The operations of block_product.cpp: y_k = x W_k + bias_k of weights that share x, each a block tensor train.

Shapes: B batch, I/O in/out features, A/C input/output blocks, N/M features in an input/output block, K components.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, check_shape, checked, floats, operation, words
from comera.kernels.cpp.memory import empty


class Weight(NamedTuple):
    """R (N, K), L (K, M), bias (O,) and gates (K,) of a weight, and the ranks (A, C) of its blocks, int64.

    The components are in the order of the blocks. I may be less than A·N and O less than C·M: the rest is padding.
    """

    r: Tensor
    l: Tensor  # noqa: E741  # its name everywhere
    bias: Tensor | None
    gates: Tensor | None
    ranks: Tensor
    out_features: int

    def words(self, features: int, y: Tensor, grads: Sequence[Tensor | None] = (None,) * 4) -> tuple[int, ...]:
        """The weight as block_product.cpp has it. grads: of R, L, bias and gates."""
        (a, c), (n, count), m = self.ranks.shape, self.r.shape, self.l.shape[1]
        sizes = a, c, n, m, features, self.out_features, count, self.ranks.data_ptr()
        return *sizes, *map(address, (self.r, self.l, self.bias, self.gates, y, *grads))


def _weights(
    x_BI: Tensor,
    rs_NK: Sequence[Tensor],
    ls_KM: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    ranks: Sequence[Tensor],
    outs: Sequence[int],
) -> tuple[Tensor, list[Weight]]:
    """x and the weights as kernels read them. Raises RuntimeError unless all of them fit each other."""
    if x_BI.dim() != 2 or not rs_NK:
        raise RuntimeError(f"expected x of two dimensions and at least one R, got {list(x_BI.shape)} and {len(rs_NK)}")
    weights = []
    for r_NK, l_KM, bias, gates_K, ranks_AC, out_features in zip(rs_NK, ls_KM, biases, gates, ranks, outs, strict=True):
        readable = ranks_AC.dtype is torch.int64 and ranks_AC.is_cpu and ranks_AC.is_contiguous()
        if ranks_AC.dim() != 2 or not readable:
            came = f"{list(ranks_AC.shape)} of {ranks_AC.dtype} on {ranks_AC.device}"
            raise RuntimeError(f"expected contiguous ranks (blocks, blocks) of int64 on the CPU, got {came}")
        if r_NK.dim() != 2 or l_KM.dim() != 2:
            raise RuntimeError(f"expected R and L of two dimensions, got {list(r_NK.shape)} and {list(l_KM.shape)}")
        (a, c), (n, count), m = ranks_AC.shape, r_NK.shape, l_KM.shape[1]
        if x_BI.shape[1] > a * n or out_features > c * m:
            came = f"{x_BI.shape[1]} and {out_features}"
            raise RuntimeError(f"expected at most {a * n} and {c * m} features, got {came}")
        check_shape("L", l_KM, (count, m))
        bias, gates_K = checked("bias", bias, out_features), checked("gates", gates_K, count)
        weights.append(Weight(floats("R", r_NK), floats("L", l_KM), bias, gates_K, ranks_AC, out_features))
    return floats("x", x_BI), weights


def _call(name: str, batch: int, weights: Sequence[Weight], flat: list[int], *operands: Tensor | None) -> None:
    """Raises RuntimeError for ranks that do not fit, which the kernel finds while it lays them out."""
    try:
        call(name, batch, len(weights), words(flat), *operands)
    except ValueError as error:
        came = ", ".join(f"{each.ranks.tolist()} for {each.r.shape[1]}" for each in weights)
        raise RuntimeError(f"expected ranks >= 0 whose sum is the number of components, got {came}") from error


@operation(lambda x, rs, ls, *_: sum(2 * x[0] * count * (n + m) for (n, count), (_, m) in zip(rs, ls, strict=True)))
def block_product(
    x_BI: Tensor,
    rs_NK: Sequence[Tensor],
    ls_KM: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    ranks: Sequence[Tensor],
    outs: Sequence[int],
) -> list[Tensor]:
    """y_k (B, O) from x (B, I) and what `Weight` says of each weight; their input blocks may differ.

    Raises RuntimeError for shapes and ranks that do not fit each other, or are not on the CPU.
    """
    x_BI, weights = _weights(x_BI, rs_NK, ls_KM, biases, gates, ranks, outs)
    batch, features = x_BI.shape
    ys_BO = [empty(batch, out_features) for out_features in outs]
    flat = [word for weight, y_BO in zip(weights, ys_BO, strict=True) for word in weight.words(features, y_BO)]
    _call("block_product", batch, weights, flat, x_BI)
    return ys_BO


def _backward_flops(
    x: Any, dys: Any, rs: Any, ls: Any, biases: Any, gates: Any, ranks: Any, dx: bool, dr: bool, dl: bool
) -> int:
    """h again and ∂L; dh, dx and ∂R."""
    pairs = zip(rs, ls, strict=True)
    return int(2 * x[0] * sum(k * (n * (dl + dx + dr) + m * (dl + (dx or dr))) for (n, k), (_, m) in pairs))


@operation(_backward_flops)
def block_product_backward(
    x_BI: Tensor,
    dys_BO: Sequence[Tensor],
    rs_NK: Sequence[Tensor],
    ls_KM: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    ranks: Sequence[Tensor],
    wants_x: bool,
    wants_r: bool,
    wants_l: bool,
) -> list[Tensor]:
    """dx where wanted; then of each weight ∂R and ∂L, ∂bias if it has one, ∂gates if it has any: ∂R and ∂gates where
    `wants_r`, ∂L and ∂bias where `wants_l`. Raises RuntimeError as `block_product` does."""
    outs = [dy_BO.shape[-1] for dy_BO in dys_BO]
    x_BI, weights = _weights(x_BI, rs_NK, ls_KM, biases, gates, ranks, outs)
    batch, features = x_BI.shape
    dx_BI = empty(batch, features) if wants_x else None
    made: list[Tensor | None] = []
    flat: list[int] = []
    read = [checked("dy", dy_BO, batch, out) for dy_BO, out in zip(dys_BO, outs, strict=True)]  # lives until the call
    for weight, dy_BO in zip(weights, read, strict=True):
        wanted = wants_r, wants_l, wants_l, wants_r
        grads = [
            torch.empty_like(tensor) if wants and tensor is not None else None
            for tensor, wants in zip(weight[:4], wanted, strict=True)
        ]
        flat += weight.words(features, dy_BO, grads)
        made += grads
    _call("block_product_backward", batch, weights, flat, x_BI, dx_BI)
    return [each for each in (dx_BI, *made) if each is not None]
