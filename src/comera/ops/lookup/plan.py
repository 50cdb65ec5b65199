"""Plans a lookup: checks the ids, and decides once how their rows are made.

Shapes: N ids, U different ids, B bags, W ids of each bag.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from comera.errors import DataError, IdError, SpecError
from comera.kernels import select
from comera.kernels.recording import fixed
from comera.kernels.tracing import jit_traced, traced, transformed, unrecorded_by_jit, untransformed
from comera.ops.dtypes import merge_dtype
from comera.ops.planner.groups import Groups
from comera.ops.planner.plan import ContractionPlan, choose
from comera.ops.planner.problem import LookupProblem
from comera.tt.dense import absorb, absorb_in_smaller
from comera.tt.spec import TTMSpec, check_cores

# Columns of a row up to which the C++ kernel makes it again for every use in no more time than it takes to find the
# different ones. 4,096 ids, forward and backward, two cores of an Intel Xeon with AVX-512: at 16 columns 1.3 times
# faster where all differ and as fast where a tenth does; at 64 columns 1.1 and 0.64 times.
REPEATED_COLUMNS = 32


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


class Bags(NamedTuple):
    """The bags of ids, and how their rows are reduced.

    starts: where each bag begins among the ids (B,), int64. ids: their number. weights: of the rows (N,), in the cores'
    `merge_dtype`. mean: whether sums are divided. shape: of ids (B, W), each row of which is a bag. of_one: whether
    each bag is known to have one id.
    """

    starts: Tensor
    ids: int
    weights: Tensor | None
    mean: bool
    shape: Sequence[int] | None = None
    of_one: bool = False


class Lookup(NamedTuple):
    """Ids of a table, and how their rows are made.

    given, ids: the ids as they came, and as (N,) int64. padding: the id whose row is zero. bags: over which rows are
    summed. different: the ids (U,) whose rows are made. place: which of these rows each id has (N,); None where each
    has its own. groups: of the table's cores; none of a dense table, nor where sizes and values are not known
    (`transformed`). cores: in their `merge_dtype`, with the gates absorbed except those `between` two groups, which the
    kernel reads. by_kernel: whether the C++ kernel makes the rows, and checks the ids.
    """

    table: Table
    given: Tensor
    ids: Tensor
    padding: int | None
    bags: Bags | None
    different: Tensor
    place: Tensor | None = None
    groups: Groups = ()
    cores: Sequence[Tensor] = ()
    between: Tensor | None = None
    by_kernel: bool = False


def on_host(device: torch.device) -> bool:
    """Whether values on a device can be read without synchronizing or breaking a graph."""
    return device.type == "cpu" and not traced()


def are_read(device: torch.device) -> bool:
    """Whether shapes and choices may depend on values: on a host, outside of a recording."""
    return not fixed() and on_host(device)


def masked(gates_R: Tensor, threshold: float) -> Tensor:
    """Gates, zero where they are at or below the threshold."""
    return gates_R if threshold == -inf else gates_R.masked_fill(gates_R <= threshold, 0.0)


def plan_rows(ids: Tensor, table: Table, plan: ContractionPlan | None) -> Lookup:
    """The lookup of rows. Raises as `ttm_lookups`."""
    unrecorded_by_jit(_check_table, ids, table)
    return _plan(ids, table, plan)


def plan_bags(
    ids: Tensor,
    table: LookupTable,
    plan: ContractionPlan | None,
    offsets: Tensor | None,
    mode: str,
    weights: Tensor | None,
    last: bool,
) -> Lookup:
    """The lookup of sums over bags that begin at the offsets, or with each row of ids (B, W). last: the offsets end
    with the number of ids. Raises as `ttm_bag`."""
    unrecorded_by_jit(_check_bags, ids, table, offsets, mode, weights, last)
    shape, of_one = None, False
    if offsets is None:
        shape, of_one = ids.shape, not jit_traced() and ids.shape[1] == 1
        starts_B = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    else:
        starts_B = (offsets[:-1] if last else offsets).long()
    weights_N = None if weights is None else weights.reshape(ids.numel()).to(merge_dtype(table.dtype))
    return _plan(ids, table, plan, Bags(starts_B, ids.numel(), weights_N, mode == "mean", shape, of_one))


def _plan(ids: Tensor, table: Table, plan: ContractionPlan | None, bags: Bags | None = None) -> Lookup:
    """Each different row is multiplied once, except narrow ones by the C++ kernel and those of a table of plain low
    rank: these are one product, and a library compiles products anew for numbers of rows that it has not met. The uses
    of rows that are summed are found where they are summed."""
    ids_N = different = ids.reshape(ids.numel()).long()
    padding = None if table.padding_idx is None else table.padding_idx % table.rows
    if isinstance(table, DenseTable):
        return Lookup(table, ids, ids_N, padding, bags, ids_N, by_kernel=True)
    spec, place_N, by_kernel, summed = table.spec, None, False, bags is not None and not bags.of_one
    groups: Groups = ()
    if not transformed():
        groups = _groups(ids_N, table, plan)
        if len(groups) > 1 and are_read(ids.device):
            repeats_pay = spec.padded_shape[1] <= REPEATED_COLUMNS and select.supports("lookup", *table.cores)
            repeats_pay |= spec.order == 2 and spec.row_modes[1] == 1
            if summed and plan is None:
                groups = _groups(torch.unique(ids_N), table, plan)
            elif not summed and not repeats_pay:
                different, place_N = torch.unique(ids_N, return_inverse=True)
                groups = _groups(different, table, plan)
                if len(groups) == 1:
                    different, place_N = ids_N, None
    cores = [core.to(merge_dtype(core.dtype)) for core in table.cores]
    gates, between = table.gates, None
    if len(groups) == 2 and not summed and on_host(ids.device):
        if gates is not None:
            between = gates[groups[0].end - 1].to(merge_dtype(table.dtype))
        by_kernel = kernel_serves(groups, cores, between)
    if gates is not None:
        kept = groups[0].end - 1 if by_kernel else None
        given = [None if k == kept else masked(d, table.threshold) for k, d in enumerate(gates)]
        # jit cannot compare sizes
        cores = absorb(cores, gates) if jit_traced() else absorb_in_smaller(cores, given)
    if not by_kernel:
        check_values(ids, table)
    return Lookup(table, ids, ids_N, padding, bags, different, place_N, groups, cores, between, by_kernel)


def kernel_serves(groups: Groups, cores: Sequence[Tensor], gates_R: Tensor | None = None) -> bool:
    """Whether the C++ kernel makes rows of two such groups on a host; not those of a table of plain low rank."""
    if all(cores[core].shape[1] == 1 for core in groups[1].cores):
        return False
    return select.supports("lookup", *cores, *([] if gates_R is None else [gates_R]))


def check_values(ids: Tensor, table: Table) -> None:
    """Raise IdError unless all ids are in the table; for ids on an accelerator it is asserted there, without
    synchronizing."""
    if transformed():
        unrecorded_by_jit(_check, untransformed(ids), table)
    elif are_read(ids.device):
        _check(ids, table)
    else:
        torch._assert_async(((ids >= 0) & (ids < table.rows)).all(), f"expected every id in 0 ... {table.rows - 1}")


def _check(ids: Tensor, table: Table) -> None:
    least, most = ids.aminmax() if ids.numel() else (0, 0)
    if least < 0 or most >= table.rows:
        position = ((ids < 0) | (ids >= table.rows)).nonzero()[0].tolist()
        raise IdError(
            f"expected every id in 0 ... {table.rows - 1} for {table.name} of {table.rows} rows, got "
            f"{int(ids[tuple(position)])} at position {position} of ids of shape {list(ids.shape)}: check the "
            "tokenizer or raise num_embeddings"
        )


def _check_table(ids: Tensor, table: Table) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected ids of dtype int32 or int64, got {ids.dtype}: convert them with ids.long()")
    rows, padding_idx = table.rows, table.padding_idx
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise SpecError(f"expected a padding_idx in {-rows} ... {rows - 1} for {rows} rows, got {padding_idx}")
    if isinstance(table, LookupTable):
        check_cores(table.spec, table.cores)


def _check_bags(
    ids: Tensor, table: LookupTable, offsets: Tensor | None, mode: str, weights: Tensor | None, last: bool
) -> None:
    if mode not in ("sum", "mean"):
        raise ValueError(f"expected mode 'sum' or 'mean', got {mode!r}: a maximum of rows needs the dense table")
    if weights is not None and mode != "sum":
        raise ValueError(f"per_sample_weights are for mode 'sum', got mode {mode!r}")
    if weights is not None and weights.shape != ids.shape:
        raise DataError(f"expected per_sample_weights of the ids' shape {list(ids.shape)}, got {list(weights.shape)}")
    if offsets is not None and ids.dim() == 1:
        _check_offsets(offsets, ids.numel(), last)
    elif offsets is not None or ids.dim() != 2:
        got = "no offsets" if offsets is None else f"offsets of shape {list(offsets.shape)}"
        raise DataError(
            f"expected ids (bags, ids in a bag) without offsets, or (all ids,) with offsets (bags,); got ids of shape "
            f"{list(ids.shape)} and {got}"
        )
    _check_table(ids, table)


def _check_offsets(offsets: Tensor, count: int, last: bool) -> None:
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected offsets of dtype int32 or int64, got {offsets.dtype}: convert them with .long()")
    if offsets.dim() != 1 or (last and not offsets.numel()):
        least = "(bags + 1,)" if last else "(bags,)"
        raise DataError(f"expected offsets of shape {least}, got {list(offsets.shape)}")
    tail = offsets[-1:]
    good = torch.cat([offsets[:1] == 0, tail == count if last else tail <= count, offsets[1:] >= offsets[:-1]]).all()
    ending = "end with" if last else "reach at most"
    expected = f"expected offsets that begin with 0, never decrease and {ending} {count}, the number of ids"
    if not are_read(offsets.device):
        torch._assert_async(good, expected)
    elif not good:
        shown = offsets.tolist() if offsets.numel() <= 8 else f"{offsets[:6].tolist()} ... {offsets[-2:].tolist()}"
        raise DataError(f"{expected}; got {shown}: each offset is where a bag begins among the ids")


def _groups(ids_U: Tensor, table: LookupTable, plan: ContractionPlan | None) -> Groups:
    """Groups of cores for as many different rows as there are ids."""
    return choose(LookupProblem, table.spec, ids_U.numel(), table.dtype.itemsize, ids_U.device.type, plan=plan)[1]
