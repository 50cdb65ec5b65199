"""The products of merged tensor trains with a large batch: y = (x A) B + bias, and a feed-forward pair of them.

Layout. A rank of 30 is an awkward row length: on CPU (MKL, float32) x_BI @ A_IR runs at 33 GFLOP/s a core for rank 30,
at 55 for rank 32, and accelerators want leading dimensions in multiples of 8. So the rank is never the inner dimension
of what meets the batch: A_RI, P_RB = A xᵀ and U_RB = B dyᵀ run at 55 for rank 30, without padding.

Bias. It is one more row of B, which meets one more row of P, of ones: no wide copy of the bias before the product, no
wide sum for its gradient.

Shapes: B flattened batch, I/O in/out features, R rank, S rank with the row of the bias, F wide features of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.contract.halves import (
    left_gradients,
    left_products,
    merge_dtype,
    pad_last,
    pieces,
    right_gradients,
    right_products,
    without_autocast,
)
from comera.tt.spec import TTSpec


def merge_halves(spec: TTSpec, cores: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A (rank, in_features) and B (rank, out_features) in `dtype`: the input cores and the output cores merged.

    Half-precision cores are merged in float32. Differentiable, twice too.
    """
    halves: tuple[Tensor, Tensor] = _Merge.apply(spec, dtype, *cores)
    return halves


def two_sided(x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = (x Aᵀ) B + bias, all in one dtype, autocast off; kept for the backward are x, A, B and the narrow P."""
    y_BO: Tensor = _TwoSided.apply(x_BI, a_RI, b_RO, bias)
    return y_BO


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
        cores, partial = ctx.saved_tensors[:order], ctx.saved_tensors[order:]
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
    """P = A xᵀ,  y = [P; 1]ᵀ [B; bias];   U = B dyᵀ,  dx = Uᵀ A,  ∂A = U x,  [∂B; ∂bias] = [P; 1] dy.

    W and ∂W are never formed. Written by hand because it takes 20 % less time than two F.linear under autograd.
    """

    @staticmethod
    def forward(ctx: Any, x_BI: Tensor, a_RI: Tensor, b_RO: Tensor, bias: Tensor | None) -> Tensor:
        b_SO = _with_bias(b_RO, bias)
        p_SB = _with_ones(a_RI @ x_BI.t(), b_SO.shape[0])
        ctx.save_for_backward(x_BI, a_RI, b_RO, p_SB)
        return p_SB.t() @ b_SO

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, a_RI, b_RO, p_SB = ctx.saved_tensors
        wants_x, wants_a, wants_b, wants_bias = ctx.needs_input_grad
        with without_autocast(dy_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: P is no constant
                p_SB = _with_ones(a_RI @ x_BI.t(), p_SB.shape[0])
            dx_BI = da_RI = db_SO = None
            if wants_x or wants_a:
                u_RB = b_RO @ dy_BO.t()
                dx_BI = u_RB.t() @ a_RI if wants_x else None
                da_RI = u_RB @ x_BI if wants_a else None
            if wants_b or wants_bias:
                db_SO = p_SB @ dy_BO
        return dx_BI, da_RI, *_without_bias(db_SO, a_RI.shape[0], wants_bias)


def _with_bias(b_RO: Tensor, bias: Tensor | None) -> Tensor:
    """[B; bias], which is B without one."""
    return b_RO if bias is None else torch.cat([b_RO, bias.unsqueeze(0)])


def _with_ones(p_RB: Tensor, rows: int) -> Tensor:
    """[P; 1] of `rows` rows: P itself, or one row more."""
    return p_RB if rows == p_RB.shape[0] else torch.cat([p_RB, p_RB.new_ones(1, p_RB.shape[1])])


def _without_bias(db_SO: Tensor | None, rank: int, biased: bool) -> tuple[Tensor | None, Tensor | None]:
    """∂B and ∂bias from [∂B; ∂bias]."""
    return (None, None) if db_SO is None else (db_SO[:rank], db_SO[rank] if biased else None)


class Half(NamedTuple):
    """A merged weight: A (rank, in), B (rank, out) and a bias (out) or none, in the dtype of the batch."""

    a: Tensor
    b: Tensor
    bias: Tensor | None


# activation -> (value, derivative times a gradient)
_GELU, _GELU_BACKWARD = torch.ops.aten.gelu, torch.ops.aten.gelu_backward
ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "gelu": (_GELU, _GELU_BACKWARD),
    "gelu_tanh": (
        lambda y: _GELU(y, approximate="tanh"),
        lambda dh, y: _GELU_BACKWARD(dh, y, approximate="tanh"),
    ),
    "relu": (torch.relu, lambda dh, y: torch.ops.aten.threshold_backward(dh, y, 0)),
    "silu": (F.silu, torch.ops.aten.silu_backward),
}


def feed_forward(x_BI: Tensor, ups: Sequence[Half], activation: str, down: Half) -> Tensor:
    """z = down(h) with h = act(up(x)), or act(gate(x)) · up(x) for ups = (gate, up); autocast off.

    The wide h is made in pieces that stay in the caches, forward and once more in the backward, and never as a whole:
    kept are x and narrow products. One more narrow product buys that; on one core forward and backward of
    768 → 3072 → 768 over 4,096 rows take 0.65 of the time of two layers with the activation between them.
    activation: a name in `ACTIVATIONS`.
    """
    flat = [tensor for half in (*ups, down) for tensor in half]
    z_BO: Tensor = _FeedForward.apply(activation, len(ups), x_BI, *flat)
    return z_BO


def feed_forward_whole(x_BI: Tensor, ups: Sequence[Half], activation: str, down: Half) -> Tensor:
    """What `feed_forward` computes, by torch's own autograd and with the wide tensors whole."""
    act, _ = ACTIVATIONS[activation]
    first, *others = (two_sided(x_BI, *up) for up in ups)
    hidden = act(first)
    for other in others:
        hidden = hidden * other
    return two_sided(hidden, *down)


class _FeedForward(torch.autograd.Function):
    """Y_k = [P_k; 1]ᵀ [B_k; bias_k],  h = act(Y_1) · Y_2,  Q = A hᵀ,  z = [Q; 1]ᵀ [B; bias]

    U = B dzᵀ,  dh = Uᵀ A,  ∂A = U h,  [∂B; ∂bias] = [Q; 1] dz;   dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,
    and from dY_k on as in `_TwoSided`, with V_k = B_k dY_kᵀ summed into dx = Σ_k V_kᵀ A_k.
    """

    @staticmethod
    def forward(ctx: Any, activation: str, count: int, x_BI: Tensor, *flat: Tensor | None) -> Tensor:
        *ups, down = _unflatten(flat)
        ups_SF = [_with_bias(up.b, up.bias) for up in ups]
        ps_SB = [_with_ones(up.a @ x_BI.t(), b.shape[0]) for up, b in zip(ups, ups_SF, strict=True)]
        q_RB = x_BI.new_empty(down.a.shape[0], x_BI.shape[0])
        for part in _pieces(x_BI, down):
            ys_PF = [p[:, part].t() @ b for p, b in zip(ps_SB, ups_SF, strict=True)]
            q_RB[:, part] = down.a @ _hidden(activation, ys_PF)[1].t()
        b_SO = _with_bias(down.b, down.bias)
        q_SB = _with_ones(q_RB, b_SO.shape[0])
        ctx.activation, ctx.count = activation, count
        ctx.save_for_backward(x_BI, q_SB, *ps_SB, *flat)
        return q_SB.t() @ b_SO

    @staticmethod
    def backward(ctx: Any, dz_BO: Tensor) -> tuple[Tensor | None, ...]:
        x_BI, q_SB, *kept = ctx.saved_tensors
        ps_SB, flat = kept[: ctx.count], kept[ctx.count :]
        *ups, down = _unflatten(flat)
        with without_autocast(dz_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                return None, None, *_differentiable(dz_BO, x_BI, ups, ctx.activation, down)
            u_RB = down.b @ dz_BO.t()
            ddown_SO = q_SB @ dz_BO
            ups_SF = [_with_bias(up.b, up.bias) for up in ups]
            sums = merge_dtype(x_BI.dtype)  # of sums over the pieces
            da_RF = torch.zeros_like(down.a, dtype=sums)
            dups_SF = [torch.zeros_like(b, dtype=sums) for b in ups_SF]
            vs_RB = [x_BI.new_empty(up.a.shape[0], x_BI.shape[0]) for up in ups]
            _, act_backward = ACTIVATIONS[ctx.activation]
            for part in _pieces(x_BI, down):
                ys_PF = [p[:, part].t() @ b for p, b in zip(ps_SB, ups_SF, strict=True)]
                first_PF, hidden_PF = _hidden(ctx.activation, ys_PF)
                _add_product(da_RF, u_RB[:, part], hidden_PF)
                dh_PF = u_RB[:, part].t() @ down.a
                gated = len(ups) == 2
                dys_PF = [act_backward(dh_PF * ys_PF[1] if gated else dh_PF, ys_PF[0])]
                if gated:
                    dys_PF.append(dh_PF * first_PF)
                for up, p_SB, v_RB, dup_SF, dy_PF in zip(ups, ps_SB, vs_RB, dups_SF, dys_PF, strict=True):
                    v_RB[:, part] = up.b @ dy_PF.t()
                    _add_product(dup_SF, p_SB[:, part], dy_PF)
            dx_BI = None
            if ctx.needs_input_grad[2]:
                dx_BI = torch.cat(vs_RB).t() @ torch.cat([up.a for up in ups])
            grads: list[Tensor | None] = []
            for up, v_RB, dup_SF in zip(ups, vs_RB, dups_SF, strict=True):
                dup_SF = dup_SF.to(x_BI.dtype)
                grads += [v_RB @ x_BI, *_without_bias(dup_SF, up.a.shape[0], up.bias is not None)]
            grads += [da_RF.to(x_BI.dtype), *_without_bias(ddown_SO, down.a.shape[0], down.bias is not None)]
        return None, None, dx_BI, *grads


def _unflatten(flat: Sequence[Any]) -> list[Half]:
    return [Half(*flat[k : k + 3]) for k in range(0, len(flat), 3)]


def _pieces(x_BI: Tensor, down: Half) -> list[slice]:
    """Pieces of the batch in which a wide tensor and its gradient stay in the caches."""
    return pieces(x_BI.shape[0], 2 * down.a.shape[1], x_BI.device)


def _hidden(activation: str, ys_PF: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """act(Y_1), and h."""
    first = ACTIVATIONS[activation][0](ys_PF[0])
    return first, first * ys_PF[1] if len(ys_PF) == 2 else first


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; a half-precision product is added in the total's float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _differentiable(
    dz_BO: Tensor, x_BI: Tensor, ups: Sequence[Half], activation: str, down: Half
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of all parts, which can be differentiated again."""
    inputs = [x_BI, *(tensor for half in (*ups, down) for tensor in half)]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    grads = iter(torch.autograd.grad(feed_forward_whole(x_BI, ups, activation, down), wanted, dz_BO, create_graph=True))
    return tuple(next(grads) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
