"""From cores to factors: W = A B, for one tensor train or for many with the same signature in one batched merge.

The gates are absorbed, G_k D_k, then the cores are merged from both ends towards the split, where the input modes end:

    left     L_1 = G_1,          L_k = L_{k-1} G_k      (N_1…N_k, r_k)              A = L_splitᵀ
    right    R_order = G_order,  R_k = G_k R_{k+1}      (r_{k-1}, N_k…N_order)      B = R_{split+1}

Backward, from the last product to the first: ∂G_k = L_{k-1}ᵀ ∂L_k and ∂L_{k-1} = ∂L_k G_kᵀ; on the right
∂G_k = ∂R_k R_{k+1}ᵀ and ∂R_{k+1} = G_kᵀ ∂R_k. Then ∂G = ∂(G D) D and ∂d = Σ ∂(G D) G. Every step is one product of
views, without a permutation.

Merging is a tenth of a training step's arithmetic but many times the calls of its products with the batch: with few
rows the calls decide. So K trains are stacked and merged as one, smaller ranks padded with zeros, which add nothing.

Shapes: K trains, R/S left/right rank (the largest among the trains), N mode, I/O in/out features. Sizes are given in
full, never as -1: ranks may be 0.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import merge as cpp
from comera.kernels.tracing import traced
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.ops.low_rank import LowRankFactors, pairs
from comera.tt.spec import TTSpec


def merge(
    specs: Sequence[TTSpec],
    trains: Sequence[Sequence[Tensor]],
    threshold: float,
    dtype: torch.dtype,
    biases: Sequence[Tensor | None] | None = None,
) -> list[LowRankFactors]:
    """Factors A (rank, in_features) and B (rank, out_features) of every train.

    Args:
        specs: equal in all but ranks.
        trains: for each, its `order` cores of `spec.core_shapes`, then its `order - 1` gates; a gate at or below
            `threshold` counts as 0.
        dtype: of the factors. Half-precision cores are merged in float32.
        biases: for each train None or a bias (out_features,), which becomes the first row of its B.

    Returns:
        `LowRankFactors` of each train. Differentiable twice; a backward may reach some of the trains only, and may run
        again as long as the tensors are unchanged.

    Raises:
        RuntimeError: in the backward, when a core, gate or bias was modified since the forward.

    Source: docs/method.md §4.
    """
    biases = biases or [None] * len(trains)
    with without_autocast(trains[0][0]):
        flat = [tensor for train in trains for tensor in train]
        if traced():  # autograd and the compiler know all about a few plain products
            return pairs(_torch_forward(specs, [*flat, *biases], threshold, dtype)[0])
        return pairs(_Merge.apply(tuple(specs), threshold, dtype, *flat, *biases))


def left_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """L_1, L_2, ... of cores (..., R, N, S) whose first R is 1: tensors (..., N_1…N_k, S_k)."""
    products_NS = [cores[0].flatten(-3, -2)]
    for core in cores[1:]:
        *stacked, _, mode, right = core.shape
        done = products_NS[-1].shape[-2]
        products_NS.append((products_NS[-1] @ core.flatten(-2)).view(*stacked, done * mode, right))
    return products_NS


def left_gradients(cores: Sequence[Tensor], products_NS: Sequence[Tensor], grad_NS: Tensor) -> list[Tensor]:
    """Gradients of the cores from that of the last of their `left_products`, which itself is not needed."""
    gradients = []
    for k in range(len(cores) - 1, 0, -1):
        core, product_NR = cores[k], products_NS[k - 1]
        *stacked, _, mode, right = core.shape
        grad_NS = grad_NS.reshape(*stacked, product_NR.shape[-2], mode * right)
        gradients.append((product_NR.mT @ grad_NS).view(core.shape))
        grad_NS = grad_NS @ core.flatten(-2).mT
    return [grad_NS.reshape(cores[0].shape), *reversed(gradients)]


def right_products(cores: Sequence[Tensor]) -> list[Tensor]:
    """R_order, R_{order-1}, ... of cores (..., R, N, S) whose last S is 1: tensors (..., R_k, N_k…N_order)."""
    products_RN = [cores[-1].flatten(-2)]
    for core in cores[-2::-1]:
        *stacked, left, mode, _ = core.shape
        done = products_RN[-1].shape[-1]
        products_RN.append((core.flatten(-3, -2) @ products_RN[-1]).view(*stacked, left, mode * done))
    return products_RN


def right_gradients(cores: Sequence[Tensor], products_RN: Sequence[Tensor], grad_RN: Tensor) -> list[Tensor]:
    """Gradients of the cores from that of the last of their `right_products`, which itself is not needed."""
    gradients = []
    for k in range(len(cores) - 1):
        core, product_SN = cores[k], products_RN[len(cores) - 2 - k]
        *stacked, left, mode, _ = core.shape
        grad_RN = grad_RN.reshape(*stacked, left * mode, product_SN.shape[-1])
        gradients.append((grad_RN @ product_SN.mT).view(core.shape))
        grad_RN = core.flatten(-3, -2).mT @ grad_RN
    return [*gradients, grad_RN.reshape(cores[-1].shape)]


class _Stacked:
    """The trains core by core: cores_KRNS, gates d_KS, pruned ones zero, and which are pruned_KS."""

    def __init__(self, specs: Sequence[TTSpec], flat: Sequence[Tensor], threshold: float) -> None:
        order = specs[0].order
        width = 2 * order - 1
        parts = [_stack(flat[k : width * len(specs) : width]) for k in range(width)]
        self.cores_KRNS, gates = parts[:order], parts[order:]
        self.pruned_KS = [d_KS <= threshold for d_KS in gates]  # a NaN is not
        self.d_KS = [d_KS.masked_fill(pruned, 0.0) for d_KS, pruned in zip(gates, self.pruned_KS, strict=True)]

    def absorbed(self) -> list[Tensor]:
        """G_k D_k as they are merged; made again in the backward, which is cheaper than saving them."""
        dtype = merge_dtype(self.cores_KRNS[0].dtype)
        absorbed = (core * d[:, None, None] for core, d in zip(self.cores_KRNS, self.d_KS, strict=False))
        return [core.to(dtype) for core in (*absorbed, self.cores_KRNS[-1])]


class _Merge(torch.autograd.Function):
    """All factors from all cores, gates and biases.

    The node holds the tensors itself, with their versions, instead of calling save_for_backward: the factors serve
    every layer that asks for them, so several losses may run backward through this node one after the other, and a
    checkpointed block in whose forward the merge happens to run must not count the tensors as its own. The backward
    makes the check that save_for_backward would make.
    """

    @staticmethod
    def forward(
        ctx: Any, specs: tuple[TTSpec, ...], threshold: float, dtype: torch.dtype, *flat: Tensor
    ) -> tuple[Tensor, ...]:
        tensors, biases = flat[: -len(specs)], flat[-len(specs) :]
        given = [tensor for tensor in flat if tensor is not None]
        ctx.specs, ctx.threshold, ctx.dtype, ctx.flat = specs, threshold, dtype, flat
        ctx.versions = _versions(given) if any(ctx.needs_input_grad) else []
        ctx.set_materialize_grads(False)
        ctx.backend = select.merge_backend(dtype, given)
        if ctx.backend == "cpp":
            return tuple(cpp.merge(tensors, biases, _layout(specs), threshold))
        factors, ctx.stacked, ctx.left, ctx.right = _torch_forward(specs, flat, threshold, dtype)
        return tuple(factors)

    @staticmethod
    def backward(ctx: Any, *dfactors: Tensor | None) -> tuple[Tensor | None, ...]:
        _check_unmodified(ctx.flat, ctx.versions)
        spec, count = ctx.specs[0], len(ctx.specs)
        tensors, biases = ctx.flat[:-count], ctx.flat[-count:]
        reached = [da is not None or db is not None for da, db in zip(dfactors[::2], dfactors[1::2], strict=True)]
        owners = [k for k in range(count) for _ in range(2 * spec.order - 1)] + list(range(count))
        wanted = [want and reached[k] for want, k in zip(ctx.needs_input_grad[3:], owners, strict=True)]
        if torch.is_grad_enabled():  # create_graph: by torch's own autograd
            found = iter(_differentiable(ctx, dfactors, [t for t, want in zip(ctx.flat, wanted, strict=True) if want]))
            return None, None, None, *(next(found) if want else None for want in wanted)
        if ctx.backend == "cpp":
            made = iter(cpp.merge_backward(dfactors, tensors, biases, _layout(ctx.specs), ctx.threshold))
            has_bias_grad = (b is not None and db is not None for b, db in zip(biases, dfactors[1::2], strict=True))
            grads = [next(made) if there else None for there in (*[True] * len(tensors), *has_bias_grad)]
        else:
            with without_autocast(tensors[0]):
                grads = _torch_backward(ctx, dfactors)
        return None, None, None, *(grad if want else None for grad, want in zip(grads, wanted, strict=True))


def _torch_backward(ctx: Any, dfactors: Sequence[Tensor | None]) -> list[Tensor | None]:
    stacked: _Stacked = ctx.stacked
    spec, count = ctx.specs[0], len(ctx.specs)
    merging, split = stacked.absorbed(), spec.split
    rank = merging[split].shape[1]
    dbs, dbiases = zip(*map(_without_bias, dfactors[1::2], ctx.flat[-count:]), strict=True)
    das = [None if da is None else da.t() for da in dfactors[::2]]
    da_KIR = _stack_gradients(das, merging[0].new_empty(count, prod(spec.in_modes), rank))
    db_KRO = _stack_gradients(dbs, merging[0].new_empty(count, rank, prod(spec.out_modes)))
    dabsorbed = left_gradients(merging[:split], ctx.left, da_KIR)
    dabsorbed += right_gradients(merging[split:], ctx.right, db_KRO)
    each = zip(dabsorbed, stacked.cores_KRNS, stacked.pruned_KS, strict=False)
    dd_KS = [(grad * core).sum((1, 2)).masked_fill(pruned, 0.0) for grad, core, pruned in each]
    dcores = [grad * d[:, None, None] for grad, d in zip(dabsorbed, stacked.d_KS, strict=False)]
    dcores = [grad.to(stacked.cores_KRNS[0].dtype) for grad in (*dcores, dabsorbed[-1])]
    by_train = zip(*(grad.unbind() for grad in (*dcores, *dd_KS)), strict=True)
    flat = (grad for grads in by_train for grad in grads)
    return [*(_corner(grad, like) for grad, like in zip(flat, ctx.flat, strict=False)), *dbiases]


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each tensor has been written to in place; those made in inference mode do not count it."""
    return [t._version for t in tensors if not t.is_inference()]


def _check_unmodified(tensors: Sequence[Tensor | None], versions: Sequence[int]) -> None:
    given = [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]
    if _versions(given) == versions:
        return
    tensor, version = next((t, v) for t, v in zip(given, versions, strict=True) if t._version != v)
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of a "
        f"tensor train, now {list(tensor.shape)}, is at version {tensor._version}; expected version {version}. Call "
        "backward before optimizer.step(), prune_, round_ or loading, or run the forward again"
    )


def _torch_forward(
    specs: Sequence[TTSpec], flat: Sequence[Tensor | None], threshold: float, dtype: torch.dtype
) -> tuple[list[Tensor], _Stacked, list[Tensor], list[Tensor]]:
    """A_1, [bias_1; B_1], A_2, ... by operations of torch, which can be traced and differentiated again.

    Also returned is what `_torch_backward` needs: the stacked trains, and all left and right products but the last.
    """
    first, tensors, biases = specs[0], flat[: -len(specs)], flat[-len(specs) :]
    stacked = _Stacked(specs, tensors, threshold)  # type: ignore[arg-type]
    merging = stacked.absorbed()
    *left, left_KNR = left_products(merging[: first.split])
    *right, right_KRN = right_products(merging[first.split :])
    a_KRI = left_KNR[:, : first.in_features].transpose(1, 2).to(dtype).contiguous()
    none = right_KRN.new_zeros(first.out_features)
    bias_KO = torch.stack([none if bias is None else bias.to(none.dtype) for bias in biases])
    b_KSO = torch.cat([bias_KO[:, None], right_KRN[..., : first.out_features]], 1).to(dtype)
    factors = []
    # unbound, whose gradients are stacked again; those of single elements would be added up, each as large as all
    for spec, bias, a_RI, b_SO in zip(specs, biases, a_KRI.unbind(), b_KSO.unbind(), strict=True):
        rank = spec.ranks[spec.split]
        factors += [a_RI[:rank], b_SO[bias is None : 1 + rank]]
    return factors, stacked, left, right


@lru_cache(maxsize=64)
def _layout(specs: tuple[TTSpec, ...]) -> tuple[int, ...]:
    """The trains as the kernel wants them: order, split, in_features, out_features, modes and ranks of each."""
    return tuple(
        size
        for spec in specs
        for size in (spec.order, spec.split, spec.in_features, spec.out_features, *spec.sizes, *spec.ranks)
    )


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of K trains as one, those of smaller ranks padded with zeros."""
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
    """The part of a padded tensor that belongs to `like`."""
    return tensor if tensor.shape == like.shape else tensor[tuple(slice(size) for size in like.shape)]


def _without_bias(db_SO: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """∂B and ∂bias from [∂bias; ∂B]; ∂bias is a copy, since a view would keep all of it alive with the gradient."""
    if db_SO is None or bias is None:
        return db_SO, None
    return db_SO[1:], db_SO[0].to(bias.dtype, copy=True)


def _stack_gradients(grads: Sequence[Tensor | None], total: Tensor) -> Tensor:
    """Gradients of one factor of all trains in `total`, zeros where none came; copies of transposed ones are fast."""
    for grad, place in zip(grads, total.unbind(), strict=True):
        if grad is None or grad.shape != place.shape:
            place.zero_()
        if grad is not None:
            place[: grad.shape[0], : grad.shape[1]].copy_(grad)
    return total


def _differentiable(ctx: Any, dfactors: Sequence[Tensor | None], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients of `wanted`, which can be differentiated again."""
    factors, *_ = _torch_forward(ctx.specs, ctx.flat, ctx.threshold, ctx.dtype)
    came = [(factor, grad) for factor, grad in zip(factors, dfactors, strict=True) if grad is not None]
    outputs, grads = [factor for factor, _ in came], [grad for _, grad in came]
    return torch.autograd.grad(outputs, wanted, grads, create_graph=True, materialize_grads=True)
