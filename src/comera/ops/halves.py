"""The two halves of a chain: its cores merged from either end towards a bond, and the gradient of that.

Left of the bond    L_1 = G_1,  L_k = L_{k-1} G_k               (N_1…N_k, r_k)
Right of the bond   R_order = G_order,  R_k = G_k R_{k+1}       (r_{k-1}, N_k…N_order)

Backward, from the gradient of the last product to that of the first: ∂G_k = L_{k-1}ᵀ ∂L_k, ∂L_{k-1} = ∂L_k G_kᵀ, and
mirrored ∂G_k = ∂R_k R_{k+1}ᵀ, ∂R_{k+1} = G_kᵀ ∂R_k. Each step is one product of views; nothing is permuted.

Shapes: R/S left/right rank, N mode(s); M/N row and column modes of a TTM. Tensor trains may be stacked, in dimensions
before these. Sizes are always given in full, never as -1: ranks may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import SpecError
from comera.tt.spec import Spec

# Numbers of a wide intermediate that are held at a time. On a CPU pieces that stay in the caches are 15 to 30 % faster
# than the whole (no fresh pages) and bound the memory; an accelerator wants few launches.
PIECE_CPU, PIECE_ACCELERATOR = 2**20, 2**26


def check_cores(spec: Spec, cores: Sequence[Tensor]) -> None:
    """Raise SpecError unless the cores have the shapes of `spec`."""
    shapes = tuple(tuple(core.shape) for core in cores)
    if shapes != spec.core_shapes:
        raise SpecError(f"expected {spec.order} cores of shapes {spec.core_shapes} for {spec}, got {shapes}")


def merge_dtype(dtype: torch.dtype) -> torch.dtype:
    """Where small cores are merged: float32 for half precisions, else their own dtype.

    Merging in bfloat16 would cost 2 dB of signal to noise (a linear layer) to 5 dB (a look-up) and buy no time.
    """
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype in which autocast would run a product with `tensor`; None where it would not touch it."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Context in which products keep the dtype of their operands, on the tensor's device."""
    return nullcontext() if autocast_dtype(tensor) is None else torch.autocast(tensor.device.type, enabled=False)


def pad_last(tensor: Tensor, size: int) -> Tensor:
    """The last dimension filled up with zeros to `size`; the tensor itself where it has that size."""
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))


def pieces(batch: int, numbers: int, device: torch.device) -> list[slice]:
    """Slices of a batch whose intermediate, `numbers` a row, stays within PIECE numbers (one row at least).

    As few as can be, of equal sizes but the last, which may be smaller.
    """
    piece = PIECE_CPU if device.type == "cpu" else PIECE_ACCELERATOR
    count = -(-batch // max(1, piece // max(1, numbers)))
    step = -(-batch // max(1, count))
    return [slice(start, min(start + step, batch)) for start in range(0, batch, max(1, step))]


def left_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """L_1, L_2, ... of cores (R, N, S) whose first R is 1: tensors (N_1…N_k, S_k)."""
    products_NS = [cores[0].flatten(-3, -2)]
    for core in cores[1:]:
        *stacked, _, mode, right = core.shape
        done = products_NS[-1].shape[-2]
        products_NS.append((products_NS[-1] @ core.flatten(-2)).view(*stacked, done * mode, right))
    return products_NS


def left_gradients(cores: Sequence[Tensor], products_NS: Sequence[Tensor], grad_NS: Tensor) -> list[Tensor]:
    """Gradients of the cores from that of the last of their `left_products`, which itself may be missing."""
    gradients = []
    for k in range(len(cores) - 1, 0, -1):
        core, product_NR = cores[k], products_NS[k - 1]
        *stacked, _, mode, right = core.shape
        grad_NS = grad_NS.reshape(*stacked, product_NR.shape[-2], mode * right)
        gradients.append((product_NR.mT @ grad_NS).view(core.shape))
        grad_NS = grad_NS @ core.flatten(-2).mT
    return [grad_NS.reshape(cores[0].shape), *reversed(gradients)]


def right_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """R_order, R_{order-1}, ... of cores (R, N, S) whose last S is 1: tensors (R_k, N_k…N_order)."""
    products_RN = [cores[-1].flatten(-2)]
    for core in cores[-2::-1]:
        *stacked, left, mode, _ = core.shape
        done = products_RN[-1].shape[-1]
        products_RN.append((core.flatten(-3, -2) @ products_RN[-1]).view(*stacked, left, mode * done))
    return products_RN


def right_gradients(cores: Sequence[Tensor], products_RN: Sequence[Tensor], grad_RN: Tensor) -> list[Tensor]:
    """Gradients of the cores from that of the last of their `right_products`, which itself may be missing."""
    gradients = []
    for k in range(len(cores) - 1):
        core, product_SN = cores[k], products_RN[len(cores) - 2 - k]
        *stacked, left, mode, _ = core.shape
        grad_RN = grad_RN.reshape(*stacked, left * mode, product_SN.shape[-1])
        gradients.append((grad_RN @ product_SN.mT).view(core.shape))
        grad_RN = core.flatten(-3, -2).mT @ grad_RN
    return [*gradients, grad_RN.reshape(cores[-1].shape)]


def ttm_halves(cores: Sequence[Tensor], split: int) -> tuple[Tensor, Tensor]:
    """Merge the cores (R, M, N, S) of a TTM left and right of bond `split`, row and column modes apart.

    Returns L (M_left, N_left, r) and R (r, M_right, N_right) in the cores' `merge_dtype`; differentiable.
    """
    dtype = merge_dtype(cores[0].dtype)
    left_MNS, right_RMN = cores[0].to(dtype).flatten(0, 1), cores[-1].to(dtype).flatten(2)
    for core in cores[1:split]:
        (m, n, _), (_, rows, cols, s) = left_MNS.shape, core.shape
        product = left_MNS.flatten(0, 1) @ core.to(dtype).flatten(1)
        left_MNS = product.view(m, n, rows, cols, s).transpose(1, 2).reshape(m * rows, n * cols, s)
    for core in cores[-2 : split - 1 : -1]:
        (r, rows, cols, _), (_, m, n) = core.shape, right_RMN.shape
        product = core.to(dtype).flatten(0, 2) @ right_RMN.flatten(1)
        right_RMN = product.view(r, rows, cols, m, n).transpose(2, 3).reshape(r, rows * m, cols * n)
    return left_MNS, right_RMN
