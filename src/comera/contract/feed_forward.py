"""The feed-forward part of a transformer block, two or three tensor trains and an activation, without its wide middle.

    z = down(h),  h = act(up(x))   or   h = act(gate(x)) · up(x)

The wide h is made in pieces that stay in the caches, forward and once more in the backward, and never as a whole: kept
are x and the narrow products. That costs one more narrow product and one more activation, and saves the memory and the
traffic of h and its gradient: forward and backward of 768 → 3072 → 768 at rank 30 over 4,096 rows take 0.65 of the
time of two layers with the activation between them (one core of an AMD EPYC 7003, float32).

Shapes: B flattened batch, P a piece of it, I/O in/out features, F wide features, R rank, S rank with the bias's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.contract.activations import ACTIVATIONS
from comera.contract.halves import merge_dtype, pieces, without_autocast
from comera.contract.linear import Weight, enter, tt_linears
from comera.contract.once import made_once
from comera.contract.plan import choose_groups
from comera.contract.two_sided import Half, two_sided, unflatten, with_bias, with_ones, without_bias
from comera.errors import SpecError


def tt_feed_forward(x: Tensor, ups: Sequence[Weight], activation: str, down: Weight) -> Tensor:
    """z = down(act(up(x))) for one weight in `ups`, down(act(gate(x)) · up(x)) for two, (gate, up).

    x: (..., in_features). activation: a name in `ACTIVATIONS`. Returns (..., out_features); dtypes, errors and
    derivatives as in `tt_linear`, which does the work where the batch is a single piece or plans otherwise.
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
    halves = all(choose_groups(weight.spec, x_BI, weight.cores)[0] == "halves" for weight in weights)
    if not halves or len(_pieces(x_BI, down.spec.in_features)) < 2:
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
    """Y_k = [P_k; 1]ᵀ [B_k; bias_k],  h = act(Y_1) · Y_2,  Q = A hᵀ,  z = [Q; 1]ᵀ [B; bias]

    U = B dzᵀ,  dh = Uᵀ A,  ∂A = U h,  [∂B; ∂bias] = [Q; 1] dz;   dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh,
    and from dY_k on as in `_TwoSided`, with V_k = B_k dY_kᵀ summed into dx = Σ_k V_kᵀ A_k.
    """

    @staticmethod
    def forward(ctx: Any, activation: str, count: int, given_BI: Tensor, *flat: Tensor | None) -> Tensor:
        *ups, down = unflatten(flat)
        x_BI = given_BI.to(down.a.dtype)
        ups_SF = [with_bias(up.b, up.bias) for up in ups]
        ps_SB = [with_ones(up.a @ x_BI.t(), b.shape[0]) for up, b in zip(ups, ups_SF, strict=True)]

        def narrow() -> Tensor:
            q_RB = x_BI.new_empty(down.a.shape[0], x_BI.shape[0])
            for part in _pieces(x_BI, down.a.shape[1]):
                ys_PF = [p[:, part].t() @ b for p, b in zip(ps_SB, ups_SF, strict=True)]
                q_RB[:, part] = down.a @ _hidden(activation, ys_PF)[1].t()
            return q_RB

        q_RB = made_once(narrow)
        b_SO = with_bias(down.b, down.bias)
        q_SB = with_ones(q_RB, b_SO.shape[0])
        ctx.activation, ctx.count = activation, count
        ctx.save_for_backward(given_BI, q_SB, *ps_SB, *flat)
        return (q_SB.t() @ b_SO).to(given_BI.dtype)

    @staticmethod
    def backward(ctx: Any, dz_BO: Tensor) -> tuple[Tensor | None, ...]:
        given_BI, q_SB, *kept = ctx.saved_tensors
        ps_SB, flat = kept[: ctx.count], kept[ctx.count :]
        *ups, down = unflatten(flat)
        with without_autocast(dz_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                return None, None, *_differentiable(dz_BO, given_BI, ups, ctx.activation, down)
            x_BI, dz_BO = given_BI.to(down.a.dtype), dz_BO.to(down.a.dtype)
            u_RB = down.b @ dz_BO.t()
            ddown_SO = q_SB @ dz_BO
            ups_SF = [with_bias(up.b, up.bias) for up in ups]
            sums = merge_dtype(x_BI.dtype)  # of sums over the pieces
            da_RF = torch.zeros_like(down.a, dtype=sums)
            dups_SF = [torch.zeros_like(b, dtype=sums) for b in ups_SF]
            vs_RB = [x_BI.new_empty(up.a.shape[0], x_BI.shape[0]) for up in ups]
            _, act_backward = ACTIVATIONS[ctx.activation]
            for part in _pieces(x_BI, down.a.shape[1]):
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
                dx_BI = (torch.cat(vs_RB).t() @ torch.cat([up.a for up in ups])).to(given_BI.dtype)
            grads: list[Tensor | None] = []
            for up, v_RB, dup_SF in zip(ups, vs_RB, dups_SF, strict=True):
                dup_SF = dup_SF.to(x_BI.dtype)
                grads += [v_RB @ x_BI, *without_bias(dup_SF, up.a.shape[0], up.bias is not None)]
            grads += [da_RF.to(x_BI.dtype), *without_bias(ddown_SO, down.a.shape[0], down.bias is not None)]
        return None, None, dx_BI, *grads


def _pieces(x_BI: Tensor, wide: int) -> list[slice]:
    """Pieces of the batch in which a wide tensor and its gradient stay in the caches: on a CPU in those that its cores
    share, since in smaller pieces two cores wait for each other more than they gain (139 ms against 162)."""
    return pieces(x_BI.shape[0], wide // 2 if x_BI.device.type == "cpu" else 2 * wide, x_BI.device)


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
    grads = iter(torch.autograd.grad(_whole(x_BI, ups, activation, down), wanted, dz_BO, create_graph=True))
    return tuple(next(grads) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
