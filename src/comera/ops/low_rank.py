"""The products of merged tensor trains with a large batch: y = (x A) B + bias, of one weight or of several at once.

Layout. A rank of 30 is an awkward row length: on CPU (MKL, float32) x_BI @ A_IR runs at 33 GFLOP/s a core for rank 30,
at 55 for rank 32, and accelerators want leading dimensions in multiples of 8. So the rank is never the inner dimension
of what meets the batch: A_RI, P_RB = A xᵀ and U_RB = B dyᵀ run at 55 for rank 30, without padding.

Bias. It is a row of B, the first, which meets a row of P, of ones: no wide copy of the bias before the product, no wide
sum for its gradient.

Weights that share x. Their A are stacked: x is read once forward and once backward, and dx is written once, where the
sum of their products would write it once for each and add.

Shapes: B flattened batch, I/O in/out features, R rank, S rank with the row of the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import low_rank as native
from comera.kernels.cpp.memory import LARGE, empty
from comera.ops import triton_functions
from comera.ops.chunking import pad_last
from comera.ops.dtypes import merge_dtype, widens, without_autocast
from comera.ops.halves import left_gradients, left_products, right_gradients, right_products
from comera.ops.once import made_once
from comera.tt.spec import TTSpec


def merge_halves(spec: TTSpec, cores: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A (rank, in_features) and B (rank, out_features) in `dtype`: the input cores and the output cores merged.

    Half-precision cores are merged in float32. Differentiable, twice too.
    """
    halves: tuple[Tensor, Tensor] = _Merge.apply(spec, dtype, *cores)
    return halves


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype that A, B and bias must have to meet x: x's own, or float32 where half precision is slow."""
    return torch.float32 if widens(x) else x.dtype


class Half(NamedTuple):
    """A merged weight with its bias, in the `working_dtype` of the batch.

    a: A (rank, in). b: B (rank, out), or [bias; B] (1 + rank, out).
    """

    a: Tensor
    b: Tensor

    @property
    def biased(self) -> bool:
        """Whether the first row of b is a bias."""
        return self.b.shape[0] > self.a.shape[0]

    @property
    def without_bias(self) -> Tensor:
        """B."""
        return self.b[1:] if self.biased else self.b

    def with_bias(self, bias: Tensor | None) -> Half:
        """The same with [bias; B] for B."""
        return self if bias is None else Half(self.a, torch.cat([bias.unsqueeze(0), self.b]))

    def with_ones(self, p_RB: Tensor) -> Tensor:
        """[1; P], the row of ones that meets the bias; P where there is none."""
        return F.pad(p_RB, (0, 0, 1, 0), value=1.0) if self.biased else p_RB


def two_sided(x_BI: Tensor, *halves: Half) -> tuple[Tensor, ...]:
    """y_k = (x A_kᵀ) B_k + bias_k in x's dtype for each of the halves, autocast off.

    Kept for the backward are x, the halves and the narrow P_k = A_k xᵀ.
    """
    if select.low_rank_backend(x_BI, [tensor for half in halves for tensor in half]) == "triton":
        return tuple(triton_functions.low_rank(x_BI, h.a, h.without_bias, h.b[0] if h.biased else None) for h in halves)
    ys_BO: tuple[Tensor, ...] = _TwoSided.apply(x_BI, *(tensor for half in halves for tensor in half))
    return ys_BO


def unflatten(flat: Sequence[Tensor]) -> list[Half]:
    """Halves from their parts in a row."""
    return [Half(*flat[k : k + 2]) for k in range(0, len(flat), 2)]


class _Merge(torch.autograd.Function):
    """A and B from the cores, ∂A and ∂B back into them (halves.py); kept: the cores and the partial merges."""

    @staticmethod
    def forward(ctx: Any, spec: TTSpec, dtype: torch.dtype, *cores: Tensor) -> tuple[Tensor, Tensor]:
        left, right = _partial_merges(spec, cores)
        ctx.spec = spec
        ctx.save_for_backward(*cores, *left[:-1], *right[:-1])
        a_RI = left[-1][: spec.in_features].t().to(dtype)
        b_RO = right[-1][:, : spec.out_features].to(dtype)
        # copies: rows side by side, and a core that is a half by itself must not come out as a view of the parameter
        return tuple(half.clone(memory_format=torch.contiguous_format) for half in (a_RI, b_RO))  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, da_RI: Tensor, db_RO: Tensor) -> tuple[Tensor | None, ...]:
        spec: TTSpec = ctx.spec
        order, split = spec.order, spec.split
        saved = ctx.saved_tensors  # once: under checkpointing a second look would find them gone
        cores, partial = saved[:order], saved[order:]
        left, right = partial[: split - 1], partial[split - 1 :]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: what was kept is no constant
            left, right = (products[:-1] for products in _partial_merges(spec, cores))
        wants_core = ctx.needs_input_grad[2:]
        grads: list[Tensor | None] = [None] * order
        merging = [core.to(merge_dtype(core.dtype)) for core in cores]
        if any(wants_core[:split]):
            da_RI = pad_last(da_RI.to(merging[0].dtype), prod(spec.in_modes))
            grads[:split] = left_gradients(merging[:split], left, da_RI.t())
        if any(wants_core[split:]):
            db_RO = pad_last(db_RO.to(merging[0].dtype), prod(spec.out_modes))
            grads[split:] = right_gradients(merging[split:], right, db_RO)
        return None, None, *(None if g is None else g.to(core.dtype) for g, core in zip(grads, cores, strict=True))


def _partial_merges(spec: TTSpec, cores: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """All partial merges on both sides, the halves themselves last."""
    merging = [core.to(merge_dtype(core.dtype)) for core in cores]
    return left_products(merging[: spec.split]), right_products(merging[spec.split :])


class _TwoSided(torch.autograd.Function):
    """P = A xᵀ,  y_k = [1; P_k]ᵀ [bias_k; B_k];

    U_k = B_k dy_kᵀ,  dx = Uᵀ A,  ∂A = U x,  [∂bias_k; ∂B_k] = [1; P_k] dy_k.

    A, P and U are those of all weights, stacked. W and ∂W are never formed. Written by hand because it takes 20 % less
    time than two F.linear under autograd. On a CPU a kernel does all of it (native/two_sided.cpp), and keeps P turned.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        halves = unflatten(flat)
        met_BI = x_BI.to(halves[0].a.dtype)
        ctx.native = select.low_rank_backend(met_BI, flat) == "cpp"
        ctx.set_materialize_grads(False)
        if ctx.native:
            p_BS, *ys_BO = _native(met_BI, halves)
            ctx.save_for_backward(x_BI, p_BS, *flat)
            return tuple(y_BO.to(x_BI.dtype) for y_BO in ys_BO)
        ps_SB = _narrow(x_BI, halves)
        ctx.save_for_backward(x_BI, *ps_SB, *flat)
        return tuple(wide(p_SB, half.b).to(x_BI.dtype) for p_SB, half in zip(ps_SB, halves, strict=True))

    @staticmethod
    def backward(ctx: Any, *dys_BO: Tensor | None) -> tuple[Tensor | None, ...]:
        x_BI, *kept = ctx.saved_tensors
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()  # create_graph: P is no constant
        ps, halves = kept[: -2 * len(dys_BO)], unflatten(kept[-2 * len(dys_BO) :])
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[1:]
        grads: list[Tensor | None] = [None] * len(wants)
        dx_BI = None
        reached = [k for k, dy_BO in enumerate(dys_BO) if dy_BO is not None]
        if not reached:
            return dx_BI, *grads
        if ctx.native and not again:
            wanted = wants_x, any(wants[::2]), any(wants[1::2])
            x, *dys = (None if each is None else each.to(halves[0].a.dtype) for each in (x_BI, *dys_BO))
            made = iter(native.low_rank_backward(x, *ps, dys, *_apart(halves), *wanted))
            dx_BI = next(made).to(x_BI.dtype) if wants_x else None
            for part in (0, 1):
                for k in reached if wanted[1 + part] else ():
                    grads[2 * k + part] = next(made)
            return dx_BI, *grads
        with without_autocast(x_BI):
            if again:
                ps = _narrow(x_BI, halves)
            us_RB = []
            for k in reached:
                half, dy_BO = halves[k], dys_BO[k].to(halves[k].a.dtype)  # type: ignore[union-attr]
                us_RB.append(half.without_bias @ dy_BO.t())
                if wants[2 * k + 1]:
                    grads[2 * k + 1] = ps[k] @ dy_BO
            u_RB, a_RI = stack(us_RB), stack([halves[k].a for k in reached])
            if wants_x:
                dx_BI = wide(u_RB, a_RI).to(x_BI.dtype)
            if any(wants[::2]):
                das_RI = (u_RB @ x_BI.to(a_RI.dtype)).split([u.shape[0] for u in us_RB])
                for k, da_RI in zip(reached, das_RI, strict=True):
                    grads[2 * k] = da_RI
        return dx_BI, *grads


def _native(x_BI: Tensor, halves: Sequence[Half]) -> list[Tensor]:
    """P, then all y_k, by the kernel; in a replay P comes from the forward."""
    as_RI, bs_SO = _apart(halves)
    made: list[Tensor] = []

    def whole() -> Tensor:
        made.extend(native.low_rank(x_BI, as_RI, bs_SO))
        return made[0]

    p_BS = made_once(whole)
    return made or [p_BS, *native.low_rank_output(p_BS, [a.shape[0] for a in as_RI], bs_SO)]


def _apart(halves: Sequence[Half]) -> tuple[list[Tensor], list[Tensor]]:
    return [half.a for half in halves], [half.b for half in halves]


def _narrow(x_BI: Tensor, halves: Sequence[Half]) -> list[Tensor]:
    """[1; P_k], or P_k for a weight without bias."""
    a_RI = stack([half.a for half in halves])
    p_RB = a_RI @ x_BI.to(a_RI.dtype).t()
    ps_RB = p_RB.split([half.a.shape[0] for half in halves]) if len(halves) > 1 else [p_RB]
    return [half.with_ones(p_RB) for p_RB, half in zip(ps_RB, halves, strict=True)]


def wide(p_RB: Tensor, b_RO: Tensor) -> Tensor:
    """Pᵀ B (batch, features)."""
    shape = p_RB.shape[1], b_RO.shape[1]
    if 4 * prod(shape) >= LARGE and not torch.is_grad_enabled() and select.supports("memory", p_RB, b_RO):
        return torch.mm(p_RB.t(), b_RO, out=empty(*shape))
    return p_RB.t() @ b_RO


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Matrices one below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
