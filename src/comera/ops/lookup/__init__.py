"""Lookup in a tensor-train matrix: rows of an embedding table that is never formed, and their sums over bags.

    E[id] = L[id // M_R] · R[:, id % M_R]          (N_L × r) @ (r × N_R), docs/method.md §5

A call checks its ids and plans (plan.py); one backend, a kernel (kernel.py) or torch (rows.py), makes the rows, which
take the shape of the ids or are summed over bags.

Shapes: N ids, U different ids, B bags, V rows and D columns of a table.
"""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from comera.ops.lookup.plan import DenseTable, LookupTable, Table, plan_bags, plan_rows
from comera.ops.lookup.rows import rows_of, sums_of
from comera.ops.planner.plan import ContractionPlan
from comera.tt.spec import TTMSpec

__all__ = ["DenseTable", "LookupTable", "Table", "ttm_bag", "ttm_lookup", "ttm_lookups"]


def ttm_lookup(
    ids: Tensor,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    *,
    gates: Sequence[Tensor] | None = None,
    padding_idx: int | None = None,
    plan: ContractionPlan | None = None,
) -> Tensor:
    """Rows `ids` of the tensor-train matrix of `cores`, as `nn.Embedding` returns them.

    Args:
        ids: int32 or int64, any shape.
        spec: format of the table.
        cores: `order` tensors of `spec.core_shapes`.
        gates: `order - 1` vectors of `spec.inner_ranks`, pruned gates masked. Default: the cores have absorbed them.
        padding_idx: this row is exactly zero and gets no gradient; a negative index counts from the end.
        plan: a forced choice; by default `plan_lookup` for the number of different ids.

    Returns:
        (*ids.shape, embedding_dim) in the cores' dtype. Half-precision cores are multiplied in float32.

    Raises:
        IdError: an id outside the table. On an accelerator and under torch.compile this is a device-side assertion,
            which does not synchronize.
        TypeError: ids of another dtype.
        SpecError: cores or a padding_idx that do not fit `spec`.

    Source: [CoMERA] §4, docs/method.md §5.
    """
    return ttm_lookups([ids], [LookupTable(spec, cores, gates, padding_idx)], plan)[0]


def ttm_lookups(ids: Sequence[Tensor], tables: Sequence[Table], plan: ContractionPlan | None = None) -> list[Tensor]:
    """Rows of many tables: of each what `ttm_lookup` returns, to the bit, in one call of the kernel where it serves.

    Args:
        ids: int32 or int64, any shape; one tensor for each table.
        tables: in the order of the ids.
        plan: as in `ttm_lookup`, for all tables.

    Returns:
        (*ids.shape, embedding_dim) of each table, in the dtype of its cores.

    Raises:
        IdError, TypeError, SpecError: as `ttm_lookup`; an IdError names the table that has no such row.

    Source: docs/method.md §5.
    """
    lookups = [plan_rows(each, table, plan) for each, table in zip(ids, tables, strict=True)]
    found = []
    for rows_ND, each, table in zip(rows_of(lookups), ids, tables, strict=True):
        rows_ND = rows_ND.to(table.dtype)
        # without a view where they have their shape, which takes a node more
        found.append(rows_ND if each.dim() == 1 else rows_ND.view(*each.shape, rows_ND.shape[1]))
    return found


def ttm_bag(
    ids: Tensor,
    offsets: Tensor | None,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    *,
    mode: Literal["sum", "mean"],
    gates: Sequence[Tensor] | None = None,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    plan: ContractionPlan | None = None,
) -> Tensor:
    """Sums or means over bags of rows of the tensor-train matrix of `cores`, as `nn.EmbeddingBag` returns them.

    Args:
        ids: int32 or int64, (bags, ids per bag) without offsets, (all ids,) with them.
        offsets: (bags,), where each bag begins among the ids; with `include_last_offset` (bags + 1,), the last being
            the number of ids. An empty bag gives zeros.
        spec: format of the table.
        cores: as in `ttm_lookup`, like `gates` and `plan`.
        mode: "sum" or "mean".
        per_sample_weights: factors of the rows, of the ids' shape; only with mode "sum".
        padding_idx: sums and means skip the rows of this id; a negative index counts from the end.
        include_last_offset: whether the offsets end with the number of ids.

    Returns:
        (bags, embedding_dim) in the cores' dtype.

    Raises:
        ValueError: an unknown mode, or weights with a mean.
        DataError: offsets or weights that do not fit the ids; for values of offsets on an accelerator and under
            torch.compile a device-side assertion.
        IdError, TypeError, SpecError: as in `ttm_lookup`.

    Source: docs/method.md §5.
    """
    table = LookupTable(spec, cores, gates, padding_idx)
    lookup = plan_bags(ids, table, plan, offsets, mode, per_sample_weights, include_last_offset)
    return sums_of(lookup).to(cores[0].dtype)
