"""Rows of a tensor-train matrix and their sums over bags, from rows of a left and a right part of its cores.

The plan cuts the cores into groups, each merged to a table of its own. One group is the whole table. Where a part of
the cores has more than one group, only those of its rows that occur among the ids are made, from the rows of its own
two parts:

    row(id) = L[i] R[k]ᵀ,   id = i · M_R + k,       sums[b] += w · row(id) for every use (id, b, w)

The C++ kernel makes rows where it serves (kernel.py); the rest is for torch. The product of a single pair (i, k) is too
small to run fast. A few thousand pairs are multiplied one by one, and their gradients summed by `embedding_bag`, in a
third of the time of `bmm`. More pairs, and sums, are sorted by k and put in blocks that share R[k]; the last slots of a
block may stay empty. R is stored with the rank last, so that no product of a block has a skinny result:

    forward   R[k] [L[i] ...]ᵀ  (Y × r)(r × nX)      backward   ∂L = ∂rows R[k]  (nX × Y)(Y × r)
                                                                ∂R = ∂rowsᵀ L    (Y × nX)(nX × r)

Blocks are multiplied in chunks that stay in the caches, forward and backward, and rows are never kept; saved for the
backward are L, R and the ids. Sorting the pairs needs the ids on the host, for which an accelerator would synchronize
and a compiled graph break: there every use is a block of its own, and all sizes are known beforehand.

Shapes: N uses, U ids, B bags, G blocks of n slots each, S slots, P pairs of a chunk, M rows of a table, R left and Q
right rank of a part, r the rank between two parts, X = R · columns of the left part, Y = columns · Q of the right part,
Z = n·X.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.tracing import jit_traced
from comera.ops.chunking import chunks
from comera.ops.dtypes import without_autocast
from comera.ops.lookup.kernel import PairTable, pair_rows, triton_rows
from comera.ops.lookup.plan import (
    Bags,
    DenseTable,
    Lookup,
    LookupTable,
    are_read,
    check_values,
    kernel_serves,
    masked,
    on_host,
)
from comera.ops.planner.groups import Group, Groups, two_parts
from comera.ops.projection import merge_sides
from comera.tt.dense import materialize
from comera.tt.spec import TTMSpec

BLOCK_ROWS = 128  # n·X at most: more make the products no faster
BLOCKS_FROM = 4096  # different pairs; sorting fewer takes longer than blocks gain
SMALL = 256  # X·Y up to which weighted sums of rows are faster than matrix products


def rows_of(lookups: Sequence[Lookup]) -> list[Tensor]:
    """Rows (N, D) of each lookup in its cores' `merge_dtype`, in one call of the kernel for all that it serves."""
    by_kernel = [_pair_table(lookup) for lookup in lookups if lookup.by_kernel]
    try:
        made = iter(pair_rows(by_kernel) if by_kernel else [])
    except ValueError as error:
        refused = error
    else:
        return [_in_place(lookup, next(made) if lookup.by_kernel else _rows_by_torch(lookup)) for lookup in lookups]
    for lookup in lookups:
        check_values(lookup.given, lookup.table)
    raise refused


def sums_of(lookup: Lookup) -> Tensor:
    """Sums or means of rows over bags (B, D), without those of the padding, in the cores' `merge_dtype`."""
    bags, ids_N, padding = lookup.bags, lookup.ids, lookup.padding
    assert bags is not None
    with without_autocast(lookup.cores[0]):
        if bags.of_one:  # whose sum and mean are its row
            return _weighted(rows_of([lookup])[0], bags.weights)
        sums_BD = _sums(lookup, bags)
        return sums_BD / _counts(bags, ids_N, padding).to(sums_BD.dtype).unsqueeze(1) if bags.mean else sums_BD


def _sums(lookup: Lookup, bags: Bags) -> Tensor:
    assert isinstance(lookup.table, LookupTable)
    spec, groups, cores = lookup.table.spec, lookup.groups, lookup.cores
    ids_N, padding, weights_N, count = lookup.ids, lookup.padding, bags.weights, bags.starts.numel()
    if not groups:
        rows_ND = _weighted(rows_of([lookup])[0], weights_N)
        if bags.shape is not None:
            return rows_ND.view(*bags.shape, rows_ND.shape[1]).sum(1)
        return rows_ND.new_zeros(count, rows_ND.shape[1]).index_add(0, _bag_of_each(bags), rows_ND)
    if len(groups) == 1:
        table_VD = materialize(spec, cores)
        return F.embedding_bag(
            ids_N, table_VD, bags.starts, mode="sum", per_sample_weights=weights_N, padding_idx=padding
        )
    bag_N = _bag_of_each(bags)
    if padding is not None and on_host(ids_N.device):
        kept_P = (ids_N != padding).nonzero().squeeze(1)
        ids_N, bag_N = ids_N[kept_P], bag_N[kept_P]
        weights_N = None if weights_N is None else weights_N[kept_P]
    elif padding is not None:
        counts_N = (ids_N != padding).to(cores[0].dtype)
        weights_N = counts_N if weights_N is None else weights_N * counts_N
    left_MXR, right_MYR, i_N, k_N = _sides(ids_N, groups, cores)
    if len(groups) == 2 and select.lookup_rows_backend(left_MXR, right_MYR.mT) == "triton":
        rows_ND = _weighted(triton_rows(ids_N, left_MXR, right_MYR.mT.contiguous()), weights_N)
        sums_BD = rows_ND.new_zeros(count, rows_ND.shape[1]).index_add(0, bag_N, rows_ND)
    else:
        sums_BD = pair_sums(i_N, k_N, bag_N, count, left_MXR, right_MYR, weights_N)
    return sums_BD[:, : spec.embedding_dim]


def _pair_table(lookup: Lookup) -> PairTable:
    """The operands of the kernel for the rows of a `by_kernel` lookup."""
    table = lookup.table
    if isinstance(table, DenseTable):
        return PairTable(lookup.ids, table.weight, None, None, table.rows, lookup.padding)
    with without_autocast(table.cores[0]):
        sides = _stored_sides(lookup.groups, lookup.cores, lookup.between, table.threshold)
    return PairTable(lookup.different, *sides, table.rows, lookup.padding, table.threshold)


def _rows_by_torch(lookup: Lookup) -> Tensor:
    """Rows (U, D or more) of the different ids of a lookup; that of the padding, too."""
    assert isinstance(lookup.table, LookupTable)
    spec, groups, cores = lookup.table.spec, lookup.groups, lookup.cores
    with without_autocast(cores[0]):
        if not groups:
            return _unplanned_rows(lookup.different, spec, cores)
        if len(groups) == 1:
            return F.embedding(lookup.different, materialize(spec, cores))
        return _rows(lookup.different, groups, cores)


def _in_place(lookup: Lookup, rows_UD: Tensor) -> Tensor:
    """The rows (N, D) of all ids, from those that were made."""
    if lookup.groups and isinstance(lookup.table, LookupTable) and rows_UD.shape[1] > lookup.table.spec.embedding_dim:
        rows_UD = rows_UD[:, : lookup.table.spec.embedding_dim]
    rows_ND = rows_UD if lookup.place is None else rows_UD.index_select(0, lookup.place)
    if lookup.padding is None or lookup.by_kernel:  # which has left it out
        return rows_ND
    return rows_ND.masked_fill((lookup.ids == lookup.padding).unsqueeze(1), 0)


def _bag_of_each(bags: Bags) -> Tensor:
    """The bag (N,) of each id."""
    places_B = torch.arange(bags.starts.numel(), device=bags.starts.device)
    return places_B.repeat_interleave(_sizes(bags), output_size=None if jit_traced() else bags.ids)


def _counts(bags: Bags, ids_N: Tensor, padding: int | None) -> Tensor:
    """The number of ids (B,) in each bag that are not `padding`; 1 for a bag without any, whose mean is zero."""
    if padding is None:
        return _sizes(bags).clamp(min=1)
    kept_N = (ids_N != padding).long()
    if jit_traced() and bags.shape is not None:
        return kept_N.view(bags.shape).sum(1).clamp(min=1)
    return torch.zeros_like(bags.starts).index_add(0, _bag_of_each(bags), kept_N).clamp(min=1)


def _sizes(bags: Bags) -> Tensor:
    ends = torch.cat([bags.starts, bags.starts.new_full((1,), bags.ids)])
    return ends[1:] - ends[:-1]


def _weighted(rows_ND: Tensor, weights_N: Tensor | None) -> Tensor:
    return rows_ND if weights_N is None else rows_ND * weights_N.unsqueeze(1)


def _unplanned_rows(ids_N: Tensor, spec: TTMSpec, cores: Sequence[Tensor]) -> Tensor:
    """Rows (N, D) by plain products, for any number of ids; one outside of the table is an error when it is met."""
    if spec.order == 1:
        return F.embedding(ids_N, materialize(spec, cores))
    modes = [rows * cols for rows, cols in zip(spec.row_modes, spec.col_modes, strict=True)]
    sizes = [spec.ranks[k] * (prod(modes[:k]) + prod(modes[k:])) for k in range(1, spec.order)]
    split = 1 + sizes.index(min(sizes))
    left_MNR, right_RMN = merge_sides(cores, split)
    rows, all_rows = prod(spec.row_modes[split:]), prod(spec.row_modes)
    ids_N = torch.where((ids_N >= 0) & (ids_N < spec.num_embeddings), ids_N, all_rows)  # no padding row
    rows_NLR = torch.bmm(left_MNR[ids_N // rows], right_RMN.transpose(0, 1)[ids_N % rows])
    return rows_NLR.flatten(1)[:, : spec.embedding_dim]


def _rows(ids_U: Tensor, groups: Groups, cores: Sequence[Tensor]) -> Tensor:
    """Rows (U, D) by two groups or more. Ids that repeat are multiplied as often as they do."""
    host = on_host(ids_U.device)
    if host and len(groups) == 2 and kernel_serves(groups, cores):
        limit = prod([cores[core].shape[1] for group in groups for core in group.cores])
        return pair_rows([PairTable(ids_U, *_stored_sides(groups, cores), limit)])[0]
    left_MXR, right_MYR, i_U, k_U = _sides(ids_U, groups, cores)
    count, columns, rows = ids_U.numel(), left_MXR.shape[1], right_MYR.shape[0]
    if rows == 1:  # a table of plain low rank: every row meets the same block
        x_ZR = F.embedding(i_U, left_MXR.flatten(1)).view(count * columns, left_MXR.shape[2])
        return (x_ZR @ right_MYR[0].t()).view(count, columns * right_MYR.shape[1])
    if host and select.supports("lookup", left_MXR, right_MYR):
        return pair_rows([PairTable(i_U * rows + k_U, left_MXR, right_MYR, None, left_MXR.shape[0] * rows)])[0]
    if host and (count < BLOCKS_FROM or block_size(count, min(count, rows), columns) <= 1):
        return separate_rows(i_U, k_U, left_MXR, right_MYR)
    if len(groups) == 2 and select.lookup_rows_backend(left_MXR, right_MYR.mT) == "triton":
        return triton_rows(ids_U, left_MXR, right_MYR.mT.contiguous())
    return pair_sums(i_U, k_U, torch.arange(count, device=ids_U.device), count, left_MXR, right_MYR)


def _stored_sides(
    groups: Groups, cores: Sequence[Tensor], gates_R: Tensor | None = None, threshold: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """L, R and the gates between them as the kernel reads them: single cores as they are stored."""
    left, right = groups
    first, second = cores[left.first], cores[right.first]
    if left.pair is not None or first.shape[0] != 1:
        first = _flat(_merge(left, cores).transpose(1, 2))
    if right.pair is not None:
        second = _flat(_merge(right, cores).mT)
        if gates_R is not None:
            second, gates_R = second * masked(gates_R, threshold), None
    return first, second, gates_R


def _sides(ids_N: Tensor, groups: Groups, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L (M, X, r), R (M, Y, r), and for each id its row i (N,) of L and k (N,) of R; for two groups or more."""
    left, right = two_parts(groups)
    rows = prod([cores[core].shape[1] for core in range(right[0].first, right[-1].end)])
    left_MNRS, i_N = _part(ids_N // rows, left, cores)
    left_MXR = _flat(left_MNRS.transpose(1, 2))
    if on_host(ids_N.device) and len(right) == 1 and right[0].pair is None:
        return left_MXR, _rank_last(cores[right[0].first]), i_N, ids_N % rows
    right_MNSQ, k_N = _part(ids_N % rows, right, cores)
    return left_MXR, _flat(right_MNSQ.mT), i_N, k_N


def _part(ids_N: Tensor, groups: Groups, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A part of the cores as (M, N, R, Q), all rows or only those that occur, and for each id its row there."""
    if len(groups) == 1:
        return _merge(groups[0], cores), ids_N
    if are_read(ids_N.device):
        ids_U, row_N = torch.unique(ids_N, return_inverse=True)
    else:
        ids_U, row_N = ids_N, torch.arange(ids_N.numel(), device=ids_N.device)
    part = cores[groups[0].first : groups[-1].end]
    shape = ids_U.numel(), part[0].shape[0], prod([core.shape[2] for core in part]), part[-1].shape[3]
    return _rows(ids_U, groups, cores).view(shape).transpose(1, 2), row_N


def _rank_last(core_RMNS: Tensor) -> Tensor:
    """A single core with its left rank last (M, N·S, R). By a product, which transposes it back in the backward too:
    torch makes transposed copies on one thread, several times slower."""
    rank, m, n, s = core_RMNS.shape
    return (core_RMNS.reshape(rank, m * n * s).t() @ torch.eye(rank, dtype=core_RMNS.dtype)).view(m, n * s, rank)


def _flat(part_MXYR: Tensor) -> Tensor:
    m, x, y, r = part_MXYR.shape
    return part_MXYR.reshape(m, x * y, r)


def _merge(group: Group, cores: Sequence[Tensor]) -> Tensor:
    """Product of the cores (R, M, N, S) of a group as (M, N, R, S), row and column modes apart; differentiable."""
    if group.pair is None:
        return _modes_first(cores[group.first])
    left_MNRK, right_MNKS = _merge(group.pair[0], cores), _merge(group.pair[1], cores)
    (rows, cols, r, k), (m, n, _, s) = left_MNRK.shape, right_MNKS.shape
    if s == 1:  # the right one first: then r, or the modes, stay contiguous when the modes are permuted
        product = right_MNKS.reshape(m * n, k) @ left_MNRK.permute(3, 0, 1, 2).reshape(k, rows * cols * r)
        return product.view(m, n, rows, cols, r).permute(2, 0, 3, 1, 4).reshape(rows * m, cols * n, r, 1)
    product = left_MNRK.reshape(rows * cols * r, k) @ right_MNKS.permute(2, 0, 1, 3).reshape(k, m * n * s)
    ordered = product.view(rows, cols, r, m, n, s).permute(0, 3, 1, 4, 2, 5)
    return ordered.reshape(rows * m, cols * n, r, s)


def _modes_first(core_RMNS: Tensor) -> Tensor:
    """A core as (M, N, R, S). Dimensions of one leave before the others move and come back after: else the gradient
    would have other strides there than the core, of which DistributedDataParallel warns."""
    order = (1, 2, 0, 3)
    ones = [d for d in range(4) if core_RMNS.shape[d] == 1]
    kept = [d for d in range(4) if d not in ones]
    moved = core_RMNS.squeeze(ones).permute([kept.index(d) for d in order if d in kept])
    for place in sorted(order.index(d) for d in ones):
        moved = moved.unsqueeze(place)
    return moved


def separate_rows(i_U: Tensor, k_U: Tensor, left_MXR: Tensor, right_MYR: Tensor) -> Tensor:
    """Rows (U, X·Y) of the pairs (i, k); differentiable twice."""
    rows: Tensor = _SeparateRows.apply(left_MXR.contiguous(), right_MYR.contiguous(), i_U, k_U)
    return rows


class _SeparateRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left_MXR: Tensor, right_MYR: Tensor, i_U: Tensor, k_U: Tensor) -> Tensor:
        ctx.save_for_backward(left_MXR, right_MYR, i_U, k_U)
        (_, x, rank), y = left_MXR.shape, right_MYR.shape[1]
        rows = [left_MXR.new_empty(0, x * y)]
        for part in _pair_chunks(i_U, x, y, rank):
            left_PXR, right_PYR = left_MXR.index_select(0, i_U[part]), right_MYR.index_select(0, k_U[part])
            rows.append(torch.bmm(left_PXR, right_PYR.mT).flatten(1))
        return rows[1] if len(rows) == 2 else torch.cat(rows)

    @staticmethod
    def backward(ctx: Any, drows_UD: Tensor) -> tuple[Tensor | None, ...]:
        left_MXR, right_MYR, i_U, k_U = ctx.saved_tensors
        if not torch.is_grad_enabled():  # embedding_bag over a parameter would prepare for a gradient
            left_MXR, right_MYR = left_MXR.detach(), right_MYR.detach()
        (_, x, rank), y = left_MXR.shape, right_MYR.shape[1]
        dleft_MXR, dright_MYR = left_MXR.new_zeros(left_MXR.shape), right_MYR.new_zeros(right_MYR.shape)
        transposed_D = torch.arange(x * y).view(x, y).t().reshape(-1)
        with without_autocast(drows_UD):
            for part in _pair_chunks(i_U, x, y, rank):
                i_P, k_P, drows_PD = i_U[part], k_U[part], drows_UD[part]
                dleft_MXR.index_add_(0, i_P, _products(drows_PD, x, right_MYR, k_P))
                drows_PD = drows_PD.index_select(1, transposed_D)  # faster than transposing many small matrices
                dright_MYR.index_add_(0, k_P, _products(drows_PD, y, left_MXR, i_P))
        return dleft_MXR, dright_MYR, None, None


def _pair_chunks(i_U: Tensor, x: int, y: int, rank: int) -> list[slice]:
    """Chunks of the pairs that stay in the caches."""
    return chunks(i_U.numel(), 2 * rank * (x + y) + x * y, i_U.device)


def _products(a_UD: Tensor, x: int, table_MYR: Tensor, k_U: Tensor) -> Tensor:
    """a table[k] (U, X, R) for each of many small matrices a (X, Y), given as (U, X·Y)."""
    pairs, (m, y, rank) = a_UD.shape[0], table_MYR.shape
    if x * y > SMALL or not (pairs and x and y and rank):
        return torch.bmm(a_UD.reshape(pairs, x, y), table_MYR.index_select(0, k_U))
    ids_UD = torch.add(torch.arange(x * y) % y, k_U.unsqueeze(1), alpha=y)
    starts, weights_K, table_KR = torch.arange(0, pairs * x * y, y), a_UD.reshape(-1), table_MYR.view(m * y, rank)
    sums_KR = F.embedding_bag(ids_UD.view(-1), table_KR, starts, mode="sum", per_sample_weights=weights_K)
    return sums_KR.view(pairs, x, rank)


class _Blocks(NamedTuple):
    """Which pairs share a block, and where their rows go. Uses come in the order of the slots.

    left: row of L for each slot (S,). right: row of R for each block (G,). bag: bag of each use (N,).
    slot, first: slot of each use (N,); first use of each slot and the end (S + 1,). Both None where the n-th use has
    the n-th slot.
    """

    left: Tensor
    right: Tensor
    bag: Tensor
    slot: Tensor | None
    first: Tensor | None


def pair_sums(
    i_N: Tensor,
    k_N: Tensor,
    bag_N: Tensor,
    bags: int,
    left_MXR: Tensor,
    right_MYR: Tensor,
    weights_N: Tensor | None = None,
) -> Tensor:
    """sums[b] = Σ w · L[i] R[k]ᵀ (bags, X·Y) over the uses (i, k, w) with the bag b; differentiable twice."""
    blocks = _Blocks(i_N, k_N, bag_N, None, None)
    if on_host(i_N.device):
        blocks, order_N = _sorted_blocks(i_N, k_N, bag_N, left_MXR)
        weights_N = None if weights_N is None else weights_N[order_N]
    sums: Tensor = _PairSums.apply(bags, left_MXR, right_MYR, weights_N, *blocks)
    return sums


def _sorted_blocks(i_N: Tensor, k_N: Tensor, bag_N: Tensor, left_MXR: Tensor) -> tuple[_Blocks, Tensor]:
    """The different pairs sorted by k, in blocks that share k, and the matching order of the uses."""
    rows, columns = max(1, left_MXR.shape[0]), left_MXR.shape[1]
    pairs_N, order_N = torch.sort(k_N * rows + i_N)
    pairs_U, pair_N, uses_U = torch.unique_consecutive(pairs_N, return_inverse=True, return_counts=True)
    i_U, k_U = pairs_U % rows, pairs_U // rows
    k_K, which_U, size_K = torch.unique_consecutive(k_U, return_inverse=True, return_counts=True)
    slots = block_size(k_U.numel(), k_K.numel(), columns)
    blocks_K = (size_K + slots - 1) // slots
    empty_K = blocks_K * slots - size_K  # slots at the end of the last block of each k
    slot_U = torch.arange(k_U.numel()) + (empty_K.cumsum(0) - empty_K)[which_U]
    k_G = k_K.repeat_interleave(blocks_K)
    size = k_G.numel() * slots
    first_S = i_U.new_zeros(size + 1).index_copy_(0, slot_U + 1, uses_U).cumsum(0)
    i_S = i_U.new_zeros(size).index_copy_(0, slot_U, i_U)
    return _Blocks(i_S, k_G, bag_N[order_N], slot_U[pair_N], first_S), order_N


def block_size(pairs: int, different: int, columns: int) -> int:
    """Slots per block for `pairs` pairs with `different` different k and `columns` X: so few that most are filled."""
    return max(1, min(BLOCK_ROWS // max(1, columns), pairs // (2 * max(1, different))))


class _PairSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bags: int, left_MXR: Tensor, right_MYR: Tensor, weights_N: Tensor | None, *blocks: Tensor
    ) -> Tensor:
        ctx.save_for_backward(left_MXR, right_MYR, weights_N, *blocks)
        products = _BlockProducts(left_MXR, right_MYR, weights_N, _Blocks(*blocks))
        sums_BD = left_MXR.new_zeros(bags, left_MXR.shape[1] * right_MYR.shape[1])
        for chunk in products.chunks:
            rows_ND = _weighted(products.rows(chunk), None if weights_N is None else weights_N[chunk.uses])
            sums_BD.index_add_(0, products.blocks.bag[chunk.uses], rows_ND)
        return sums_BD

    @staticmethod
    def backward(ctx: Any, dsums_BD: Tensor) -> tuple[Tensor | None, ...]:
        left_MXR, right_MYR, weights_N, *blocks = ctx.saved_tensors
        products = _BlockProducts(left_MXR, right_MYR, weights_N, _Blocks(*blocks))
        # contiguous, whatever the strides of L and R: flatten must give views, or the sums go into a copy
        dleft_MXR, dright_MYR = left_MXR.new_zeros(left_MXR.shape), right_MYR.new_zeros(right_MYR.shape)
        wants_weights = ctx.needs_input_grad[3]
        dweights = [weights_N[:0]] if wants_weights else []
        with without_autocast(dsums_BD):
            dsums_BD = dsums_BD.contiguous()
            for chunk in products.chunks:
                if wants_weights:
                    rows_ND = products.rows(chunk)
                    dweights.append((rows_ND * dsums_BD[products.blocks.bag[chunk.uses]]).sum(1))
                products.add_gradients(chunk, dsums_BD, dleft_MXR, dright_MYR)
        return None, dleft_MXR, dright_MYR, torch.cat(dweights) if wants_weights else None, *[None] * len(blocks)


class _Chunk(NamedTuple):
    """Some blocks, with their slots and uses."""

    blocks: slice
    slots: slice
    uses: slice


class _BlockProducts:
    """The products of `_PairSums`, chunk by chunk.

    On a CPU every chunk is written to the same memory: fresh pages would cost several times the gathering itself.
    """

    def __init__(self, left_MXR: Tensor, right_MYR: Tensor, weights_N: Tensor | None, blocks: _Blocks) -> None:
        (_, self.x, self.rank), (_, self.y, _) = left_MXR.shape, right_MYR.shape
        self.left_MK, self.right_MK = left_MXR.flatten(1), right_MYR.flatten(1)
        self.weights_N, self.blocks = weights_N, blocks
        count = blocks.right.numel()
        self.n = blocks.left.numel() // max(1, count)
        elements = self.n * self.x * (self.rank + self.y) + self.y * self.rank
        self.chunks = [self._chunk(part) for part in chunks(count, elements, blocks.right.device)]
        self._reuses = on_host(blocks.right.device) and not torch.is_grad_enabled()
        self._memory: dict[str, Tensor] = {}

    def _chunk(self, part: slice) -> _Chunk:
        slots, first_S = slice(part.start * self.n, part.stop * self.n), self.blocks.first
        uses = slots if first_S is None else slice(int(first_S[slots.start]), int(first_S[slots.stop]))
        return _Chunk(part, slots, uses)

    def rows(self, chunk: _Chunk) -> Tensor:
        """The rows (N, X·Y) of the uses of a chunk."""
        left_GZR, right_GYR = self._operands(chunk)
        count, n, x, y = left_GZR.shape[0], self.n, self.x, self.y
        if n == 1:
            rows_SD = torch.bmm(left_GZR, right_GYR.mT, out=self._out("rows", count, x, y)).view(count, x * y)
        else:
            rows_GYZ = torch.bmm(right_GYR, left_GZR.mT, out=self._out("rows", count, y, n * x))
            rows_SD = rows_GYZ.view(count, y, n, x).permute(0, 2, 3, 1).reshape(count * n, x * y)
        if self.blocks.slot is None:
            return rows_SD
        return rows_SD.index_select(0, self.blocks.slot[chunk.uses] - chunk.slots.start)

    def add_gradients(self, chunk: _Chunk, dsums_BD: Tensor, dleft_MXR: Tensor, dright_MYR: Tensor) -> None:
        """Add what a chunk contributes to the gradients of L and R."""
        left_GZR, right_GYR = self._operands(chunk)
        drows_GZY = self._drows(chunk, dsums_BD).view(*left_GZR.shape[:2], self.y)
        dleft_GZR = torch.bmm(drows_GZY, right_GYR, out=self._out("dleft", *left_GZR.shape))
        dright_GYR = torch.bmm(drows_GZY.mT, left_GZR, out=self._out("dright", *right_GYR.shape))
        i_S, k_G = self.blocks.left[chunk.slots], self.blocks.right[chunk.blocks]
        dleft_MXR.flatten(1).index_add_(0, i_S, dleft_GZR.view(i_S.numel(), self.left_MK.shape[1]))
        dright_MYR.flatten(1).index_add_(0, k_G, dright_GYR.flatten(1))

    def _drows(self, chunk: _Chunk, dsums_BD: Tensor) -> Tensor:
        """Gradients (S, X·Y) of the rows in a chunk's slots: summed over the uses of a slot, zero in empty slots."""
        bag_N = self.blocks.bag[chunk.uses]
        weights_N = None if self.weights_N is None else self.weights_N[chunk.uses]
        if self.blocks.first is not None:
            first_S = self.blocks.first[chunk.slots] - chunk.uses.start
            return F.embedding_bag(bag_N, dsums_BD, first_S, mode="sum", per_sample_weights=weights_N)
        return _weighted(dsums_BD.index_select(0, bag_N), weights_N)

    def _operands(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        """L (G, n·X, r) and R (G, Y, r) of a chunk."""
        i_S, k_G = self.blocks.left[chunk.slots], self.blocks.right[chunk.blocks]
        left = torch.index_select(self.left_MK, 0, i_S, out=self._out("left", i_S.numel(), self.left_MK.shape[1]))
        right = torch.index_select(self.right_MK, 0, k_G, out=self._out("right", k_G.numel(), self.right_MK.shape[1]))
        return left.view(k_G.numel(), self.n * self.x, self.rank), right.view(k_G.numel(), self.y, self.rank)

    def _out(self, name: str, *shape: int) -> Tensor | None:
        """Memory of the previous chunk, or None for memory of its own."""
        if not self._reuses:
            return None
        if name not in self._memory:  # the first chunk is the largest
            self._memory[name] = self.left_MK.new_empty(prod(shape))
        return self._memory[name][: prod(shape)].view(shape)
