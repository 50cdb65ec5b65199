"""Lookup in a tensor-train matrix: rows of an embedding table that is never formed, and their sums over bags.

    E[id] = L[id // M_R] · R[:, id % M_R]          (N_L × r) @ (r × N_R), docs/method.md §5

L and R are the merged left and right part of the cores or, for a table much larger than the batch, only those of their
rows that occur (lookup_rows.py). A small table is materialized. The plan decides by the number of different ids.

Shapes: N ids, U different ids, B bags, P ids besides the padding, V rows and D columns of the table, R the rank between
the two parts; L (M, X, r) and R (M, Y, r) as in lookup_rows.py.
"""

from collections.abc import Sequence
from math import inf
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.errors import IdError, SpecError
from comera.kernels import select
from comera.kernels.tracing import transformed, untransformed
from comera.ops.bags import bag_of_each, bag_starts, check_bags, ids_in_each
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.ops.lookup_cpp import PairTable, masked, pair_rows
from comera.ops.lookup_rows import are_read, by_pairs, left_and_right, on_host, pair_sums, pair_table, rows_of
from comera.ops.lookup_triton import triton_rows
from comera.ops.planner.groups import Groups
from comera.ops.planner.plan import ContractionPlan, choose
from comera.ops.planner.problem import LookupProblem
from comera.tt.dense import absorb_in_smaller, materialize
from comera.tt.spec import TTMSpec, check_cores

# Columns of a row up to which the C++ kernel makes it again for every use in no more time than it takes to find the
# different ones. 4,096 ids, forward and backward, two cores of an Intel Xeon with AVX-512: at 16 columns 1.3 times
# faster where all differ and as fast where a tenth does; at 64 columns 1.1 and 0.64 times.
REPEATED_COLUMNS = 32


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
    rows_ND = _rows([ids], [LookupTable(spec, cores, gates, padding_idx)], plan)[0]
    return _shaped(rows_ND, ids, cores[0].dtype)


class LookupTable(NamedTuple):
    """A table of `ttm_lookups`: spec, cores, gates and padding_idx as `ttm_lookup` takes them.

    threshold: gates at or below it count as 0. name: how an IdError calls the table.
    """

    spec: TTMSpec
    cores: Sequence[Tensor]
    gates: Sequence[Tensor] | None = None
    padding_idx: int | None = None
    threshold: float = -inf
    name: str = "a table"

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.spec.num_embeddings

    @property
    def dtype(self) -> torch.dtype:
        """Of the cores and of what is looked up."""
        return self.cores[0].dtype


class DenseTable(NamedTuple):
    """A table of `ttm_lookups` that is not compressed: weight (rows, columns), as the C++ kernel supports it.

    padding_idx: this row is exactly zero and gets no gradient. name: how an IdError calls the table.
    """

    weight: Tensor
    padding_idx: int | None = None
    name: str = "a table"

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight and of what is looked up."""
        return self.weight.dtype


Table = LookupTable | DenseTable


def ttm_lookups(ids: Sequence[Tensor], tables: Sequence[Table]) -> list[Tensor]:
    """Rows of many tables: of each what `ttm_lookup` returns, to the bit, in one call of the kernel where it serves.

    Args:
        ids: int32 or int64, any shape; one tensor for each table.
        tables: in the order of the ids.

    Returns:
        (*ids.shape, embedding_dim) of each table, in the dtype of its cores.

    Raises:
        IdError, TypeError, SpecError: as `ttm_lookup`; an IdError names the table that has no such row.

    Source: docs/method.md §5.
    """
    made = zip(_rows(ids, tables), ids, tables, strict=True)
    return [_shaped(rows_ND, each, table.dtype) for rows_ND, each, table in made]


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
    ids_N, pad = _checked(ids, table)
    check_cores(spec, cores)
    check_bags(ids, offsets, mode, per_sample_weights, include_last_offset)
    weights_N = per_sample_weights
    if weights_N is not None:
        weights_N = weights_N.reshape(ids.numel()).to(merge_dtype(cores[0].dtype))
    with without_autocast(cores[0]):
        if offsets is None and ids.shape[1] == 1:  # the sum or mean of one row is the row
            sums_BD = _rows([ids], [table], plan)[0]
            sums_BD = sums_BD if weights_N is None else sums_BD * weights_N.unsqueeze(1)
            return sums_BD.to(cores[0].dtype)
        _check_values(ids, table)
        merging, offsets_B = _merging(table), bag_starts(ids, offsets, include_last_offset)
        groups = _groups(ids_N, spec, cores[0], plan)
        if len(groups) > 1 and plan is None and are_read(ids_N):
            groups = _groups(torch.unique(ids_N), spec, cores[0], plan)
        if len(groups) == 1:
            table_VD = materialize(spec, merging)
            sums_BD = F.embedding_bag(
                ids_N, table_VD, offsets_B, mode="sum", per_sample_weights=weights_N, padding_idx=pad
            )
        else:
            bag_N = bag_of_each(ids_N.numel(), offsets_B)
            sums_BD = _sums(ids_N, bag_N, offsets_B.numel(), weights_N, pad, spec, merging, groups)
        if mode == "mean":
            sums_BD = sums_BD / ids_in_each(ids_N, offsets_B, pad).to(sums_BD.dtype).unsqueeze(1)
    return sums_BD.to(cores[0].dtype)


class _Uses(NamedTuple):
    """What there is to do for the ids (N,) of a table.

    different: the ids whose rows are made. place: which of these rows each id has; None where each has its own. groups:
    of the table's cores. pairs: the same for the C++ kernel; None where it does not serve.
    """

    ids: Tensor
    padding: int | None
    different: Tensor
    place: Tensor | None
    groups: Groups
    pairs: PairTable | None


def _rows(ids: Sequence[Tensor], tables: Sequence[Table], plan: ContractionPlan | None = None) -> list[Tensor]:
    """Rows (N, D) of each table in its cores' `merge_dtype`, in one call of the kernel for all that it serves."""
    uses = [_uses(each, table, plan) for each, table in zip(ids, tables, strict=True)]
    made = iter(_by_kernel(uses, ids, tables))
    return [_rows_of(use, table, next(made) if use.pairs else None) for use, table in zip(uses, tables, strict=True)]


def _by_kernel(uses: Sequence[_Uses], ids: Sequence[Tensor], tables: Sequence[Table]) -> list[Tensor]:
    """The rows of the tables that have pairs, unless the kernel refuses an id."""
    pairs = [use.pairs for use in uses if use.pairs is not None]
    try:
        return pair_rows(pairs) if pairs else []
    except ValueError as error:
        refused = error
    for each, table in zip(ids, tables, strict=True):
        _check_values(each, table)
    raise refused


def _uses(ids: Tensor, table: Table, plan: ContractionPlan | None) -> _Uses:
    """Each different row is multiplied once, except narrow ones by the C++ kernel and those of a table of plain low
    rank: these are one product, and a library compiles products anew for numbers of rows that it has not met."""
    ids_N, padding = _checked(ids, table)
    if isinstance(table, DenseTable):
        return _Uses(ids_N, padding, ids_N, None, (), PairTable(ids_N, table.weight, None, None, table.rows, padding))
    spec, cores = table.spec, table.cores
    check_cores(spec, cores)
    ids_U, place_N = ids_N, None
    groups = _groups(ids_N, spec, cores[0], plan)
    repeats_pay = spec.padded_shape[1] <= REPEATED_COLUMNS and select.supports("lookup", *cores)
    repeats_pay |= spec.order == 2 and spec.row_modes[1] == 1
    if len(groups) > 1 and are_read(ids_N) and not repeats_pay:
        ids_U, place_N = torch.unique(ids_N, return_inverse=True)
        groups = _groups(ids_U, spec, cores[0], plan)
    pairs = None
    between = groups[0].end - 1  # the gates that the kernel absorbs
    merge = merge_dtype(cores[0].dtype)
    gates_R = None if table.gates is None or len(groups) == 1 else table.gates[between].to(merge)
    if by_pairs(ids_U, groups, [core.to(merge) for core in cores], gates_R):
        with without_autocast(cores[0]):
            merging = _merging(table, but=between)
            pairs = pair_table(ids_U, groups, merging, spec.num_embeddings, gates_R, padding, table.threshold)
    else:
        _check_values(ids, table)
    return _Uses(ids_N, padding, ids_U, place_N, groups, pairs)


def _rows_of(uses: _Uses, table: Table, rows_UD: Tensor | None) -> Tensor:
    """The rows (N, D) of a table; rows_UD: those that the kernel has made."""
    if isinstance(table, DenseTable):
        assert rows_UD is not None
        return rows_UD
    ids_N, padding, ids_U, place_N, groups, _ = uses
    columns = table.spec.embedding_dim
    by_kernel = rows_UD is not None
    if rows_UD is None:
        with without_autocast(table.cores[0]):
            merging = _merging(table)
            if len(groups) == 1:
                rows_UD, place_N = F.embedding(ids_N, materialize(table.spec, merging)), None
            elif on_host(ids_N):
                rows_UD = rows_of(ids_U, groups, merging)
            else:
                bag_N = torch.arange(ids_N.numel(), device=ids_N.device)
                return _sums(ids_N, bag_N, ids_N.numel(), None, padding, table.spec, merging, groups)
    if rows_UD.shape[1] > columns:
        rows_UD = rows_UD[:, :columns]
    rows_ND = rows_UD if place_N is None else rows_UD.index_select(0, place_N)
    if padding is None or by_kernel:  # which has left it out
        return rows_ND
    return rows_ND.masked_fill((ids_N == padding).unsqueeze(1), 0)


def _shaped(rows_ND: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """A row for each id, in this dtype; without a view where they have their shape, which takes a node more."""
    rows_ND = rows_ND.to(dtype)
    return rows_ND if ids.dim() == 1 else rows_ND.reshape(*ids.shape, rows_ND.shape[1])


def _merging(table: LookupTable, but: int | None = None) -> list[Tensor]:
    """The cores in their `merge_dtype`, with all gates absorbed but those after the core `but`."""
    gates = [None if k == but else masked(gates_R, table.threshold) for k, gates_R in enumerate(table.gates or ())]
    return absorb_in_smaller([core.to(merge_dtype(core.dtype)) for core in table.cores], gates)


def _sums(
    ids_N: Tensor,
    bag_N: Tensor,
    bags: int,
    weights_N: Tensor | None,
    padding: int | None,
    spec: TTMSpec,
    cores: Sequence[Tensor],
    groups: Groups,
) -> Tensor:
    """Sums of rows over bags (bags, D) by two groups or more, all in the cores' `merge_dtype`."""
    if padding is not None and on_host(ids_N):
        kept_P = (ids_N != padding).nonzero().squeeze(1)
        ids_N, bag_N = ids_N[kept_P], bag_N[kept_P]
        weights_N = None if weights_N is None else weights_N[kept_P]
    elif padding is not None:
        counts_N = (ids_N != padding).to(cores[0].dtype)
        weights_N = counts_N if weights_N is None else weights_N * counts_N
    left_MXR, right_MYR, i_N, k_N = left_and_right(ids_N, groups, cores)
    if len(groups) == 2 and select.lookup_rows_backend(left_MXR, right_MYR.mT) == "triton":
        rows_ND = triton_rows(ids_N, left_MXR, right_MYR.mT.contiguous())
        rows_ND = rows_ND if weights_N is None else rows_ND * weights_N.unsqueeze(1)
        sums_BD = rows_ND.new_zeros(bags, rows_ND.shape[1]).index_add(0, bag_N, rows_ND)
    else:
        sums_BD = pair_sums(i_N, k_N, bag_N, bags, left_MXR, right_MYR, weights_N)
    return sums_BD[:, : spec.embedding_dim]


def _groups(ids_U: Tensor, spec: TTMSpec, core: Tensor, plan: ContractionPlan | None) -> Groups:
    """Groups of cores for as many different rows as there are ids."""
    return choose(LookupProblem, spec, ids_U.numel(), core.element_size(), ids_U.device.type, plan=plan)[1]


def _checked(ids: Tensor, table: Table) -> tuple[Tensor, int | None]:
    """The ids (N,) as int64, and `padding_idx` counted from the start.

    Raises unless padding and all ids are integers, the padding in the table.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected ids of dtype int32 or int64, got {ids.dtype}: convert them with ids.long()")
    rows, padding_idx = table.rows, table.padding_idx
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise SpecError(f"expected a padding_idx in {-rows} ... {rows - 1} for {rows} rows, got {padding_idx}")
    return ids.reshape(ids.numel()).long(), None if padding_idx is None else padding_idx % rows


def _check_values(ids: Tensor, table: Table) -> None:
    """Raise IdError unless all ids are in the table; for ids on an accelerator it is asserted there, without
    synchronizing."""
    rows = table.rows
    if transformed():
        ids = untransformed(ids)
    elif not are_read(ids):
        torch._assert_async(((ids >= 0) & (ids < rows)).all(), f"expected every id in 0 ... {rows - 1}")
        return
    least, most = ids.aminmax() if ids.numel() else (0, 0)
    if least < 0 or most >= rows:
        wrong = (ids < 0) | (ids >= rows)
        position = wrong.nonzero()[0].tolist()
        raise IdError(
            f"expected every id in 0 ... {rows - 1} for {table.name} of {rows} rows, got {int(ids[tuple(position)])} "
            f"at position {position} of ids of shape {list(ids.shape)}: check the tokenizer or raise num_embeddings"
        )
