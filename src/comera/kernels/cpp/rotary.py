"""The operation of rotary.cpp: queries and keys turned by the angles of their positions."""

from torch import Tensor

from comera.kernels.cpp.attention import sizes_and_views, with_contiguous_heads
from comera.kernels.cpp.library import call, operation, strided


@operation()
def rotary(q_BHTD: Tensor, k_BGTD: Tensor, cos_BTR: Tensor, sin_BTR: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """q and k, (B, H, T, D) and (B, G, T, D), with the first R columns of each row turned, R even and at most D.

    cos, sin: (B, T, R), or (1, T, R) for all samples alike. transposed: gradients from those of the results.
    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    if not (q_BHTD.dim() == k_BGTD.dim() == 4 and cos_BTR.dim() == 3):
        found = [list(t.shape) for t in (q_BHTD, k_BGTD, cos_BTR)]
        raise RuntimeError(f"expected q and k in 4 dimensions and cos in 3, got {found}")
    (batch, heads, length, width), groups, (samples, _, rotated) = q_BHTD.shape, k_BGTD.shape[1], cos_BTR.shape
    if samples not in (1, batch) or rotated % 2 or rotated > width:
        expected = f"cos of {batch} samples or 1, with an even number of columns up to {width}"
        raise RuntimeError(f"expected {expected}, got {list(cos_BTR.shape)}")
    q_BHTD, k_BGTD = strided("q", q_BHTD, *q_BHTD.shape), strided("k", k_BGTD, batch, groups, length, width)
    tables = [strided(name, t, samples, length, rotated) for name, t in (("cos", cos_BTR), ("sin", sin_BTR))]
    of_heads = [t[:, None].expand(batch, 1, length, rotated) for t in tables]
    turned = with_contiguous_heads(batch, heads, length, width), with_contiguous_heads(batch, groups, length, width)
    sizes = batch, heads, groups, length, width, rotated
    call("rotary", *sizes_and_views(sizes, [q_BHTD, k_BGTD, *of_heads, *turned]), transposed)
    return turned
