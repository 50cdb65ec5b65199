"""The halves of many chains of the same modes, merged together: one product per core instead of one per core and chain.

Merging is a tenth of the arithmetic of a step and many times as many operations as its products with the batch: with
few rows, calls decide. The stacked cores G_k D_k are merged as one chain is (halves.py), K chains at a time; chains of
smaller ranks are filled up with zeros, which add nothing.

Shapes: K chains, R/S left/right rank (the largest among the chains), N mode, I/O in/out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.contract.halves import (
    left_gradients,
    left_products,
    merge_dtype,
    pad_last,
    right_gradients,
    right_products,
)
from comera.tt.spec import TTSpec


def merge_together(
    specs: Sequence[TTSpec], chains: Sequence[Sequence[Tensor]], threshold: float, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """A (rank, in_features) and B (rank, out_features) of every chain in `dtype`, as `merge_halves` makes them.

    specs: alike in all but ranks. chains: for each, its `order` cores of `spec.core_shapes` and then its `order - 1`
    rank parameters, of which those at or below `threshold` count as 0. Differentiable, twice too; each backward may
    come for some of the chains only, as often as it likes.
    """
    flat = (tensor for chain in chains for tensor in chain)
    halves = _MergeTogether.apply(tuple(specs), threshold, dtype, *flat)
    return list(zip(halves[::2], halves[1::2], strict=True))


class _Stacked:
    """The chains core by core.

    cores_KRNS, d_KS: as they are, d masked. active_KS: which d are not. left, right: the partial merges of G_k D_k,
    the whole halves last, until `halves` has taken these.
    """

    def __init__(self, specs: Sequence[TTSpec], flat: Sequence[Tensor], threshold: float) -> None:
        order, split = specs[0].order, specs[0].split
        width = 2 * order - 1
        parts = [_stack(flat[k::width]) for k in range(width)]
        self.cores_KRNS, rank_params = parts[:order], parts[order:]
        self.active_KS = [d_KS > threshold for d_KS in rank_params]
        self.d_KS = [d_KS * active for d_KS, active in zip(rank_params, self.active_KS, strict=True)]
        dtype = merge_dtype(flat[0].dtype)
        absorbed = [core * d[:, None, None] for core, d in zip(self.cores_KRNS, self.d_KS, strict=False)]
        self.merging = [core.to(dtype) for core in (*absorbed, self.cores_KRNS[-1])]
        self.left, self.right = left_products(self.merging[:split]), right_products(self.merging[split:])

    def halves(self, specs: Sequence[TTSpec], dtype: torch.dtype) -> list[Tensor]:
        """A_1, B_1, A_2, B_2, ..., once: what they are made from is not held twice."""
        first = specs[0]
        a_KRI = self.left.pop()[:, : first.in_features].mT.to(dtype).contiguous()
        b_KRO = self.right.pop()[..., : first.out_features].to(dtype).contiguous()
        ranks = [spec.ranks[spec.split] for spec in specs]
        return [half[k, :rank] for k, rank in enumerate(ranks) for half in (a_KRI, b_KRO)]


class _MergeTogether(torch.autograd.Function):
    """All halves from all cores and rank parameters, and their gradients back: ∂G = ∂(G D) D, ∂d = Σ ∂(G D) G.

    What the backward needs is kept by the node itself and not by save_for_backward: the halves serve every layer that
    asks for them, whose graphs may be gone through one after the other, and no checkpoint is to count them as its own.
    """

    @staticmethod
    def forward(
        ctx: Any, specs: Sequence[TTSpec], threshold: float, dtype: torch.dtype, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.specs, ctx.threshold, ctx.dtype, ctx.flat = specs, threshold, dtype, flat
        ctx.stacked = _Stacked(specs, flat, threshold)
        ctx.set_materialize_grads(False)
        return tuple(ctx.stacked.halves(specs, dtype))

    @staticmethod
    def backward(ctx: Any, *dhalves: Tensor | None) -> tuple[Tensor | None, ...]:
        spec: TTSpec = ctx.specs[0]
        width = 2 * spec.order - 1
        reached = [da is not None or db is not None for da, db in zip(dhalves[::2], dhalves[1::2], strict=True)]
        wanted = [want and reached[k // width] for k, want in enumerate(ctx.needs_input_grad[3:])]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
            found = iter(_differentiable(ctx, dhalves, [t for t, want in zip(ctx.flat, wanted, strict=True) if want]))
            return None, None, None, *(next(found) if want else None for want in wanted)
        s: _Stacked = ctx.stacked
        rank = s.merging[spec.split].shape[1]
        da_KRI = _stack_gradients(dhalves[::2], s.merging[0].new_zeros(rank, spec.in_features))
        db_KRO = _stack_gradients(dhalves[1::2], s.merging[0].new_zeros(rank, spec.out_features))
        da_KIR = pad_last(da_KRI, prod(spec.in_modes)).mT
        db_KRO = pad_last(db_KRO, prod(spec.out_modes))
        merging, split = s.merging, spec.split
        dabsorbed = left_gradients(merging[:split], s.left, da_KIR)
        dabsorbed += right_gradients(merging[split:], s.right, db_KRO)
        dabsorbed = [grad.to(core.dtype) for grad, core in zip(dabsorbed, s.cores_KRNS, strict=True)]
        pairs = zip(dabsorbed, s.cores_KRNS, s.active_KS, strict=False)
        dd_KS = [(grad * core).sum((1, 2)) * active for grad, core, active in pairs]
        dcores = [grad * d[:, None, None] for grad, d in zip(dabsorbed, s.d_KS, strict=False)]
        by_chain = zip(*(grad.unbind() for grad in (*dcores, dabsorbed[-1], *dd_KS)), strict=True)
        grads = [_corner(grad, like) for grad, like in zip((g for c in by_chain for g in c), ctx.flat, strict=True)]
        return None, None, None, *(grad if want else None for grad, want in zip(grads, wanted, strict=True))


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of K chains as one, those of smaller ranks filled up with zeros."""
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        room = [
            [n for size, most in zip(part.shape[::-1], largest[::-1], strict=True) for n in (0, most - size)]
            for part in parts
        ]
        parts = [F.pad(part, pads) for part, pads in zip(parts, room, strict=True)]
    return torch.stack(list(parts))


def _corner(tensor: Tensor, like: Tensor) -> Tensor:
    """What of a filled-up tensor belongs to `like`."""
    return tensor if tensor.shape == like.shape else tensor[tuple(slice(size) for size in like.shape)]


def _stack_gradients(grads: Sequence[Tensor | None], zeros_RN: Tensor) -> Tensor:
    """Gradients of one half of all chains, zeros where none came."""
    filled = [zeros_RN if grad is None else grad.to(zeros_RN.dtype) for grad in grads]
    rows = zeros_RN.shape[0]
    return torch.stack([g if g.shape[0] == rows else F.pad(g, (0, 0, 0, rows - g.shape[0])) for g in filled])


def _differentiable(ctx: Any, dhalves: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of `wanted`, which can be differentiated again."""
    halves = _Stacked(ctx.specs, ctx.flat, ctx.threshold).halves(ctx.specs, ctx.dtype)
    came = [(half, grad) for half, grad in zip(halves, dhalves, strict=True) if grad is not None]
    outputs, grads = [half for half, _ in came], [grad for _, grad in came]
    return torch.autograd.grad(outputs, wanted, grads, create_graph=True, materialize_grads=True)
