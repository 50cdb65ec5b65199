"""Triton kernels, and the functions that launch them: the low-rank product, and the lookup of rows.

    y = (x Aᵀ) B + bias,   P = x Aᵀ kept for the backward;   with U = dy Bᵀ, dx = U A: the same kernel
    row[u] = L[i_u] R[:, k_u]   and its gradients, added to those of L and R by atomic additions

Importing this file needs triton; kernels/select.py says where the kernels are used.

Low-rank product. A program keeps P (batch rows × rank) of its rows in registers and multiplies it with all of B: P
crosses memory once, to be kept for the backward, and so does y, with the bias added. Where the batch has
fewer tiles of rows than the device has processors, several programs share a tile: each computes its P and takes a
share of B. The rejected alternative, a program for each tile of y, would compute P again for each of the
out_features / BLOCK_O tiles.

Lookup. A program makes the rows of a few ids as outer products, summed over the rank:  row[n_L, n_R] += L[i, n_L, q]
R[k, q, n_R]. A block has some hundred elements, too few for the matrix units and for a program of its own; so the sum
runs in float32 on ordinary units, on blocks read from the caches, and nothing of the blocks is ever written out.

Shapes: B batch, I/O in/out features, R rank; U ids, M/N rows and columns of the left (L) and right (R) factor of a
table; in the lookup kernels L/N are the columns of the left and the right factor, and q the rank.
"""

# triton compiles the jitted functions and has its own kinds of arguments, so mypy checks no annotations of theirs
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from comera.kernels.select import power_of_two


def low_rank(x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """y = (x Aᵀ) B + bias and P = x Aᵀ (batch, rank), all in one dtype: float32, bfloat16 or float16.

    The rank is at most `select.TRITON_MOST_RANK`. Sums are in float32 (TF32 where torch allows it), P in x's dtype.
    """
    (batch, features), (rank, out_features) = x_BI.shape, b_RO.shape
    y_BO, p_BR = x_BI.new_empty(batch, out_features), x_BI.new_empty(batch, rank)
    if batch == 0:
        return y_BO, p_BR
    tf32 = x_BI.device.type != "cpu" and torch.backends.cuda.matmul.allow_tf32
    # With 8 warps none of these spills registers, on sm_80, sm_90 and sm_100, up to rank 128; with 4 warps, tiles of 64
    # x 64 spilled up to 8.6 kB where float32 has no matrix units (benchmarks/gpu_dry.py).
    in_float32 = (64, 32, 64) if tf32 else (32, 32, 32)
    block_b, block_i, block_o = (64, 64, 128) if x_BI.element_size() == 2 else in_float32
    row_tiles, column_tiles = -(-batch // block_b), -(-out_features // block_o)
    shares = max(1, min(column_tiles, 2 * _processors(x_BI.device) // row_tiles))
    low_rank_kernel[(row_tiles, shares)](
        *(x_BI, a_RI.contiguous(), b_RO.contiguous(), b_RO if bias is None else bias.contiguous(), y_BO, p_BR),
        *(batch, features, out_features, rank, *x_BI.stride()),
        HAS_BIAS=bias is not None,
        PRECISION="tf32" if tf32 else "ieee",
        BLOCK_B=block_b,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        BLOCK_R=max(16, power_of_two(rank)),
        WIDEN=x_BI.device.type == "cpu" and x_BI.dtype == torch.bfloat16,
        num_warps=8,
    )
    return y_BO, p_BR


def lookup_rows(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor) -> Tensor:
    """Rows (U, N_L·N_R) of a table from its factors, summed in float32; ids // M_R and ids % M_R within L and R."""
    rows_UD = left_MNR.new_empty(ids_U.numel(), left_MNR.shape[1] * right_MRN.shape[2])
    _run_on_rows(lookup_rows_kernel, ids_U, left_MNR, right_MRN, rows_UD)
    return rows_UD


def lookup_rows_backward(ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor, drows_UD: Tensor) -> tuple[Tensor, Tensor]:
    """∂L[i_u] += drow[u] R[:, k_u]ᵀ,  ∂R[:, k_u] += L[i_u]ᵀ drow[u], in the dtypes of L and R, added in any order."""
    dleft, dright = (factor.new_zeros(factor.shape, dtype=torch.float32) for factor in (left_MNR, right_MRN))
    _run_on_rows(lookup_rows_backward_kernel, ids_U, left_MNR, right_MRN, drows_UD, dleft, dright)
    return dleft.to(left_MNR.dtype), dright.to(right_MRN.dtype)


def _run_on_rows(
    kernel: triton.JITFunction, ids_U: Tensor, left_MNR: Tensor, right_MRN: Tensor, rows_UD: Tensor, *grads: Tensor
) -> None:
    """Run one of the two lookup kernels: some thousand elements of rows a program."""
    if rows_UD.numel() == 0:
        return
    (_, cols_l, rank), (rows_r, _, cols_r), count = left_MNR.shape, right_MRN.shape, ids_U.numel()
    block_l, block_n = power_of_two(cols_l), power_of_two(cols_r)
    block_u = max(1, 2048 // (block_l * block_n))
    operands = (tensor.contiguous() for tensor in (ids_U, left_MNR, right_MRN, rows_UD, *grads))
    blocks = {"BLOCK_U": block_u, "BLOCK_L": block_l, "BLOCK_N": block_n}
    kernel[(-(-count // block_u),)](*operands, count, rows_r, cols_l, cols_r, rank, **blocks)


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def low_rank_kernel(
    x_ptr,  # (batch, features) with the two strides
    a_ptr,  # (rank, features)
    b_ptr,  # (rank, out_features)
    bias_ptr,  # (out_features)
    y_ptr,  # (batch, out_features)
    p_ptr,  # (batch, rank)
    batch,
    features,
    out_features,
    rank,
    stride_b,
    stride_i,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,  # for the interpreter, whose dot has no bfloat16: the same products, exact in float32
):
    row_B = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    r_R = tl.arange(0, BLOCK_R)
    valid_B, valid_R = row_B < batch, r_R < rank

    p_BR = tl.zeros((BLOCK_B, BLOCK_R), tl.float32)
    for start in range(0, features, BLOCK_I):
        i_I = start + tl.arange(0, BLOCK_I)
        valid_I = i_I < features
        x_BI = tl.load(
            x_ptr + row_B[:, None] * stride_b + i_I[None, :] * stride_i, valid_B[:, None] & valid_I[None, :], 0.0
        )
        a_IR = tl.load(a_ptr + r_R[None, :] * features + i_I[:, None], valid_I[:, None] & valid_R[None, :], 0.0)
        if WIDEN:
            x_BI, a_IR = x_BI.to(tl.float32), a_IR.to(tl.float32)
        p_BR = tl.dot(x_BI, a_IR, p_BR, input_precision=PRECISION)
    p_BR = p_BR.to(y_ptr.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(p_ptr + row_B[:, None] * rank + r_R[None, :], p_BR, valid_B[:, None] & valid_R[None, :])
    if WIDEN:
        p_BR = p_BR.to(tl.float32)

    for tile in range(tl.program_id(1), tl.cdiv(out_features, BLOCK_O), tl.num_programs(1)):
        o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        valid_O = o_O < out_features
        b_RO = tl.load(b_ptr + r_R[:, None] * out_features + o_O[None, :], valid_R[:, None] & valid_O[None, :], 0.0)
        if WIDEN:
            b_RO = b_RO.to(tl.float32)
        y_BO = tl.dot(p_BR, b_RO, input_precision=PRECISION)
        if HAS_BIAS:
            y_BO += tl.load(bias_ptr + o_O, valid_O, 0.0).to(tl.float32)[None, :]
        where = row_B[:, None] * out_features + o_O[None, :]
        tl.store(y_ptr + where, y_BO.to(y_ptr.dtype.element_ty), valid_B[:, None] & valid_O[None, :])


@triton.jit
def row_block(
    ids_ptr, count, rows_r, cols_l, cols_r, rank, BLOCK_U: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Offsets of the rows of this program's ids in the left factor, in the right one and in the rows; their masks."""
    u_U = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    l_L, n_N = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    valid_U, valid_L, valid_N = u_U < count, l_L < cols_l, n_N < cols_r
    id_U = tl.load(ids_ptr + u_U, valid_U, 0).to(tl.int64)
    left_UL = (id_U // rows_r)[:, None] * (cols_l * rank) + l_L[None, :] * rank
    right_UN = (id_U % rows_r)[:, None] * (rank * cols_r) + n_N[None, :]
    row_ULN = u_U[:, None, None] * (cols_l * cols_r) + l_L[None, :, None] * cols_r + n_N[None, None, :]
    valid_UL, valid_UN = valid_U[:, None] & valid_L[None, :], valid_U[:, None] & valid_N[None, :]
    return left_UL, right_UN, row_ULN, valid_UL, valid_UN, valid_UL[:, :, None] & valid_N[None, None, :]


@triton.jit
def lookup_rows_kernel(
    ids_ptr,  # (count)
    left_ptr,  # (rows of the left factor, cols_l, rank)
    right_ptr,  # (rows_r, rank, cols_r)
    rows_ptr,  # (count, cols_l, cols_r)
    count,
    rows_r,
    cols_l,
    cols_r,
    rank,
    BLOCK_U: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    left_UL, right_UN, row_ULN, valid_UL, valid_UN, valid_ULN = row_block(
        ids_ptr, count, rows_r, cols_l, cols_r, rank, BLOCK_U, BLOCK_L, BLOCK_N
    )
    sum_ULN = tl.zeros((BLOCK_U, BLOCK_L, BLOCK_N), tl.float32)
    for q in range(rank):
        l_UL = tl.load(left_ptr + left_UL + q, valid_UL, 0.0).to(tl.float32)
        r_UN = tl.load(right_ptr + right_UN + q * cols_r, valid_UN, 0.0).to(tl.float32)
        sum_ULN += l_UL[:, :, None] * r_UN[:, None, :]
    tl.store(rows_ptr + row_ULN, sum_ULN.to(rows_ptr.dtype.element_ty), valid_ULN)


@triton.jit
def lookup_rows_backward_kernel(
    ids_ptr,
    left_ptr,
    right_ptr,
    drows_ptr,  # (count, cols_l, cols_r)
    dleft_ptr,  # float32, of left's shape, zeros before the first program
    dright_ptr,
    count,
    rows_r,
    cols_l,
    cols_r,
    rank,
    BLOCK_U: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    left_UL, right_UN, row_ULN, valid_UL, valid_UN, valid_ULN = row_block(
        ids_ptr, count, rows_r, cols_l, cols_r, rank, BLOCK_U, BLOCK_L, BLOCK_N
    )
    d_ULN = tl.load(drows_ptr + row_ULN, valid_ULN, 0.0).to(tl.float32)
    for q in range(rank):
        l_UL = tl.load(left_ptr + left_UL + q, valid_UL, 0.0).to(tl.float32)
        r_UN = tl.load(right_ptr + right_UN + q * cols_r, valid_UN, 0.0).to(tl.float32)
        tl.atomic_add(dleft_ptr + left_UL + q, tl.sum(d_ULN * r_UN[:, None, :], 2), valid_UL, sem="relaxed")
        tl.atomic_add(dright_ptr + right_UN + q * cols_r, tl.sum(d_ULN * l_UL[:, :, None], 1), valid_UN, sem="relaxed")
