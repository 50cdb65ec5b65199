"""What there is to do for the ids of a table: they are checked, and how their rows are made is decided here, once."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from comera.errors import IdError, SpecError
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


class Lookup(NamedTuple):
    """Ids (N,) of a table, and how their rows are made.

    padding: the id whose row is zero. different: the ids (U,) whose rows are made. place: which of these rows each id
    has (N,); None where each has its own. groups: of the table's cores; none of a dense table, nor where sizes and
    values are not known (`transformed`). by_kernel: whether the C++ kernel makes the rows, and checks the ids.
    """

    table: Table
    ids: Tensor
    padding: int | None
    different: Tensor
    place: Tensor | None = None
    groups: Groups = ()
    by_kernel: bool = False

    def merging(self) -> list[Tensor]:
        """The cores in their `merge_dtype`, with all gates absorbed, or all but those that the kernel reads."""
        assert isinstance(self.table, LookupTable)
        _, cores, gates, _, threshold, _ = self.table
        between = self.groups[0].end - 1 if self.by_kernel else None
        absorbed = [None if k == between else masked(d, threshold) for k, d in enumerate(gates or ())]
        wide = [core.to(merge_dtype(core.dtype)) for core in cores]
        if jit_traced():  # whose sizes cannot be compared
            return wide if gates is None else absorb(wide, gates)
        return absorb_in_smaller(wide, absorbed)

    def gates(self) -> Tensor | None:
        """The gates that the kernel reads: those between two groups."""
        assert isinstance(self.table, LookupTable)
        gates = self.table.gates
        return None if gates is None else gates[self.groups[0].end - 1].to(merge_dtype(self.table.dtype))

    def in_place(self, rows_UD: Tensor) -> Tensor:
        """The rows (N, D) of all ids, from those that were made."""
        if self.groups and isinstance(self.table, LookupTable) and rows_UD.shape[1] > self.table.spec.embedding_dim:
            rows_UD = rows_UD[:, : self.table.spec.embedding_dim]
        rows_ND = rows_UD if self.place is None else rows_UD.index_select(0, self.place)
        if self.padding is None or self.by_kernel:  # which has left it out
            return rows_ND
        return rows_ND.masked_fill((self.ids == self.padding).unsqueeze(1), 0)


def on_host(device: torch.device) -> bool:
    """Whether values on a device can be read without synchronizing or breaking a graph."""
    return device.type == "cpu" and not traced()


def are_read(device: torch.device) -> bool:
    """Whether shapes and choices may depend on values: on a host, outside of a recording."""
    return on_host(device) and not fixed()


def masked(gates_R: Tensor, threshold: float) -> Tensor:
    """Gates, zero where they are at or below the threshold."""
    return gates_R if threshold == -inf else gates_R.masked_fill(gates_R <= threshold, 0.0)


def plan_rows(ids: Tensor, table: Table, plan: ContractionPlan | None) -> Lookup:
    """Each different row is multiplied once, except narrow ones by the C++ kernel and those of a table of plain low
    rank: these are one product, and a library compiles products anew for numbers of rows that it has not met."""
    ids_N, padding = _checked(ids, table)
    if isinstance(table, DenseTable):
        return Lookup(table, ids_N, padding, ids_N, by_kernel=True)
    if transformed():
        check_values(ids, table)
        return Lookup(table, ids_N, padding, ids_N)
    spec, cores = table.spec, table.cores
    ids_U, place_N = ids_N, None
    groups = _groups(ids_N, table, plan)
    repeats_pay = spec.padded_shape[1] <= REPEATED_COLUMNS and select.supports("lookup", *cores)
    repeats_pay |= spec.order == 2 and spec.row_modes[1] == 1
    if len(groups) > 1 and are_read(ids.device) and not repeats_pay:
        ids_U, place_N = torch.unique(ids_N, return_inverse=True)
        groups = _groups(ids_U, table, plan)
    if len(groups) == 1:
        ids_U, place_N = ids_N, None
    lookup = Lookup(table, ids_N, padding, ids_U, place_N, groups)
    if len(groups) == 2 and on_host(ids.device):
        wide = [core.to(merge_dtype(core.dtype)) for core in cores]
        if kernel_serves(groups, wide, lookup.gates()):
            return lookup._replace(by_kernel=True)
    check_values(ids, table)
    return lookup


def plan_bags(ids: Tensor, table: LookupTable, plan: ContractionPlan | None) -> Lookup:
    """The uses of rows that are the same are found where they are summed."""
    ids_N, padding = _checked(ids, table)
    check_values(ids, table)
    groups: Groups = ()
    if not transformed():
        groups = _groups(ids_N, table, plan)
        if len(groups) > 1 and plan is None and are_read(ids.device):
            groups = _groups(torch.unique(ids_N), table, plan)
    return Lookup(table, ids_N, padding, ids_N, groups=groups)


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


def _checked(ids: Tensor, table: Table) -> tuple[Tensor, int | None]:
    """The ids (N,) as int64, and `padding_idx` counted from the start.

    Raises unless ids are integers, padding is in the table, and the cores fit it.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expected ids of dtype int32 or int64, got {ids.dtype}: convert them with ids.long()")
    rows, padding_idx = table.rows, table.padding_idx
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise SpecError(f"expected a padding_idx in {-rows} ... {rows - 1} for {rows} rows, got {padding_idx}")
    if isinstance(table, LookupTable):
        unrecorded_by_jit(check_cores, table.spec, table.cores)
    return ids.reshape(ids.numel()).long(), None if padding_idx is None else padding_idx % rows


def _groups(ids_U: Tensor, table: LookupTable, plan: ContractionPlan | None) -> Groups:
    """Groups of cores for as many different rows as there are ids."""
    return choose(LookupProblem, table.spec, ids_U.numel(), table.dtype.itemsize, ids_U.device.type, plan=plan)[1]
