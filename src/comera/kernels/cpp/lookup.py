"""The operations of lookup.cpp: rows of tables, each dense or the product of two parts L and R, and their gradients.

Shapes: N ids, M rows of a part, X and Y columns of L and R, R the rank between them, K = M·Y.
"""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, checked, floats, on_cpu, operation, strided, words
from comera.kernels.cpp.memory import empty


class _Sizes(NamedTuple):
    left_rows: int
    right_rows: int
    x: int
    y: int
    rank: int
    dense: int = 0


class _Table(NamedTuple):
    """The operands of a table as the kernels read them. right: R, or the core that it is made of, or None."""

    ids: Tensor
    left: Tensor
    right: Tensor | None
    gates: Tensor | None
    limit: int
    padding: int
    sizes: _Sizes

    @property
    def row(self) -> tuple[int, int]:
        """Shape of all rows."""
        return self.ids.shape[0], self.sizes.x * self.sizes.y

    @property
    def of_core(self) -> bool:
        """Whether R is made of a core."""
        return self.right is not None and self.right.ndim == 4

    def words(self, right: Tensor | None, rows: Tensor, grads: Sequence[Tensor | None] = (None,) * 3) -> list[int]:
        """The table as lookup.cpp has it. grads: of L, of R or its core, and of the gates."""
        ids, core = self.ids, self.right if self.of_core else None
        numbers = ids.data_ptr(), ids.stride(0), ids.shape[0], self.limit, self.padding, *self.sizes
        return [*numbers, rows.stride(0), *map(address, (self.left, core, self.gates, right, rows, *grads))]


def _sizes(left: Sequence[int], right: Sequence[int] | None) -> _Sizes:
    """Sizes of L (M, X, R) or (1, M, X, R), and of R (M, Y, R) or a core (R, M, N, S) with Y = N·S; of a dense table
    (M, X), which has no R.

    Raises RuntimeError unless they fit each other.
    """
    if right is None:
        if len(left) != 2:
            raise RuntimeError(f"expected a dense table (M, X) where there is no R, got {list(left)}")
        return _Sizes(left[0], 1, left[1], 1, 1, dense=1)
    if len(left) == 3 or (len(left) == 4 and left[0] == 1):
        m, x, rank = left[-3:]
        if len(right) == 3 and right[2] == rank:
            return _Sizes(m, right[0], x, right[1], rank)
        if len(right) == 4 and right[0] == rank:
            return _Sizes(m, right[1], x, right[2] * right[3], rank)
    came = f"{list(left)} and {list(right)}"
    raise RuntimeError(f"expected L (M, X, R) or (1, M, X, R), and R (M, Y, R) or a core (R, M, N, S), got {came}")


def _tables(
    ids: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    limits: Sequence[int],
    paddings: Sequence[int],
) -> list[_Table]:
    """Raises RuntimeError unless all operands of each table fit each other."""
    tables = []
    each = zip(ids, lefts, rights, gates, limits, paddings, strict=True)
    for ids_N, left, right, gates_R, limit, padding in each:
        sizes = _sizes(left.shape, None if right is None else right.shape)
        if ids_N.ndim != 1 or ids_N.dtype is not torch.int64 or not on_cpu(ids_N):
            came = f"{list(ids_N.shape)} of {ids_N.dtype} on {ids_N.device}"
            raise RuntimeError(f"expected ids of one dimension and of dtype int64 on the CPU, got {came}")
        if not 0 <= limit <= sizes.left_rows * sizes.right_rows:
            most = sizes.left_rows * sizes.right_rows
            raise RuntimeError(f"expected at most {most} rows, as many as L and R have together, got {limit}")
        if gates_R is not None and (right is None or right.ndim != 4):
            other = "a dense table" if right is None else list(right.shape)
            raise RuntimeError(f"expected gates with a core (R, M, N, S) only, got {other}")
        gates_R = checked("gates", gates_R, sizes.rank)
        right = None if right is None else floats("R", right)
        tables.append(_Table(ids_N, floats("L", left), right, gates_R, limit, padding, sizes))
    return tables


def _call(name: str, flat: Sequence[int], count: int, thresholds: Sequence[float]) -> None:
    if len(thresholds) != count:
        raise RuntimeError(f"expected {count} thresholds, one for each table, got {len(thresholds)}")
    call(name, count, words(flat), array("f", thresholds).tobytes())


def _flops(ids: Any, lefts: Any, rights: Any, *rest: Any) -> int:
    tables = zip(ids, lefts, rights, strict=True)
    every = [(n, _sizes(left, right)) for (n,), left, right in tables if right is not None]
    return sum(2 * n * sizes.x * sizes.y * sizes.rank for n, sizes in every)


@operation(_flops)
def pair_rows(
    ids: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    limits: Sequence[int],
    paddings: Sequence[int],
    thresholds: Sequence[float],
) -> list[Tensor]:
    """Rows L[i] R[k]ᵀ (N, X·Y) of the ids i · M_R + k of each table, then R (M, Y, R) of each that has a core.

    ids: (N,) int64. lefts: L (M, X, R), or a first core (1, M, X, R), or a dense table (M, X). rights: R (M, Y, R), or
    a core (R, M, N, S) with Y = N·S, or None of a dense table. gates: of a core (R,), or None; one at or below the
    table's threshold counts as 0. limits: rows of each table, M_L · M_R at most. paddings: the id whose row is zero and
    passes no gradient, or -1.
    Raises RuntimeError for operands that do not fit each other, or are not float32 on the CPU; ValueError for an id
    outside of its table.
    """
    tables = _tables(ids, lefts, rights, gates, limits, paddings)
    rows = [empty(*table.row) for table in tables]
    made = [empty(s.right_rows, s.y, s.rank) if table.of_core else None for table in tables for s in [table.sizes]]
    flat: list[int] = []
    for table, right, rows_ND in zip(tables, made, rows, strict=True):
        flat += table.words(table.right if right is None else right, rows_ND)
    _call("pair_rows", flat, len(tables), thresholds)
    return [*rows, *(right for right in made if right is not None)]


def _backward_flops(drows: Any, ids: Any, lefts: Any, rights: Any, made: Any, gates: Any, *rest: Any) -> int:
    wanted = rest[-1]
    each = zip(ids, lefts, rights, wanted[::3], wanted[1::3], wanted[2::3], strict=True)
    return sum((dl + (dr or dg)) * _flops([n], [left], [right]) for n, left, right, dl, dr, dg in each)


@operation(_backward_flops)
def pair_rows_backward(
    drows: Sequence[Tensor],
    ids: Sequence[Tensor],
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor | None],
    made: Sequence[Tensor | None],
    gates: Sequence[Tensor | None],
    limits: Sequence[int],
    paddings: Sequence[int],
    thresholds: Sequence[float],
    wanted: Sequence[bool],
) -> list[Tensor]:
    """Gradients from those of rows: of L, of R or its core, and of the gates, of each table those that are `wanted`.

    made: what `pair_rows` made of the cores, None of tables without one. wanted: three for each table.
    Raises as `pair_rows`.
    """
    tables = _tables(ids, lefts, rights, gates, limits, paddings)
    if len(wanted) != 3 * len(tables):
        raise RuntimeError(f"expected {3 * len(tables)} wanted, three for each table, got {len(wanted)}")
    flat: list[int] = []
    alive: list[Tensor] = []  # until the call
    found: list[Tensor] = []
    for k, (table, right, drows_ND) in enumerate(zip(tables, made, drows, strict=True)):
        wants_left, wants_right, wants_gates = wanted[3 * k : 3 * k + 3]
        sizes = table.sizes
        missing = (wants_gates and table.gates is None) or (wants_right and table.right is None)
        if (right is not None) is not table.of_core or missing:
            raise RuntimeError(
                "expected R beside a core only, and no gradient of gates or R that a table does not have"
            )
        drows_ND = strided("gradients of rows", drows_ND, *table.row)  # as those of stacked tables are
        right = table.right if right is None else checked("R", right, sizes.right_rows, sizes.y, sizes.rank)
        dleft = empty(*table.left.shape) if wants_left else None
        dright = empty(*table.right.shape) if table.right is not None and (wants_right or wants_gates) else None
        dgates = empty(sizes.rank) if wants_gates else None
        flat += table.words(right, drows_ND, (dleft, dright, dgates))
        alive += [each for each in (right, drows_ND, dright) if each is not None]
        found += [each for each in (dleft, dright if wants_right else None, dgates) if each is not None]
    _call("pair_rows_backward", flat, len(tables), thresholds)
    return found
