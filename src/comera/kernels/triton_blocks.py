"""The Triton kernels of block tensor trains, and the functions that launch them (ops/block_product.py).

    h_A = x_A R_A,     y_C = h_C L_C + bias_C     features -> components, components -> features
    dh_C = dy_C L_Cᵀ,  dx_A = dh_A R_Aᵀ           the same kernel, with L in the place of R and R in that of L
    ∂R_A = x_Aᵀ dh_A,  ∂L_C = h_Cᵀ dy_C           features by components, summed over the batch

Importing this file needs triton; kernels/select.py says where the kernels are used.

A program makes a tile of one block's product. The features of a block are consecutive, its components are where a table
says: so blocks may have different ranks without padding, and the permutation between both products is an address. h is
in memory, as large as x. The rejected alternative keeps the part of h that an output block needs in registers: a pair
(A, C) has one or two components, too few for the matrix units, and each output block would read all of x.

Shapes: B batch, F features and K components of a block, I/O those that are summed over and those that remain.
"""

# triton compiles the jitted functions and has its own kinds of arguments, so mypy checks no annotations of theirs
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # samples of a tile
BLOCK = 32  # features, or components, of a tile: blocks have a few dozen of both


class Side(NamedTuple):
    """The input or the output blocks of a weight, and where their components are."""

    features: int  # in all blocks, without padding
    size: int  # features in a block
    most: int  # components in a block, at most
    component: Tensor  # (K,) int32, block after block
    start: Tensor  # (blocks + 1,) int32: where a block's begin among them


def to_components(x_BF: Tensor, weight: Tensor, strides: tuple[int, int], side: Side) -> Tensor:
    """The components (B, K) of a batch (B, features). strides: of the weight along its components and features."""
    h_BK = x_BF.new_empty(x_BF.shape[0], len(side.component))
    _product(x_BF, weight, strides, side, h_BK, None, features=False)
    return h_BK


def to_features(
    h_BK: Tensor, weight: Tensor, strides: tuple[int, int], side: Side, bias: Tensor | None = None
) -> Tensor:
    """The features (B, features) of components (B, K), and the bias (features,) added. strides: as above."""
    y_BF = h_BK.new_empty(h_BK.shape[0], side.features)
    _product(h_BK, weight, strides, side, y_BF, bias, features=True)
    return y_BF


def weight_gradient(x_BF: Tensor, h_BK: Tensor, strides: tuple[int, int], side: Side, like: Tensor) -> Tensor:
    """The gradient of a contiguous weight like this with these strides, from its features and its components."""
    made = like.new_empty(like.shape)
    if made.numel():
        tiles = triton.cdiv(side.size, BLOCK) * triton.cdiv(side.most, BLOCK)
        gradient_kernel[(tiles, len(side.start) - 1)](
            *(x_BF.contiguous(), h_BK.contiguous(), made, side.component, side.start),
            *(x_BF.shape[0], side.features, side.size, len(side.component), *strides, triton.cdiv(side.most, BLOCK)),
            **_settings(x_BF),
        )
    return made


def _product(
    x: Tensor, weight: Tensor, strides: tuple[int, int], side: Side, y: Tensor, bias: Tensor | None, *, features: bool
) -> None:
    """features: whether y has them, and not the components."""
    if y.numel():
        columns, settings = side.size if features else side.most, _settings(x)
        grid = triton.cdiv(y.shape[0], settings["BLOCK_B"]), len(side.start) - 1, triton.cdiv(columns, BLOCK)
        product_kernel[grid](
            *(x.contiguous(), weight, y if bias is None else bias.contiguous(), y, side.component, side.start),
            *(y.shape[0], side.features, side.size, len(side.component), *strides),
            TO_FEATURES=features,
            HAS_BIAS=bias is not None,
            **settings,
        )


def _settings(x: Tensor) -> dict[str, Any]:
    on_cpu = x.device.type == "cpu"
    tf32 = not on_cpu and torch.backends.cuda.matmul.allow_tf32
    widen = on_cpu and x.dtype == torch.bfloat16
    # exact float32 has no matrix units: 64 rows of odd sizes spill registers there (benchmarks/gpu_dry.py)
    rows = ROWS if tf32 or x.element_size() == 2 else ROWS // 2
    return {"PRECISION": "tf32" if tf32 else "ieee", "WIDEN": widen, "BLOCK_B": rows, "BLOCK": BLOCK}


@triton.jit
def side_columns(j_J, component_ptr, start_ptr, features, size, FEATURES: tl.constexpr):
    """Of columns j of this program's block: those of the batch, the coordinates in the weight, and a mask."""
    block = tl.program_id(1)
    if FEATURES:
        column_J = block * size + j_J
        return column_J, j_J, (j_J < size) & (column_J < features)
    start = tl.load(start_ptr + block)
    valid_J = j_J < tl.load(start_ptr + block + 1) - start
    column_J = tl.load(component_ptr + start + j_J, valid_J, 0)
    return column_J, column_J, valid_J


@triton.jit
def product_kernel(
    x_ptr,  # (batch, features), or (batch, components) where TO_FEATURES
    w_ptr,  # with the two strides
    bias_ptr,  # (features)
    y_ptr,  # the other of the two
    component_ptr,
    start_ptr,
    batch,
    features,
    size,
    components,
    stride_k,
    stride_f,
    TO_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,  # for the interpreter, whose dot has no bfloat16: the same products, exact in float32
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row_B = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    valid_B = row_B < batch
    o_O, at_O, valid_O = side_columns(
        tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), component_ptr, start_ptr, features, size, TO_FEATURES
    )
    if TO_FEATURES:
        block = tl.program_id(1)
        count = tl.load(start_ptr + block + 1) - tl.load(start_ptr + block)
        x_row, y_row, stride_i, stride_o = components, features, stride_k, stride_f
    else:
        count = size
        x_row, y_row, stride_i, stride_o = features, components, stride_f, stride_k
    y_BO = tl.zeros((BLOCK_B, BLOCK), tl.float32)
    for first in range(0, count, BLOCK):
        i_I, at_I, valid_I = side_columns(
            first + tl.arange(0, BLOCK), component_ptr, start_ptr, features, size, not TO_FEATURES
        )
        x_BI = tl.load(x_ptr + row_B[:, None] * x_row + i_I[None, :], valid_B[:, None] & valid_I[None, :], 0.0)
        w_IO = tl.load(
            w_ptr + at_I[:, None] * stride_i + at_O[None, :] * stride_o, valid_I[:, None] & valid_O[None, :], 0.0
        )
        if WIDEN:
            x_BI, w_IO = x_BI.to(tl.float32), w_IO.to(tl.float32)
        y_BO = tl.dot(x_BI, w_IO, y_BO, input_precision=PRECISION)
    if HAS_BIAS:
        y_BO += tl.load(bias_ptr + o_O, valid_O, 0.0).to(tl.float32)[None, :]
    where = row_B[:, None] * y_row + o_O[None, :]
    tl.store(y_ptr + where, y_BO.to(y_ptr.dtype.element_ty), valid_B[:, None] & valid_O[None, :])


@triton.jit
def gradient_kernel(
    x_ptr,  # (batch, features)
    h_ptr,  # (batch, components)
    w_ptr,  # with the two strides
    component_ptr,
    start_ptr,
    batch,
    features,
    size,
    components,
    stride_k,
    stride_f,
    tiles,  # of components, in a block
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    j_J = tl.arange(0, BLOCK)
    first_f, first_k = tl.program_id(0) // tiles * BLOCK, tl.program_id(0) % tiles * BLOCK
    f_F, at_F, valid_F = side_columns(first_f + j_J, component_ptr, start_ptr, features, size, True)
    k_K, at_K, valid_K = side_columns(first_k + j_J, component_ptr, start_ptr, features, size, False)
    w_FK = tl.zeros((BLOCK, BLOCK), tl.float32)
    for first in range(0, batch, BLOCK_B):
        row_B = (first + tl.arange(0, BLOCK_B)).to(tl.int64)
        valid_B = row_B < batch
        x_FB = tl.load(x_ptr + row_B[None, :] * features + f_F[:, None], valid_F[:, None] & valid_B[None, :], 0.0)
        h_BK = tl.load(h_ptr + row_B[:, None] * components + k_K[None, :], valid_B[:, None] & valid_K[None, :], 0.0)
        if WIDEN:
            x_FB, h_BK = x_FB.to(tl.float32), h_BK.to(tl.float32)
        w_FK = tl.dot(x_FB, h_BK, w_FK, input_precision=PRECISION)
    where = at_F[:, None] * stride_f + at_K[None, :] * stride_k
    in_block_F = first_f + j_J < size  # those of padding have a gradient of zero
    tl.store(w_ptr + where, w_FK.to(w_ptr.dtype.element_ty), in_block_F[:, None] & valid_K[None, :])
