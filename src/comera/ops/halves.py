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

from torch import Tensor


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
