"""The feed-forward part of a transformer block, two or three tensor trains and an activation, without its wide middle.

    z = down(h),  h = act(up(x))   or   h = act(gate(x)) · up(x)

The wide h is made in pieces that stay in the caches, forward and once more in the backward, and never as a whole: kept
are x and the narrow products. That costs one more narrow product and one more activation, and saves the memory and the
traffic of h and its gradient: forward and backward of 768 → 3072 → 768 at rank 30 over 4,096 rows take 0.65 of the
time of two layers with the activation between them (one core of an AMD EPYC 7003, float32). On a CPU a kernel makes
smaller pieces still, in 0.6 of the time of torch's products (native/feed_forward.cpp).

Shapes: B flattened batch, P a piece of it, I/O in/out features, F wide features, R rank, S rank with the bias's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.kernels import select
from comera.kernels.cpp.low_rank import low_rank_output
from comera.kernels.cpp.mlp import mlp, mlp_backward
from comera.ops.activations import ACTIVATIONS
from comera.ops.chunking import chunks
from comera.ops.dtypes import merge_dtype, without_autocast
from comera.ops.linear import Weight, enter, tt_linears
from comera.ops.low_rank import Half, stack, two_sided, unflatten, wide
from comera.ops.once import made_once


def tt_feed_forward(x: Tensor, ups: Sequence[Weight], activation: str, down: Weight) -> Tensor:
    """z = down(act(up(x))) for one weight in `ups`, down(act(gate(x)) · up(x)) for two, (gate, up).

    x: (..., in_features). activation: a name in `ACTIVATIONS`. Returns (..., out_features); dtypes, errors and
    derivatives as in `tt_linear`, which does the work where all plan otherwise, and for a single piece on an
    accelerator, which has the room for it.
    Raises ValueError for another activation, SpecError for weights that do not fit each other.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
    wide = {up.spec.out_features for up in ups} | {down.spec.in_features}
    if len(ups) not in (1, 2) or len(wide) != 1:
        raise SpecError(
            f"expected one or two weights up to the {down.spec.in_features} features that {down.spec} takes, got "
            f"{', '.join(str(up.spec) for up in ups) or 'none'}"
        )
    x_BI, _ = enter(x, ups[0].spec, ups[0].spec.shape, ups[0].cores, None)
    weights = (*ups, down)
    halves = any(weight.choose(x_BI)[0] == "halves" for weight in weights)
    if not halves or (x.device.type != "cpu" and len(_pieces(x_BI, down.spec.in_features)) < 2):
        first, *others = tt_linears(x, ups)
        hidden = ACTIVATIONS[activation][0](first)
        return tt_linears(hidden * others[0] if others else hidden, [down])[0]
    for weight in weights[1:]:
        like = x_BI if weight is not down else x_BI.new_empty(0, down.spec.in_features)
        enter(like, weight.spec, weight.spec.shape, weight.cores, weight.bias)
    with without_autocast(x):
        flat = [tensor for weight in weights for tensor in weight.merged(x_BI)]
        z_BO: Tensor = _FeedForward.apply(activation, len(ups), x_BI, *flat)
    return z_BO.view(*x.shape[:-1], down.spec.out_features)


def _whole(x_BI: Tensor, ups: Sequence[Half], activation: str, down: Half) -> Tensor:
    """The same by torch's own autograd, with the wide tensors whole."""
    act, _ = ACTIVATIONS[activation]
    first, *others = two_sided(x_BI, *ups)
    hidden = act(first)
    for other in others:
        hidden = hidden * other
    return two_sided(hidden, down)[0]


class _FeedForward(torch.autograd.Function):
    """Y_k = [1; P_k]ᵀ [bias_k; B_k],  h = act(Y_1) · Y_2,  Q = A hᵀ,  z = [1; Q]ᵀ [bias; B]

    U = B dzᵀ,  dh = Uᵀ A,  ∂A = U h,  [∂bias; ∂B] = [1; Q] dz;   dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,
    and from dY_k on as in `_TwoSided`, with V_k = B_k dY_kᵀ summed into dx = Σ_k V_kᵀ A_k.
    """

    @staticmethod
    def forward(ctx: Any, activation: str, count: int, given_BI: Tensor, *flat: Tensor) -> Tensor:
        *ups, down = unflatten(flat)
        x_BI = given_BI.to(down.a.dtype)
        ctx.activation, ctx.count, ctx.native = activation, count, select.mlp_backend(x_BI, flat) == "cpp"
        if ctx.native:
            p_BS, q_BS, z_BO = _native(x_BI, flat, activation)
            ctx.save_for_backward(given_BI, p_BS, q_BS, *flat)
            return z_BO.to(given_BI.dtype)
        ps_SB = [up.with_ones(up.a @ x_BI.t()) for up in ups]

        def through_wide() -> Tensor:
            q_RB = x_BI.new_empty(down.a.shape[0], x_BI.shape[0])
            for part in _pieces(x_BI, down.a.shape[1]):
                ys_PF = [p[:, part].t() @ up.b for p, up in zip(ps_SB, ups, strict=True)]
                q_RB[:, part] = down.a @ _hidden(activation, ys_PF)[1].t()
            return q_RB

        q_SB = down.with_ones(made_once(through_wide))
        ctx.save_for_backward(given_BI, q_SB, *ps_SB, *flat)
        return wide(q_SB, down.b).to(given_BI.dtype)

    @staticmethod
    def backward(ctx: Any, dz_BO: Tensor) -> tuple[Tensor | None, ...]:
        given_BI, *kept = ctx.saved_tensors
        flat = kept[-2 * (ctx.count + 1) :]
        *ups, down = unflatten(flat)
        with without_autocast(dz_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                return None, None, *_differentiable(dz_BO, given_BI, ups, ctx.activation, down)
            wants_x = ctx.needs_input_grad[2]
            x_BI, dz_BO = given_BI.to(down.a.dtype), dz_BO.to(down.a.dtype)
            if ctx.native:
                operands = *kept[:2], dz_BO, flat[::2], flat[1::2], ctx.activation, wants_x
                grads = mlp_backward(x_BI, *operands)
                dx_BI = grads.pop(0).to(given_BI.dtype) if wants_x else None
                return None, None, dx_BI, *grads
            q_SB, *ps_SB = kept[: ctx.count + 1]
            u_RB = down.without_bias @ dz_BO.t()
            ddown_SO = q_SB @ dz_BO
            da_RF, vs_RB, dups_SF = _through_wide(ctx.activation, ps_SB, ups, down, u_RB)
            dx_BI = None
            if wants_x:
                dx_BI = wide(stack(vs_RB), stack([up.a for up in ups])).to(given_BI.dtype)
            das_RI = [v_RB @ x_BI for v_RB in vs_RB]
            sums: list[Any] = [half for pair in zip(das_RI, dups_SF, strict=True) for half in pair] + [da_RF, ddown_SO]
        return None, None, dx_BI, *(each.to(x_BI.dtype) for each in sums)


def _native(x_BI: Tensor, flat: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q and z by the kernel; in a replay P and Q come from the forward."""
    *_, a_RF, b_SO = flat
    made: list[Tensor] = []

    def whole() -> tuple[Tensor, Tensor]:
        p_BS, q_BS, z_BO = mlp(x_BI, flat[::2], flat[1::2], activation)
        made.append(z_BO)
        return p_BS, q_BS

    p_BS, q_BS = made_once(whole)
    (z_BO,) = made or low_rank_output(q_BS, [a_RF.shape[0]], [b_SO])
    return p_BS, q_BS, z_BO


def _through_wide(
    activation: str, ps_SB: Sequence[Tensor], ups: Sequence[Half], down: Half, u_RB: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """∂A, all V_k and all [∂bias_k; ∂B_k] from U."""
    da_RF: Tensor | None = None
    dups_SF: list[Any] = [None] * len(ups)
    vs_RB = [u_RB.new_empty(up.a.shape[0], u_RB.shape[1]) for up in ups]
    _, act_backward = ACTIVATIONS[activation]
    for part in _pieces(u_RB.t(), down.a.shape[1]):
        ys_PF = [p[:, part].t() @ up.b for p, up in zip(ps_SB, ups, strict=True)]
        first_PF, hidden_PF = _hidden(activation, ys_PF)
        da_RF = _add_product(da_RF, u_RB[:, part], hidden_PF)
        dh_PF = u_RB[:, part].t() @ down.a
        gated = len(ups) == 2
        dys_PF = [act_backward(dh_PF * ys_PF[1] if gated else dh_PF, ys_PF[0])]
        if gated:
            dys_PF.append(dh_PF * first_PF)
        for k, (up, p_SB, dy_PF) in enumerate(zip(ups, ps_SB, dys_PF, strict=True)):
            vs_RB[k][:, part] = up.without_bias @ dy_PF.t()
            dups_SF[k] = _add_product(dups_SF[k], p_SB[:, part], dy_PF)
    assert da_RF is not None  # there is one piece at least
    return da_RF, vs_RB, dups_SF


def _pieces(x_BI: Tensor, wide: int) -> list[slice]:
    """Pieces of the batch in which a wide tensor and its gradient stay in the caches: on a CPU in those that its cores
    share, since in smaller pieces two cores wait for each other more than they gain (139 ms against 162). One at
    least, which an empty batch makes empty."""
    return chunks(x_BI.shape[0], wide // 2 if x_BI.device.type == "cpu" else 2 * wide, x_BI.device) or [slice(0)]


def _hidden(activation: str, ys_PF: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """act(Y_1), and h."""
    first = ACTIVATIONS[activation][0](ys_PF[0])
    return first, first * ys_PF[1] if len(ys_PF) == 2 else first


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place after the first; half-precision products are added in float32."""
    if total is None:
        return (left @ right).to(merge_dtype(left.dtype))
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    total += left @ right
    return total


def _differentiable(
    dz_BO: Tensor, x_BI: Tensor, ups: Sequence[Half], activation: str, down: Half
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of all parts, which can be differentiated again."""
    inputs = [x_BI, *(tensor for half in (*ups, down) for tensor in half)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grads = iter(torch.autograd.grad(_whole(x_BI, ups, activation, down), wanted, dz_BO, create_graph=True))
    return tuple(next(grads) if tensor.requires_grad else None for tensor in inputs)
