"""The Triton code of kernels.py; importing it needs triton.

Two-sided product. A program keeps P (batch rows × rank) of its rows in registers and takes it through all of B: P
crosses memory once, to be kept for the backward, and y once, with bias and activation on it. Where the batch has fewer
tiles of rows than the device has processors, several programs share a tile: each makes its P and takes a part of B.
The rejected alternative, one tile of y a program, would make P again for each of the out_features / BLOCK_O tiles.

Look-up. A program makes the rows of a few ids as outer products, summed over the rank:  row[n_L, n_R] += L[i, n_L, q]
R[k, q, n_R]. A block is some hundred numbers, too small for the matrix units and for one program each; so the sum runs
in float32 on ordinary units, on blocks that are read from the caches, and nothing of the blocks is ever written out.

Shapes: B batch, I/O in/out features, R rank; U ids, L/N columns of the left and the right half, q the rank.
"""

# triton compiles these functions and has its own kinds of arguments, so mypy checks no annotations here
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 = sigmoid(2 z)
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0)
    return y


@triton.jit
def two_sided_kernel(
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
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,  # for the interpreter, whose dot takes no bfloat16: the same products, exact in float32
):
    row_B = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    r_R = tl.arange(0, BLOCK_R)
    live_B, live_R = row_B < batch, r_R < rank

    p_BR = tl.zeros((BLOCK_B, BLOCK_R), tl.float32)
    for start in range(0, features, BLOCK_I):
        i_I = start + tl.arange(0, BLOCK_I)
        live_I = i_I < features
        x_BI = tl.load(
            x_ptr + row_B[:, None] * stride_b + i_I[None, :] * stride_i, live_B[:, None] & live_I[None, :], 0.0
        )
        a_IR = tl.load(a_ptr + r_R[None, :] * features + i_I[:, None], live_I[:, None] & live_R[None, :], 0.0)
        if WIDEN:
            x_BI, a_IR = x_BI.to(tl.float32), a_IR.to(tl.float32)
        p_BR = tl.dot(x_BI, a_IR, p_BR, input_precision=PRECISION)
    p_BR = p_BR.to(y_ptr.dtype.element_ty)
    if tl.program_id(1) == 0:
        tl.store(p_ptr + row_B[:, None] * rank + r_R[None, :], p_BR, live_B[:, None] & live_R[None, :])
    if WIDEN:
        p_BR = p_BR.to(tl.float32)

    for tile in range(tl.program_id(1), tl.cdiv(out_features, BLOCK_O), tl.num_programs(1)):
        o_O = tile * BLOCK_O + tl.arange(0, BLOCK_O)
        live_O = o_O < out_features
        b_RO = tl.load(b_ptr + r_R[:, None] * out_features + o_O[None, :], live_R[:, None] & live_O[None, :], 0.0)
        if WIDEN:
            b_RO = b_RO.to(tl.float32)
        y_BO = tl.dot(p_BR, b_RO, input_precision=PRECISION)
        if HAS_BIAS:
            y_BO += tl.load(bias_ptr + o_O, live_O, 0.0).to(tl.float32)[None, :]
        y_BO = activate(y_BO, ACTIVATION)
        where = row_B[:, None] * out_features + o_O[None, :]
        tl.store(y_ptr + where, y_BO.to(y_ptr.dtype.element_ty), live_B[:, None] & live_O[None, :])


@triton.jit
def rows_kernel(
    ids_ptr,  # (count)
    left_ptr,  # (rows of the left half, cols_l, rank)
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
    u_U = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    l_L, n_N = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    live_U, live_L, live_N = u_U < count, l_L < cols_l, n_N < cols_r
    id_U = tl.load(ids_ptr + u_U, live_U, 0).to(tl.int64)
    left_UL = left_ptr + (id_U // rows_r)[:, None] * (cols_l * rank) + l_L[None, :] * rank
    right_UN = right_ptr + (id_U % rows_r)[:, None] * (rank * cols_r) + n_N[None, :]
    live_UL, live_UN = live_U[:, None] & live_L[None, :], live_U[:, None] & live_N[None, :]

    row_ULN = tl.zeros((BLOCK_U, BLOCK_L, BLOCK_N), tl.float32)
    for q in range(rank):
        l_UL = tl.load(left_UL + q, live_UL, 0.0).to(tl.float32)
        r_UN = tl.load(right_UN + q * cols_r, live_UN, 0.0).to(tl.float32)
        row_ULN += l_UL[:, :, None] * r_UN[:, None, :]
    where = u_U[:, None, None] * (cols_l * cols_r) + l_L[None, :, None] * cols_r + n_N[None, None, :]
    tl.store(rows_ptr + where, row_ULN.to(rows_ptr.dtype.element_ty), live_UL[:, :, None] & live_N[None, None, :])


@triton.jit
def rows_backward_kernel(
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
    u_U = tl.program_id(0).to(tl.int64) * BLOCK_U + tl.arange(0, BLOCK_U)
    l_L, n_N = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_N)
    live_U, live_L, live_N = u_U < count, l_L < cols_l, n_N < cols_r
    id_U = tl.load(ids_ptr + u_U, live_U, 0).to(tl.int64)
    left_UL = (id_U // rows_r)[:, None] * (cols_l * rank) + l_L[None, :] * rank
    right_UN = (id_U % rows_r)[:, None] * (rank * cols_r) + n_N[None, :]
    live_UL, live_UN = live_U[:, None] & live_L[None, :], live_U[:, None] & live_N[None, :]

    where = u_U[:, None, None] * (cols_l * cols_r) + l_L[None, :, None] * cols_r + n_N[None, None, :]
    d_ULN = tl.load(drows_ptr + where, live_UL[:, :, None] & live_N[None, None, :], 0.0).to(tl.float32)
    for q in range(rank):
        l_UL = tl.load(left_ptr + left_UL + q, live_UL, 0.0).to(tl.float32)
        r_UN = tl.load(right_ptr + right_UN + q * cols_r, live_UN, 0.0).to(tl.float32)
        tl.atomic_add(dleft_ptr + left_UL + q, tl.sum(d_ULN * r_UN[:, None, :], 2), live_UL, sem="relaxed")
        tl.atomic_add(dright_ptr + right_UN + q * cols_r, tl.sum(d_ULN * l_UL[:, :, None], 1), live_UN, sem="relaxed")
