"""The halves of many chains of the same modes, merged together: one product per core instead of one per core and chain.

Merging is a tenth of the arithmetic of a step and many times as many operations as its products with the batch: with
few rows, calls decide. The stacked cores G_k D_k are merged as one chain is (halves.py), K chains at a time; chains of
smaller ranks are filled up with zeros, which add nothing.

Shapes: K chains, R/S left/right rank (the largest among the chains), N mode, I/O in/out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp.merge import merge, merge_backward
from comera.ops.dtypes import merge_dtype
from comera.ops.halves import left_gradients, left_products, right_gradients, right_products
from comera.tt.spec import TTSpec


def merge_together(
    specs: Sequence[TTSpec],
    chains: Sequence[Sequence[Tensor]],
    threshold: float,
    dtype: torch.dtype,
    biases: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """A (rank, in_features) and B (rank, out_features) of every chain in `dtype`, as `merge_halves` makes them.

    specs: alike in all but ranks. chains: for each, its `order` cores of `spec.core_shapes` and then its `order - 1`
    rank parameters, of which those at or below `threshold` count as 0. biases: for each None, or a bias
    (out_features,) to be the first row of its B, which has 1 + rank rows then. Differentiable, twice too; each backward
    may come for some of the chains only, as often as it likes.
    """
    flat = (tensor for chain in chains for tensor in chain)
    halves = _MergeTogether.apply(tuple(specs), threshold, dtype, *flat, *(biases or [None] * len(chains)))
    return list(zip(halves[::2], halves[1::2], strict=True))


class _Stacked:
    """The chains core by core: cores_KRNS, d_KS (masked) and active_KS, which d are not."""

    def __init__(self, specs: Sequence[TTSpec], flat: Sequence[Tensor], threshold: float) -> None:
        order = specs[0].order
        width = 2 * order - 1
        parts = [_stack(flat[k : width * len(specs) : width]) for k in range(width)]
        self.cores_KRNS, rank_params = parts[:order], parts[order:]
        self.active_KS = [d_KS > threshold for d_KS in rank_params]
        self.d_KS = [d_KS * active for d_KS, active in zip(rank_params, self.active_KS, strict=True)]

    def absorbed(self) -> list[Tensor]:
        """G_k D_k, as they are merged: made again in the backward, which is cheaper than to keep them."""
        dtype = merge_dtype(self.cores_KRNS[0].dtype)
        absorbed = (core * d[:, None, None] for core, d in zip(self.cores_KRNS, self.d_KS, strict=False))
        return [core.to(dtype) for core in (*absorbed, self.cores_KRNS[-1])]


def _halves(
    specs: Sequence[TTSpec], left_KNR: Tensor, right_KRN: Tensor, biases: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor]:
    """A_1, [bias_1; B_1], A_2, ... from all that is merged."""
    first = specs[0]
    a_KRI = left_KNR[:, : first.in_features].mT.to(dtype).contiguous()
    none = right_KRN.new_zeros(first.out_features)
    bias_KO = torch.stack([none if bias is None else bias.to(none.dtype) for bias in biases])
    b_KSO = torch.cat([bias_KO[:, None], right_KRN[..., : first.out_features]], 1).to(dtype)
    made = []
    for k, (spec, bias) in enumerate(zip(specs, biases, strict=True)):
        rank = spec.ranks[spec.split]
        made += [a_KRI[k, :rank], b_KSO[k, bias is None : 1 + rank]]
    return made


class _MergeTogether(torch.autograd.Function):
    """All halves from all cores, rank parameters and biases, and their gradients: ∂G = ∂(G D) D, ∂d = Σ ∂(G D) G.

    What the backward needs is kept by the node itself and not by save_for_backward: the halves serve every layer that
    asks for them, whose graphs may be gone through one after the other, and no checkpoint is to count them as its own.
    """

    @staticmethod
    def forward(
        ctx: Any, specs: Sequence[TTSpec], threshold: float, dtype: torch.dtype, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.specs, ctx.threshold, ctx.dtype, ctx.flat = specs, threshold, dtype, flat
        ctx.set_materialize_grads(False)
        numbers, biases = flat[: -len(specs)], flat[-len(specs) :]
        given = [tensor for tensor in flat if tensor is not None]
        ctx.native = select.merge_backend(dtype, given) == "cpp"
        if ctx.native:
            return tuple(merge(numbers, biases, _layout(specs), threshold))
        ctx.stacked = _Stacked(specs, flat, threshold)
        merging, split = ctx.stacked.absorbed(), specs[0].split
        *ctx.left, left_KNR = left_products(merging[:split])
        *ctx.right, right_KRN = right_products(merging[split:])
        return tuple(_halves(specs, left_KNR, right_KRN, flat[-len(specs) :], dtype))

    @staticmethod
    def backward(ctx: Any, *dhalves: Tensor | None) -> tuple[Tensor | None, ...]:
        spec, count, biases = ctx.specs[0], len(ctx.specs), ctx.flat[-len(ctx.specs) :]
        reached = [da is not None or db is not None for da, db in zip(dhalves[::2], dhalves[1::2], strict=True)]
        owners = [k for k in range(count) for _ in range(2 * spec.order - 1)] + list(range(count))
        wanted = [want and reached[k] for want, k in zip(ctx.needs_input_grad[3:], owners, strict=True)]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
            found = iter(_differentiable(ctx, dhalves, [t for t, want in zip(ctx.flat, wanted, strict=True) if want]))
            return None, None, None, *(next(found) if want else None for want in wanted)
        if ctx.native:
            numbers = ctx.flat[:-count]
            made = iter(merge_backward(dhalves, numbers, biases, _layout(ctx.specs), ctx.threshold))
            all_came = [True] * len(numbers) + [
                b is not None and db is not None for b, db in zip(biases, dhalves[1::2], strict=True)
            ]
            each = (next(made) if came else None for came in all_came)
            return None, None, None, *(grad if want else None for grad, want in zip(each, wanted, strict=True))
        s: _Stacked = ctx.stacked
        merging, split = s.absorbed(), spec.split
        rank = merging[split].shape[1]
        dbs, dbiases = zip(*map(_without_bias, dhalves[1::2], biases), strict=True)
        das = [None if da is None else da.t() for da in dhalves[::2]]
        da_KIR = _stack_gradients(das, merging[0].new_empty(count, prod(spec.in_modes), rank))
        db_KRO = _stack_gradients(dbs, merging[0].new_empty(count, rank, prod(spec.out_modes)))
        dabsorbed = left_gradients(merging[:split], ctx.left, da_KIR)
        dabsorbed += right_gradients(merging[split:], ctx.right, db_KRO)
        dabsorbed = [grad.to(core.dtype) for grad, core in zip(dabsorbed, s.cores_KRNS, strict=True)]
        pairs = zip(dabsorbed, s.cores_KRNS, s.active_KS, strict=False)
        dd_KS = [(grad * core).sum((1, 2)) * active for grad, core, active in pairs]
        dcores = [grad * d[:, None, None] for grad, d in zip(dabsorbed, s.d_KS, strict=False)]
        by_chain = zip(*(grad.unbind() for grad in (*dcores, dabsorbed[-1], *dd_KS)), strict=True)
        numbers = (grad for grads in by_chain for grad in grads)
        grads = [*(_corner(grad, like) for grad, like in zip(numbers, ctx.flat, strict=False)), *dbiases]
        return None, None, None, *(grad if want else None for grad, want in zip(grads, wanted, strict=True))


@lru_cache(maxsize=64)
def _layout(specs: tuple[TTSpec, ...]) -> tuple[int, ...]:
    """The chains as the kernel wants them."""
    return tuple(
        number
        for spec in specs
        for number in (spec.order, spec.split, spec.in_features, spec.out_features, *spec.sizes, *spec.ranks)
    )


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


def _without_bias(db_SO: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """∂B and ∂bias from [∂bias; ∂B]; a copy, since a view would keep all of it for as long as the gradient lives."""
    if db_SO is None or bias is None:
        return db_SO, None
    return db_SO[1:], db_SO[0].to(bias.dtype, copy=True)


def _stack_gradients(grads: Sequence[Tensor | None], total: Tensor) -> Tensor:
    """Gradients of one half of all chains in `total`, zeros where none came; one by one, as transposed ones go fast."""
    for grad, place in zip(grads, total.unbind(), strict=True):
        if grad is None or grad.shape != place.shape:
            place.zero_()
        if grad is not None:
            place[: grad.shape[0], : grad.shape[1]].copy_(grad)
    return total


def _differentiable(ctx: Any, dhalves: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of `wanted`, which can be differentiated again."""
    merging, split = _Stacked(ctx.specs, ctx.flat, ctx.threshold).absorbed(), ctx.specs[0].split
    left, right = left_products(merging[:split])[-1], right_products(merging[split:])[-1]
    halves = _halves(ctx.specs, left, right, ctx.flat[-len(ctx.specs) :], ctx.dtype)
    came = [(half, grad) for half, grad in zip(halves, dhalves, strict=True) if grad is not None]
    outputs, grads = [half for half, _ in came], [grad for _, grad in came]
    return torch.autograd.grad(outputs, wanted, grads, create_graph=True, materialize_grads=True)
