"""The operations of lookup.cpp: rows of a table that is the product of two parts, and the gradients of these.

Shapes: U pairs, M rows of a part, X and Y columns of the left and right one, R the rank between them, K = M·Y.
"""

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, check_shape, checked, floats, on_cpu, operation, words
from comera.kernels.cpp.memory import empty


def _flops(left: tuple[int, ...], right: tuple[int, ...], i: tuple[int, ...], k: tuple[int, ...]) -> int:
    return 2 * i[0] * left[1] * right[1] * left[2]


def _backward_flops(drows: tuple[int, ...], *operands: tuple[int, ...]) -> int:
    return 2 * _flops(*operands)


@operation(_flops)
def pair_rows(left: Tensor, right: Tensor, i: Tensor, k: Tensor) -> Tensor:
    """Rows L[i] R[k]ᵀ (U, X·Y) of L (M, X, R) and R (M, Y, R).

    Raises RuntimeError unless L and R are float32 on the CPU, of one rank, and i and k int64 vectors of one length;
    ValueError for an i or k that is no row.
    """
    sizes, left, right, i, k = _checked(left, right, i, k)
    rows = empty(sizes[0], sizes[3] * sizes[4])
    call("pair_rows", words(sizes), left, right, i, k, rows)
    return rows


@operation(_backward_flops)
def pair_rows_backward(drows: Tensor, left: Tensor, right: Tensor, i: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of L and R from those of rows (U, X·Y). Raises as `pair_rows`."""
    sizes, left, right, i, k = _checked(left, right, i, k)
    drows = checked("gradients of rows", drows, sizes[0], sizes[3] * sizes[4])
    dleft, dright = empty(*left.shape), empty(*right.shape)
    call("pair_rows_backward", words(sizes), drows, left, right, i, k, dleft, dright)
    return dleft, dright


@operation()
def rank_last(core: Tensor, gates: Tensor | None) -> Tensor:
    """A core (R, K) times its gates (R), transposed: (K, R). Raises RuntimeError unless both are float32 on the CPU."""
    core, gates = _core_and_gates(core, gates)
    rank, columns = core.shape
    right = empty(columns, rank)
    call("rank_last", rank, columns, core, address(gates), right)
    return right


@operation()
def rank_last_backward(dright: Tensor, core: Tensor, gates: Tensor | None) -> list[Tensor]:
    """Gradients of the core and, if there are any, of the gates, from those of the result (K, R).

    Raises as `rank_last`.
    """
    core, gates = _core_and_gates(core, gates)
    rank, columns = core.shape
    dright = checked("gradients of R", dright, columns, rank)
    found = [empty(rank, columns)] if gates is None else [empty(rank, columns), empty(rank)]
    dgates = None if gates is None else found[1]
    call("rank_last_backward", rank, columns, dright, core, address(gates), found[0], address(dgates))
    return found


def _core_and_gates(core: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if core.ndim != 2:
        raise RuntimeError(f"expected a core (R, K), got {list(core.shape)}")
    return floats("a core", core), checked("gates", gates, core.shape[0])


def _checked(
    left: Tensor, right: Tensor, i: Tensor, k: Tensor
) -> tuple[tuple[int, int, int, int, int, int], Tensor, Tensor, Tensor, Tensor]:
    """The sizes as lookup.cpp has them, and the operands as it reads them."""
    if left.ndim != 3 or right.ndim != 3 or left.shape[2] != right.shape[2]:
        raise RuntimeError(f"expected L (M, X, R) and R (M, Y, R), got {list(left.shape)} and {list(right.shape)}")
    if i.ndim != 1:
        raise RuntimeError(f"expected ids of one dimension, got {list(i.shape)}")
    check_shape("right ids", k, (i.shape[0],))
    for ids in (i, k):
        if ids.dtype is not torch.int64 or not on_cpu(ids):
            raise RuntimeError(f"expected ids of dtype int64 on the CPU, got {ids.dtype} on {ids.device}")
    (m, x, rank), (n, y, _) = left.shape, right.shape
    sizes = i.shape[0], m, n, x, y, rank
    return sizes, floats("L", left), floats("R", right), i.contiguous(), k.contiguous()
