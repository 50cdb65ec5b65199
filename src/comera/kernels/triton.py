"""Optional Triton kernels behind the same contracts: the two-sided product with its epilogue, and the look-up of rows.

    y = act((x Aᵀ) B + bias),   P = x Aᵀ kept;   U = dy Bᵀ, dx = U A: the same kernel;   ∂A = Uᵀ x,  ∂B = Pᵀ dy
    row[u] = L[i_u] R[:, k_u]   and its gradient, summed into L and R with atomic additions

They are used where they were measured to be faster than torch's own products and nowhere else: a device is listed in
`FASTER` once benchmarks/gpu_kernels.py has shown it there. None is listed yet, for they have run on no GPU, only under
Triton's interpreter; the environment variable COMERA_KERNELS ("all", "none", or names by commas) decides otherwise.

Shapes: B batch, I/O in/out features, R rank; U ids, M/N rows and columns of the left (L) and right (R) half.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from comera.kernels.select import TRITON, asked
from comera.kernels.tracing import constant_when_traced
from comera.ops.activations import ACTIVATIONS
from comera.ops.dtypes import without_autocast

NAMES = TRITON

# Name of a device, as torch gives it -> kernels that are faster than torch's products there.
FASTER: Mapping[str, frozenset[str]] = {}

# Largest rank whose P stays in registers, and largest row that one program makes.
MAX_RANK, MAX_COLUMNS = 128, 4096


def available() -> bool:
    """Whether triton is installed."""
    return find_spec("triton") is not None


@constant_when_traced
def enabled(kernel: str, device: torch.device | str) -> bool:
    """Whether `kernel` ("low_rank" or "rows") takes the work on this device: measured faster there, or asked for.

    Raises ConfigError when COMERA_KERNELS names an unknown kernel.
    """
    device = torch.device(device)
    if device.type != "cuda" or not available():
        return False
    wanted = asked(kernel)
    if wanted is not None:
        return wanted
    return bool(FASTER) and kernel in FASTER.get(torch.cuda.get_device_name(device), ())


def takes_two_sided(x_BI: Tensor, a_RI: Tensor) -> bool:
    """Whether `two_sided` of this file is enabled for these operands and can take them."""
    return (
        x_BI.device.type == "cuda"
        and x_BI.dtype == a_RI.dtype != torch.float64
        and 0 < a_RI.shape[0] <= MAX_RANK
        and enabled("low_rank", x_BI.device)
    )


def takes_rows(left_MNR: Tensor, right_MRN: Tensor) -> bool:
    """Whether `rows` of this file is enabled for these operands and can take them."""
    columns = _power_of_two(left_MNR.shape[1]) * _power_of_two(right_MRN.shape[2])
    return (
        left_MNR.device.type == "cuda"
        and left_MNR.dtype != torch.float64
        and columns <= MAX_COLUMNS
        and enabled("rows", left_MNR.device)
    )


def two_sided(
    x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """act((x Aᵀ) B + bias), all operands in one dtype (float32, bfloat16 or float16), rank at most MAX_RANK.

    activation: a name in `ACTIVATIONS` or None. Sums are taken in float32 (TF32 where torch allows it), P is rounded to
    x's dtype. Kept for the backward: x, A, B, bias and P; with an activation its argument is made again from P.
    Differentiable once.
    """
    y_BO: Tensor = _TwoSided.apply(x_BI, a_RI, b_RO, bias, activation)
    return y_BO


def rows(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
    """Rows (U, N_L·N_R) of a tensor-train matrix from its halves, as `rows.pair_sums` of each id; ids checked before.

    Sums are taken in float32. The gradients of L and R are added up in any order. Differentiable once.
    """
    rows_UD: Tensor = _Rows.apply(ids_U, left_MNR, right_MRN)
    return rows_UD


class _TwoSided(torch.autograd.Function):
    """The formulas stand at the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        y_BO, p_BR = _launch_two_sided(x_BI, a_RI, b_RO, bias, activation)
        ctx.activation = activation
        ctx.save_for_backward(x_BI, a_RI, b_RO, bias, p_BR)
        return y_BO

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, a_RI, b_RO, bias, p_BR = ctx.saved_tensors
        wants_x, wants_a, wants_b, wants_bias, _ = ctx.needs_input_grad
        dx_BI = da_RI = db_RO = dbias_O = None
        with without_autocast(dy_BO):
            if ctx.activation is not None:
                z_BO = p_BR @ b_RO if bias is None else torch.addmm(bias, p_BR, b_RO)
                dy_BO = ACTIVATIONS[ctx.activation][1](dy_BO, z_BO)
            if wants_x:
                dx_BI, u_BR = _launch_two_sided(dy_BO, b_RO, a_RI, None, None)
            elif wants_a:
                u_BR = dy_BO @ b_RO.t()
            if wants_a:
                da_RI = u_BR.t() @ x_BI
            if wants_b:
                db_RO = p_BR.t() @ dy_BO
            if wants_bias:
                dbias_O = dy_BO.sum(0)
        return dx_BI, da_RI, db_RO, dbias_O, None


def _launch_two_sided(
    x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """y and P (batch, rank)."""
    from comera.kernels.triton_kernels import two_sided_kernel

    (batch, features), (rank, out_features) = x_BI.shape, b_RO.shape
    y_BO, p_BR = x_BI.new_empty(batch, out_features), x_BI.new_empty(batch, rank)
    if batch == 0:
        return y_BO, p_BR
    wide = x_BI.element_size() == 2
    block_b, block_i, block_o = (64, 64, 128) if wide else (64, 32, 64)
    tiles, parts = -(-batch // block_b), -(-out_features // block_o)
    shares = max(1, min(parts, 2 * _processors(x_BI.device) // tiles))
    tf32 = x_BI.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    two_sided_kernel[(tiles, shares)](
        *(x_BI, a_RI.contiguous(), b_RO.contiguous(), b_RO if bias is None else bias.contiguous(), y_BO, p_BR),
        *(batch, features, out_features, rank, *x_BI.stride()),
        HAS_BIAS=bias is not None,
        ACTIVATION=activation or "",
        PRECISION="tf32" if tf32 else "ieee",
        BLOCK_B=block_b,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        BLOCK_R=max(16, _power_of_two(rank)),
        WIDEN=x_BI.device.type == "cpu" and x_BI.dtype == torch.bfloat16,
    )
    return y_BO, p_BR


class _Rows(torch.autograd.Function):
    """row[u] = L[i_u] R[:, k_u];  ∂L[i_u] += drow[u] R[:, k_u]ᵀ,  ∂R[:, k_u] += L[i_u]ᵀ drow[u]."""

    @staticmethod
    def forward(ctx: Any, ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
        from comera.kernels.triton_kernels import rows_kernel

        left_MNR, right_MRN, ids_U = left_MNR.contiguous(), right_MRN.contiguous(), ids_U.contiguous()
        ctx.save_for_backward(ids_U, left_MNR, right_MRN)
        rows_UD = left_MNR.new_empty(ids_U.numel(), left_MNR.shape[1] * right_MRN.shape[2])
        if rows_UD.numel():
            grid, sizes, blocks = _row_blocks(ids_U, left_MNR, right_MRN)
            rows_kernel[grid](ids_U, left_MNR, right_MRN, rows_UD, *sizes, **blocks)
        return rows_UD

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        from comera.kernels.triton_kernels import rows_backward_kernel

        ids_U, left_MNR, right_MRN = ctx.saved_tensors
        dleft, dright = (torch.zeros_like(half, dtype=torch.float32) for half in (left_MNR, right_MRN))
        if drows_UD.numel():
            grid, sizes, blocks = _row_blocks(ids_U, left_MNR, right_MRN)
            operands = ids_U, left_MNR, right_MRN, drows_UD.contiguous(), dleft, dright
            rows_backward_kernel[grid](*operands, *sizes, **blocks)
        return None, dleft.to(left_MNR.dtype), dright.to(right_MRN.dtype)


def _row_blocks(
    ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor
) -> tuple[tuple[int], tuple[int, ...], dict[str, int]]:
    """Grid, sizes and blocks of the two look-up kernels: some thousand numbers of rows a program."""
    (_, cols_l, rank), (rows_r, _, cols_r) = left_MNR.shape, right_MRN.shape
    block_l, block_n = _power_of_two(cols_l), _power_of_two(cols_r)
    block_u = max(1, 2048 // (block_l * block_n))
    count = ids_U.numel()
    blocks = {"BLOCK_U": block_u, "BLOCK_L": block_l, "BLOCK_N": block_n}
    return (-(-count // block_u),), (count, rows_r, cols_l, cols_r, rank), blocks


def _power_of_two(size: int) -> int:
    """The next power of two, of which Triton's blocks are made."""
    return 1 << max(0, size - 1).bit_length()


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
