"""y = (x A) B + bias: the product of a batch with a weight in low-rank form, or with several that share their input.

    forward    P = A xᵀ,    y = [1; P]ᵀ [bias; B]
    backward   U = B dyᵀ,   dx = Uᵀ A,   ∂A = U x,   [∂bias; ∂B] = [1; P] dy

W and ∂W are never formed. `merge` (merge.py) makes A and B from the cores of a tensor train.

Layout. A rank of 30 is an awkward row length: on a CPU (MKL, float32) x_BI @ A_IR runs at 33 GFLOP/s a core for rank
30 and at 55 for rank 32, and accelerators want leading dimensions in multiples of 8. So the rank is never the inner
dimension of an operand that meets the batch: A_RI, P_RB = A xᵀ and U_RB = B dyᵀ run at 55 for rank 30, unpadded.

Bias. It is the first row of B and meets a row of ones in P: no broadcast of the bias before the product, no sum over
the batch for its gradient.

Shared input. The A of several weights are stacked: x is read once forward and once backward, and dx is written once;
the sum of separate products would write and add it once per weight.

Shapes: B flattened batch, I/O in/out features, R rank, S rank plus the row of the bias (if there is one).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import low_rank as cpp
from comera.kernels.cpp.memory import LARGE, empty
from comera.kernels.tracing import traced
from comera.ops.dtypes import without_autocast
from comera.ops.once import keep_for_recompute


class LowRankFactors(NamedTuple):
    """A weight W = A B with its bias, in the `kernel_dtype` of the batch that it meets.

    a: A (rank, in_features). b: B (rank, out_features), or [bias; B] (1 + rank, out_features).
    """

    a: Tensor
    b: Tensor

    @property
    def has_bias(self) -> bool:
        """Whether the first row of `b` is a bias."""
        return self.b.shape[0] > self.a.shape[0]

    @property
    def without_bias(self) -> Tensor:
        """B alone."""
        return self.b[1:] if self.has_bias else self.b

    def with_bias(self, bias: Tensor | None) -> LowRankFactors:
        """The same factors with [bias; B]; unchanged for a bias of None."""
        return self if bias is None else LowRankFactors(self.a, torch.cat([bias.unsqueeze(0), self.b]))

    def with_ones(self, p_RB: Tensor) -> Tensor:
        """[1; P], whose first row meets the bias; P where there is no bias."""
        return F.pad(p_RB, (0, 0, 1, 0), value=1.0) if self.has_bias else p_RB


def low_rank(x_BI: Tensor, *factors: LowRankFactors, backend: str | None = None) -> tuple[Tensor, ...]:
    """y_k = (x A_kᵀ) B_k + bias_k for each of the factors.

    Args:
        x_BI: the batch (B, in_features).
        factors: of one weight or of several, in the `kernel_dtype` of x. Autocast must be off.
        backend: "cpp", "triton" or "torch", of which the first two must support the operands; default: what `select`
            chooses.

    Returns:
        One tensor (B, out_features) per weight, in x's dtype. Saved for the backward: x, the factors and the low-rank
        P_k. Differentiable twice.
    """
    if traced():  # autograd and the compiler do as well with two plain products
        _, outputs = _torch_forward(x_BI.to(factors[0].a.dtype), factors)
        return tuple(y_BO.to(x_BI.dtype) for y_BO in outputs)
    ys_BO: tuple[Tensor, ...] = _LowRank.apply(backend, x_BI, *(tensor for pair in factors for tensor in pair))
    return ys_BO


def pairs(flat: Sequence[Tensor]) -> list[LowRankFactors]:
    """Factors from A_1, B_1, A_2, B_2, ..."""
    return [LowRankFactors(*flat[k : k + 2]) for k in range(0, len(flat), 2)]


class _LowRank(torch.autograd.Function):
    """The formulas at the top of the file, for stacked weights. `select` chooses the backend once, in the forward.

    A hand-written backward takes 20 % less time than autograd through two F.linear.
    """

    @staticmethod
    def forward(ctx: Any, backend: str | None, x_BI: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        factors = pairs(flat)
        met_BI = x_BI.to(factors[0].a.dtype)
        ctx.backend = backend or select.low_rank_backend(met_BI, flat)
        ctx.set_materialize_grads(False)
        forward, _ = _BACKENDS[ctx.backend]
        kept, ys_BO = forward(met_BI, factors)
        ctx.save_for_backward(x_BI, *flat, *kept)
        return tuple(y_BO.to(x_BI.dtype) for y_BO in ys_BO)

    @staticmethod
    def backward(ctx: Any, *dys_BO: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(dys_BO)
        x_BI, *saved = ctx.saved_tensors
        factors, kept = pairs(saved[: 2 * count]), saved[2 * count :]
        if all(dy is None for dy in dys_BO):
            return (None,) * (2 + 2 * count)
        wants = Wanted(ctx.needs_input_grad[1], ctx.needs_input_grad[2::2], ctx.needs_input_grad[3::2])
        _, backward = _BACKENDS[ctx.backend]
        with without_autocast(x_BI):
            met_BI = x_BI.to(factors[0].a.dtype)
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: P is not a constant
                kept, backward = _low_rank_activations(met_BI, factors), _torch_backward
            dys = [None if dy is None else dy.to(met_BI.dtype) for dy in dys_BO]
            dx_BI, grads = backward(Saved(met_BI, factors, kept), dys, wants)
            return None, None if dx_BI is None else dx_BI.to(x_BI.dtype), *grads


class Saved(NamedTuple):
    """The operands of a backward: x, the factors, and what the forward of its backend kept, in the factors' dtype."""

    x: Tensor
    factors: Sequence[LowRankFactors]
    kept: Sequence[Tensor]


class Wanted(NamedTuple):
    """Which gradients autograd asks for: of x, of each A and of each B."""

    x: bool
    a: Sequence[bool]
    b: Sequence[bool]


_Forward = tuple[list[Tensor], Sequence[Tensor]]  # what the backward needs besides x and the factors; the outputs
_Backward = tuple[Tensor | None, list[Tensor | None]]  # dx; dA_1, dB_1, dA_2, ...


def _torch_forward(x_BI: Tensor, factors: Sequence[LowRankFactors]) -> _Forward:
    ps_SB = _low_rank_activations(x_BI, factors)
    return ps_SB, [transposed_product(p_SB, each.b) for p_SB, each in zip(ps_SB, factors, strict=True)]


def _low_rank_activations(x_BI: Tensor, factors: Sequence[LowRankFactors]) -> list[Tensor]:
    """[1; P_k] of each weight, or P_k where it has no bias."""
    p_RB = stack([each.a for each in factors]) @ x_BI.t()
    ps_RB = p_RB.split([each.a.shape[0] for each in factors]) if len(factors) > 1 else [p_RB]
    return [each.with_ones(p_RB) for p_RB, each in zip(ps_RB, factors, strict=True)]


def _torch_backward(saved: Saved, dys_BO: Sequence[Tensor | None], wants: Wanted) -> _Backward:
    x_BI, factors, ps_SB = saved
    grads: list[Tensor | None] = [None] * (2 * len(factors))
    reached, us_RB, dx_BI = [], [], None
    for k, (each, dy_BO) in enumerate(zip(factors, dys_BO, strict=True)):
        if dy_BO is not None:
            reached.append(k)
            us_RB.append(each.without_bias @ dy_BO.t())
            if wants.b[k]:
                grads[2 * k + 1] = ps_SB[k] @ dy_BO
    u_RB = stack(us_RB)
    if wants.x:
        dx_BI = transposed_product(u_RB, stack([factors[k].a for k in reached]))
    if any(wants.a):
        das_RI = (u_RB @ x_BI).split([u.shape[0] for u in us_RB])
        for k, da_RI in zip(reached, das_RI, strict=True):
            grads[2 * k] = da_RI
    return dx_BI, grads


def _cpp_forward(x_BI: Tensor, factors: Sequence[LowRankFactors]) -> _Forward:
    as_RI, bs_SO = zip(*factors, strict=True)
    made: list[Tensor] = []

    def all_at_once() -> Tensor:
        made.extend(cpp.low_rank(x_BI, as_RI, bs_SO))
        return made[0]

    p_BS = keep_for_recompute(all_at_once)  # a replay of the forward finds P made and needs the second product alone
    return [p_BS], made[1:] or cpp.low_rank_output(p_BS, [a.shape[0] for a in as_RI], bs_SO)


def _cpp_backward(saved: Saved, dys_BO: Sequence[Tensor | None], wants: Wanted) -> _Backward:
    x_BI, factors, (p_BS,) = saved
    grads: list[Tensor | None] = [None] * (2 * len(factors))
    as_RI, bs_SO = zip(*factors, strict=True)
    wanted = wants.x, any(wants.a), any(wants.b)
    made = iter(cpp.low_rank_backward(x_BI, p_BS, dys_BO, as_RI, bs_SO, *wanted))
    dx_BI = next(made) if wants.x else None
    for part in (0, 1):
        if wanted[1 + part]:
            for k, dy_BO in enumerate(dys_BO):
                if dy_BO is not None:
                    grads[2 * k + part] = next(made)
    return dx_BI, grads


def _triton_forward(x_BI: Tensor, factors: Sequence[LowRankFactors]) -> _Forward:
    from comera.kernels import triton

    biases = [each.b[0] if each.has_bias else None for each in factors]
    made = [triton.low_rank(x_BI, each.a, each.without_bias, b) for each, b in zip(factors, biases, strict=True)]
    return [p_BR for _, p_BR in made], [y_BO for y_BO, _ in made]


def _triton_backward(saved: Saved, dys_BO: Sequence[Tensor | None], wants: Wanted) -> _Backward:
    """dx = (dy Bᵀ) A is the forward's product with A and B exchanged."""
    from comera.kernels import triton

    x_BI, factors, ps_BR = saved
    grads: list[Tensor | None] = [None] * (2 * len(factors))
    dx_BI: Tensor | None = None
    for k, (each, p_BR, dy_BO) in enumerate(zip(factors, ps_BR, dys_BO, strict=True)):
        if dy_BO is None:
            continue
        b_RO = each.without_bias
        if wants.x:
            part_BI, u_BR = triton.low_rank(dy_BO, b_RO, each.a)
            dx_BI = part_BI if dx_BI is None else dx_BI + part_BI
        else:
            u_BR = dy_BO @ b_RO.t()
        if wants.a[k]:
            grads[2 * k] = u_BR.t() @ x_BI
        if wants.b[k]:
            db_RO = p_BR.t() @ dy_BO
            grads[2 * k + 1] = torch.cat([dy_BO.sum(0, keepdim=True), db_RO]) if each.has_bias else db_RO
    return dx_BI, grads


_BACKENDS = {
    "torch": (_torch_forward, _torch_backward),
    "cpp": (_cpp_forward, _cpp_backward),
    "triton": (_triton_forward, _triton_backward),
}


def transposed_product(p_RB: Tensor, b_RO: Tensor) -> Tensor:
    """Pᵀ B (batch, features)."""
    shape = p_RB.shape[1], b_RO.shape[1]
    if 4 * prod(shape) >= LARGE and not torch.is_grad_enabled() and select.supports("memory", p_RB, b_RO):
        return torch.mm(p_RB.t(), b_RO, out=empty(*shape))
    return p_RB.t() @ b_RO


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Matrices concatenated by rows."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
