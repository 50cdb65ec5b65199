"""torch's scaled matrix product of float8 operands: which devices have it, and in which layout it takes its operands.

    y = (left · left_scale) (right · right_scale)ᵀ

Layout. Tensor cores read float8 along the contraction only, so both operands are stored with it as their last axis:
torch wants the left one in row-major order and the right one, which it calls mat2, in column-major order: a transposed
view of row-major rightᵀ. The contraction and mat2's other axis must be multiples of 16; zeros, which add nothing, fill
them up. The scales are those that decode: float32, one for the whole operand (TensorWise), or one for each row of left
as (M, 1) and of right as (1, N) (RowWise); both operands are scaled the same way.

e5m2 goes left: two e5m2 operands have no product, and CUTLASS, which computes row-wise scaled products where cuBLAS
does not, takes e4m3 alone on the right. Some releases of it write bfloat16 only, so row-wise scaled products do.

Bytes, not float8, are padded and copied, for which every device has kernels.

Shapes: M/N rows of left and right, K contraction.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

MULTIPLE = 16  # of the contraction and of mat2's other axis, in elements
LEAST_CAPABILITY = (8, 9)


def unavailable_reason(device: torch.device) -> str | None:
    """Why this device has no scaled products; None where it has them."""
    if device.type != "cuda":
        return f"scaled products need a CUDA device, got {device.type}"
    if torch.version.hip is not None:
        return "scaled products are used with CUDA only, got ROCm, whose float8 formats differ"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, came = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"scaled products need a CUDA device of capability {least} or later, got {came}"
    return None


def scaled_mm(left_MK: Tensor, left_scale: Tensor, right_NK: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(left · left_scale) (right · right_scale)ᵀ, accumulated in float32.

    Args:
        left_MK, right_NK: float8 of any layout, none of the sizes 0, e5m2 on the left at most.
        left_scale, right_scale: float32, (1, 1) for one scale or (M, 1) and (N, 1) for one a row.
        dtype: of the result; of one scaled by row, which torch rounds to bfloat16 first.
    """
    rows, columns = left_MK.shape[0], right_NK.shape[0]
    rowwise = max(left_scale.numel(), right_scale.numel()) > 1
    wide = -columns % MULTIPLE
    mat1, mat2 = _padded(left_MK, 0), _padded(right_NK, wide).t()
    if rowwise:
        recipe = ScalingType.RowWise
        scale1 = left_scale.expand(rows, 1).contiguous()
        scale2 = F.pad(right_scale.expand(columns, 1), (0, 0, 0, wide), value=1.0).reshape(1, columns + wide)
    else:
        recipe = ScalingType.TensorWise
        scale1, scale2 = left_scale.reshape(()), right_scale.reshape(())
    made = torch.bfloat16 if rowwise else torch.float32 if dtype == torch.float64 else dtype
    y_MN: Tensor = F.scaled_mm(mat1, mat2, scale1, recipe, scale2, recipe, output_dtype=made)
    return y_MN[:, :columns].to(dtype)


def _padded(values_MK: Tensor, rows: int) -> Tensor:
    """Row-major, with more rows of zeros, and columns of zeros up to the next multiple."""
    columns = -values_MK.shape[1] % MULTIPLE
    stored = values_MK.view(torch.uint8)
    stored = F.pad(stored, (0, columns, 0, rows)) if columns or rows else stored
    return stored.contiguous().view(values_MK.dtype)
