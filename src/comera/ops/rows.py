"""Sums over bags of rows of a chain: pairs of rows of its left and right part, multiplied in blocks.

The chain is cut into groups of cores (plan.py), each merged to a table of its own; where a part of the chain has more
than one, only those of its rows that occur among the ids are made, from the rows of its own two parts:

    row(id) = L[i] R[k]ᵀ,   id = i · M_R + k,       sums[b] += w · row(id) for every use (id, b, w)

The product of one pair is too small to run fast: different pairs are ordered by k and put in blocks that share R[k],
whose last slots may be empty. R is stored with the rank last, for then no product of a block has a narrow result:

    forward   R[k] [L[i] ...]ᵀ  (Y × r)(r × nX)      backward   ∂L = ∂rows R[k]  (nX × Y)(Y × r)
                                                                ∂R = ∂rowsᵀ L    (Y × nX)(nX × r)

Blocks go through in pieces that stay in the caches, forward and backward, and rows are never held; kept are L, R and
the ids. Putting pairs in order takes a look at the ids on the host, for which an accelerator would have to wait and
a compiled graph to break: there every use is a block of its own, and all sizes are known beforehand.

Shapes: N uses, B bags, G blocks of n slots each, S slots, M rows of a table, R left and Q right rank of a part, r the
rank between two parts, X = R · columns of the left one, Y = columns · Q of the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.ops.chunking import chunks
from comera.ops.dtypes import without_autocast
from comera.ops.pairs import pair_rows
from comera.ops.sequential import Groups, Tree, leaves

BLOCK_ROWS = 128  # n·X at most: more make the products no faster
BLOCKS_FROM = 4096  # different pairs; to order fewer takes longer than blocks gain


def on_host(ids: Tensor) -> bool:
    """Whether a look at the values of `ids` on the host makes nothing wait and breaks no graph."""
    return ids.device.type == "cpu" and not torch.compiler.is_compiling()


def cut(groups: Groups) -> int:
    """How many of the groups make the left part of a chain: those that leave the two parts most equal."""
    sizes = [len(leaves(tree)) for tree in groups]
    return min(range(1, len(groups)), key=lambda k: abs(sum(sizes[:k]) - sum(sizes[k:])))


def parts(
    ids_N: Tensor, groups: Groups, cores: Sequence[Tensor], bond_R: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """L (M, X, r), R (M, Y, r) and the row (N,) of each that an id names, for a chain of two groups or more.

    bond_R: rank parameters between the two parts, which R absorbs; ones if left out.
    """
    k = cut(groups)
    rows = prod([cores[core].shape[1] for tree in groups[k:] for core in leaves(tree)])
    left_MNRS, i_N = _part(ids_N // rows, groups[:k], cores)
    left_MXR = _flat(left_MNRS.transpose(1, 2))
    if on_host(ids_N) and isinstance(groups[k], int) and k + 1 == len(groups):
        return left_MXR, _turned(cores[groups[k]], bond_R), i_N, ids_N % rows
    right_MNSQ, k_N = _part(ids_N % rows, groups[k:], cores)
    right_MYR = _flat(right_MNSQ.mT)
    return left_MXR, right_MYR if bond_R is None else right_MYR * bond_R, i_N, k_N


def _turned(core_RMNS: Tensor, bond_R: Tensor | None) -> Tensor:
    """A single core with its left rank last (M, N·S, R). As a product, which turns it back in the backward too: torch
    makes transposed copies on one thread, several times slower."""
    rank, m, n, s = core_RMNS.shape
    scale_RR = torch.eye(rank, dtype=core_RMNS.dtype) if bond_R is None else torch.diag(bond_R)
    return (core_RMNS.reshape(rank, m * n * s).t() @ scale_RR).view(m, n * s, rank)


def rows_of(ids_U: Tensor, groups: Groups, cores: Sequence[Tensor], bond_R: Tensor | None = None) -> Tensor:
    """Rows (U, D) of a chain of two groups or more for ids that, on the host, all differ.

    bond_R: rank parameters of the bond at which the chain is cut, ones if left out.
    """
    left_MXR, right_MYR, i_U, k_U = parts(ids_U, groups, cores, bond_R)
    count, columns = ids_U.numel(), left_MXR.shape[1]
    shares = count >= BLOCKS_FROM and block_size(count, min(count, right_MYR.shape[0]), columns) > 1
    if on_host(ids_U) and not shares:
        return pair_rows(i_U, k_U, left_MXR, right_MYR)
    return pair_sums(i_U, k_U, torch.arange(count, device=ids_U.device), count, left_MXR, right_MYR)


def _flat(part_MXYR: Tensor) -> Tensor:
    m, x, y, r = part_MXYR.shape
    return part_MXYR.reshape(m, x * y, r)


def _part(ids_N: Tensor, groups: Groups, cores: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A part of the chain (M, N, R, Q), whole or the rows that occur, and the row of it that each id names."""
    if len(groups) == 1:
        return _merge(groups[0], cores), ids_N
    if on_host(ids_N):
        ids_U, row_N = torch.unique(ids_N, return_inverse=True)
    else:
        ids_U, row_N = ids_N, torch.arange(ids_N.numel(), device=ids_N.device)
    rows_UD = rows_of(ids_U, groups, cores)
    first, last = cores[leaves(groups[0])[0]].shape[0], cores[leaves(groups[-1])[-1]].shape[3]
    cols = prod([cores[core].shape[2] for tree in groups for core in leaves(tree)])
    return rows_UD.view(ids_U.numel(), first, cols, last).transpose(1, 2), row_N


def _merge(tree: Tree, cores: Sequence[Tensor]) -> Tensor:
    """Product of the cores (R, M, N, S) of a tree as (M, N, R, S), row and column modes apart; differentiable."""
    if isinstance(tree, int):
        return cores[tree].permute(1, 2, 0, 3)
    left_MNRK, right_MNKS = _merge(tree[0], cores), _merge(tree[1], cores)
    (rows, cols, r, k), (m, n, _, s) = left_MNRK.shape, right_MNKS.shape
    if s == 1:  # with the right one first: r, or the modes, stay together when the modes are put in order
        product = right_MNKS.reshape(m * n, k) @ left_MNRK.permute(3, 0, 1, 2).reshape(k, rows * cols * r)
        return product.view(m, n, rows, cols, r).permute(2, 0, 3, 1, 4).reshape(rows * m, cols * n, r, 1)
    product = left_MNRK.reshape(rows * cols * r, k) @ right_MNKS.permute(2, 0, 1, 3).reshape(k, m * n * s)
    ordered = product.view(rows, cols, r, m, n, s).permute(0, 3, 1, 4, 2, 5)
    return ordered.reshape(rows * m, cols * n, r, s)


class _Uses(NamedTuple):
    """Which pairs are multiplied, and where their rows go.

    left, right: row of L of each slot (S,), row of R of each block (G,). bag: that of each use (N,), in the order of
    the slots. slot, first: slot of each use (N,), first use of each slot and the end (S + 1,); None where the n-th use
    is that of the n-th slot.
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
    uses = _Uses(i_N, k_N, bag_N, None, None)
    if on_host(i_N):
        uses, order_N = _in_blocks(i_N, k_N, bag_N, left_MXR)
        weights_N = None if weights_N is None else weights_N[order_N]
    sums: Tensor = _PairSums.apply(bags, left_MXR, right_MYR, weights_N, *uses)
    return sums


def _in_blocks(i_N: Tensor, k_N: Tensor, bag_N: Tensor, left_MXR: Tensor) -> tuple[_Uses, Tensor]:
    """Different pairs in the order of k, in blocks of one k, and the order of the uses that goes with it."""
    heads, columns = max(1, left_MXR.shape[0]), left_MXR.shape[1]
    pairs_N, order_N = torch.sort(k_N * heads + i_N)
    pairs_U, number_N, uses_U = torch.unique_consecutive(pairs_N, return_inverse=True, return_counts=True)
    i_U, k_U = pairs_U % heads, pairs_U // heads
    k_K, number_U, size_K = torch.unique_consecutive(k_U, return_inverse=True, return_counts=True)
    slots = block_size(k_U.numel(), k_K.numel(), columns)
    blocks_K = (size_K + slots - 1) // slots
    empty_K = blocks_K * slots - size_K  # slots, at the end of each k's last block
    slot_U = torch.arange(k_U.numel()) + (empty_K.cumsum(0) - empty_K)[number_U]
    k_G = k_K.repeat_interleave(blocks_K)
    size = k_G.numel() * slots
    first_S = i_U.new_zeros(size + 1).index_copy_(0, slot_U + 1, uses_U).cumsum(0)
    i_S = i_U.new_zeros(size).index_copy_(0, slot_U, i_U)
    return _Uses(i_S, k_G, bag_N[order_N], slot_U[number_N], first_S), order_N


def block_size(pairs: int, different: int, columns: int) -> int:
    """Slots of a block for so many pairs with `different` k and `columns` X: few enough that most are taken."""
    return max(1, min(BLOCK_ROWS // max(1, columns), pairs // (2 * max(1, different))))


class _PairSums(torch.autograd.Function):
    """The formulas stand at the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, bags: int, left_MXR: Tensor, right_MYR: Tensor, weights_N: Tensor | None, *uses: Tensor
    ) -> Tensor:
        ctx.save_for_backward(left_MXR, right_MYR, weights_N, *uses)
        blocks = _Blocks(left_MXR, right_MYR, weights_N, _Uses(*uses))
        sums_BD = left_MXR.new_zeros(bags, left_MXR.shape[1] * right_MYR.shape[1])
        for part in blocks.pieces:
            used, rows_ND = blocks.rows(part)
            if weights_N is not None:
                rows_ND = rows_ND * weights_N[used].unsqueeze(1)
            sums_BD.index_add_(0, blocks.uses.bag[used], rows_ND)
        return sums_BD

    @staticmethod
    def backward(ctx: Any, dsums_BD: Tensor) -> tuple[Tensor | None, ...]:
        left_MXR, right_MYR, weights_N, *uses = ctx.saved_tensors
        blocks = _Blocks(left_MXR, right_MYR, weights_N, _Uses(*uses))
        # contiguous, whatever the strides of L and R are: flatten must give views, or the sums go into a copy
        dleft_MXR, dright_MYR = left_MXR.new_zeros(left_MXR.shape), right_MYR.new_zeros(right_MYR.shape)
        wants_weights = ctx.needs_input_grad[3]
        dweights = [weights_N[:0]] if wants_weights else []
        with without_autocast(dsums_BD):
            dsums_BD = dsums_BD.contiguous()
            for part in blocks.pieces:
                if wants_weights:
                    used, rows_ND = blocks.rows(part)
                    dweights.append((rows_ND * dsums_BD[blocks.uses.bag[used]]).sum(1))
                blocks.add_gradients(part, dsums_BD, dleft_MXR, dright_MYR)
        return None, dleft_MXR, dright_MYR, torch.cat(dweights) if wants_weights else None, *[None] * len(uses)


class _Blocks:
    """The operands of `_PairSums`, gathered in pieces that stay in the caches.

    On a CPU every piece is written to the same memory: fresh pages would cost several times the gathering itself.
    """

    def __init__(self, left_MXR: Tensor, right_MYR: Tensor, weights_N: Tensor | None, uses: _Uses) -> None:
        (_, self.x, self.rank), (_, self.y, _) = left_MXR.shape, right_MYR.shape
        self.left_MK, self.right_MK, self.weights_N, self.uses = (
            left_MXR.flatten(1),
            right_MYR.flatten(1),
            weights_N,
            uses,
        )
        count = uses.right.numel()
        self.slots = uses.left.numel() // max(1, count)
        numbers = self.slots * self.x * (self.rank + self.y) + self.y * self.rank
        self.pieces = chunks(count, numbers, uses.right.device)
        self._reuses = on_host(uses.right) and not torch.is_grad_enabled()
        self._memory: dict[str, Tensor] = {}

    def rows(self, part: slice) -> tuple[slice, Tensor]:
        """The uses of some blocks, and the rows (N, X·Y) that they use."""
        left_GZR, right_GYR = self._operands(part)
        count, n, x, y = left_GZR.shape[0], self.slots, self.x, self.y
        if n == 1:
            rows_SD = torch.bmm(left_GZR, right_GYR.mT, out=self._out("rows", count, x, y)).view(count, x * y)
        else:
            turned_GYZ = torch.bmm(right_GYR, left_GZR.mT, out=self._out("turned", count, y, n * x))
            rows_SD = turned_GYZ.view(count, y, n, x).permute(0, 2, 3, 1).reshape(count * n, x * y)
        used, slots = self._used(part)
        if self.uses.slot is not None:
            rows_SD = rows_SD.index_select(0, self.uses.slot[used] - slots.start)
        return used, rows_SD

    def add_gradients(self, part: slice, dsums_BD: Tensor, dleft_MXR: Tensor, dright_MYR: Tensor) -> None:
        """Add what some blocks contribute to the gradients of L and R."""
        left_GZR, right_GYR = self._operands(part)
        count = left_GZR.shape[0]
        drows_GZY = self._drows(part, dsums_BD).view(count, self.slots * self.x, self.y)
        dleft_GZR = torch.bmm(drows_GZY, right_GYR, out=self._out("dleft", *left_GZR.shape))
        dright_GYR = torch.bmm(drows_GZY.mT, left_GZR, out=self._out("dright", *right_GYR.shape))
        _, slots = self._used(part)
        i_S, k_G = self.uses.left[slots], self.uses.right[part]
        dleft_MXR.flatten(1).index_add_(0, i_S, dleft_GZR.view(i_S.numel(), self.left_MK.shape[1]))
        dright_MYR.flatten(1).index_add_(0, k_G, dright_GYR.flatten(1))

    def _drows(self, part: slice, dsums_BD: Tensor) -> Tensor:
        """Gradients of the rows of some slots (S, X·Y): sums of those of the bags that use them, zero in empty ones."""
        used, slots = self._used(part)
        bag_N, weights_N = self.uses.bag[used], None if self.weights_N is None else self.weights_N[used]
        if self.uses.first is not None:
            first_S = self.uses.first[slots] - used.start
            return F.embedding_bag(bag_N, dsums_BD, first_S, mode="sum", per_sample_weights=weights_N)
        drows_ND = dsums_BD.index_select(0, bag_N)
        return drows_ND if weights_N is None else drows_ND * weights_N.unsqueeze(1)

    def _operands(self, part: slice) -> tuple[Tensor, Tensor]:
        """L (G, n·X, r) and R (G, Y, r) of some blocks."""
        i_S, k_G = self.uses.left[self._used(part)[1]], self.uses.right[part]
        left = torch.index_select(self.left_MK, 0, i_S, out=self._out("left", i_S.numel(), self.left_MK.shape[1]))
        right = torch.index_select(self.right_MK, 0, k_G, out=self._out("right", k_G.numel(), self.right_MK.shape[1]))
        return left.view(k_G.numel(), self.slots * self.x, self.rank), right.view(k_G.numel(), self.y, self.rank)

    def _used(self, part: slice) -> tuple[slice, slice]:
        """The uses and the slots of some blocks."""
        last = min(part.stop, self.uses.right.numel())
        slots = slice(part.start * self.slots, last * self.slots)
        if self.uses.first is None:
            return slots, slots
        return slice(int(self.uses.first[slots.start]), int(self.uses.first[slots.stop])), slots

    def _out(self, name: str, *shape: int) -> Tensor | None:
        """Memory of the previous piece, or None for memory of its own."""
        if not self._reuses:
            return None
        if name not in self._memory:  # the first piece is the largest
            self._memory[name] = self.left_MK.new_empty(prod(shape))
        return self._memory[name][: prod(shape)].view(shape)
