"""The MLP of a transformer block, in low-rank form, without its hidden activation.

    z = down(h),   h = act(up(x))   or, gated,   h = act(gate(x)) · up(x)

    forward    P_k = A_k xᵀ,  Y_k = [1; P_k]ᵀ [bias_k; B_k],  h = act(Y_1) · Y_2,  Q = A hᵀ,  z = [1; Q]ᵀ [bias; B]
    backward   U = B dzᵀ,  dh = Uᵀ A,  ∂A = U h,  [∂bias; ∂B] = [1; Q] dz
               dY_1 = act'(Y_1) dh Y_2,  dY_2 = act(Y_1) dh
               V_k = B_k dY_kᵀ,  dx = Σ V_kᵀ A_k,  ∂A_k = V_k x,  [∂bias_k; ∂B_k] = [1; P_k] dY_k

h is made in chunks of the batch that stay in the caches, once forward and once more backward, and never as a whole:
saved are x and the low-rank activations P, Q. The price is one more low-rank product and one more activation; the gain
is the memory and the traffic of h and its gradient. Forward and backward of 768 → 3072 → 768 at rank 30 over 4,096
rows take 0.65 of the time of two layers with the activation between them (one core of an AMD EPYC 7003, float32). On a
CPU a C++ kernel with smaller chunks takes 0.6 of the time of torch's products (kernels/cpp/csrc/mlp.cpp).

Shapes: B flattened batch, C a chunk of it, I/O in/out features, F hidden features, R rank, S rank plus the bias's row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.kernels import select
from comera.kernels.cpp import mlp as cpp
from comera.kernels.cpp.library import device_type
from comera.kernels.cpp.low_rank import low_rank_output
from comera.ops.activations import ACTIVATIONS
from comera.ops.chunking import chunks
from comera.ops.dtypes import autocast_dtype, merge_dtype, without_autocast
from comera.ops.low_rank import LowRankFactors, low_rank, pairs, stack, transposed_product
from comera.ops.once import keep_for_recompute


def mlp(x: Tensor, ups: Sequence[LowRankFactors], activation: str, down: LowRankFactors) -> Tensor:
    """z = down(act(up(x))) for one weight in `ups`, down(act(gate(x)) · up(x)) for two, (gate, up).

    Args:
        x: (..., in_features).
        ups, down: factors in the `kernel_dtype` of x.
        activation: a name in `ACTIVATIONS`.

    Returns:
        (..., out_features) in x's dtype, or in autocast's. Differentiable twice.

    Raises:
        ValueError: for an unknown activation.
        SpecError: for factors that do not fit x or each other.

    Source: docs/method.md §7.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"expected an activation of {', '.join(ACTIVATIONS)}, got {activation!r}")
    hidden, features = down.a.shape[1], x.shape[-1]
    if len(ups) not in (1, 2) or any((up.a.shape[1], up.b.shape[1]) != (features, hidden) for up in ups):
        came = ", ".join(f"{up.a.shape[1]} → {up.b.shape[1]}" for up in ups) or "none"
        raise SpecError(f"expected one or two weights {features} → {hidden} before the activation, got {came}")
    x_BI = x.reshape(x.shape[:-1].numel(), features).to(autocast_dtype(x) or x.dtype)
    with without_autocast(x):
        flat = [tensor for pair in (*ups, down) for tensor in pair]
        z_BO: Tensor = _MLP.apply(activation, len(ups), x_BI, *flat)
    return z_BO.view(*x.shape[:-1], down.b.shape[1])


def fits_one_chunk(rows: int, hidden_features: int, device: torch.device) -> bool:
    """Whether a batch is not worth chunks: an accelerator has the room for its hidden activation."""
    return device_type(device) != "cpu" and len(_chunks(rows, hidden_features, device)) < 2


class _MLP(torch.autograd.Function):
    """The formulas at the top of the file."""

    @staticmethod
    def forward(ctx: Any, activation: str, count: int, given_BI: Tensor, *flat: Tensor) -> Tensor:
        *ups, down = pairs(flat)
        ctx.activation, ctx.count = activation, count
        x_BI = given_BI.to(down.a.dtype)
        ctx.backend = select.mlp_backend(x_BI, flat)
        if ctx.backend == "cpp":
            p_BS, q_BS, z_BO = _cpp_forward(x_BI, flat, activation)
            ctx.save_for_backward(given_BI, *flat, p_BS, q_BS)
            return z_BO.to(given_BI.dtype)
        ps_SB = [up.with_ones(up.a @ x_BI.t()) for up in ups]

        def through_hidden() -> Tensor:
            q_RB = x_BI.new_empty(down.a.shape[0], x_BI.shape[0])
            for part in _chunks(x_BI.shape[0], down.a.shape[1], x_BI.device):
                ys_CF = [p[:, part].t() @ up.b for p, up in zip(ps_SB, ups, strict=True)]
                q_RB[:, part] = down.a @ _hidden(activation, ys_CF)[1].t()
            return q_RB

        q_SB = down.with_ones(keep_for_recompute(through_hidden))
        ctx.save_for_backward(given_BI, *flat, q_SB, *ps_SB)
        return transposed_product(q_SB, down.b).to(given_BI.dtype)

    @staticmethod
    def backward(ctx: Any, dz_BO: Tensor) -> tuple[Tensor | None, ...]:
        given_BI, *saved = ctx.saved_tensors
        size = 2 * (ctx.count + 1)
        flat, kept = saved[:size], saved[size:]
        *ups, down = pairs(flat)
        with without_autocast(dz_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                return None, None, *_differentiable(dz_BO, given_BI, ups, ctx.activation, down)
            wants_x = ctx.needs_input_grad[2]
            x_BI, dz_BO = given_BI.to(down.a.dtype), dz_BO.to(down.a.dtype)
            if ctx.backend == "cpp":
                operands = *kept, dz_BO, flat[::2], flat[1::2], ctx.activation, wants_x
                grads = cpp.mlp_backward(x_BI, *operands)
                dx_BI = grads.pop(0).to(given_BI.dtype) if wants_x else None
                return None, None, dx_BI, *grads
            q_SB, *ps_SB = kept
            u_RB = down.without_bias @ dz_BO.t()
            ddown_SO = q_SB @ dz_BO
            da_RF, vs_RB, dups_SF = _through_hidden_backward(ctx.activation, ps_SB, ups, down, u_RB)
            dx_BI = None
            if wants_x:
                dx_BI = transposed_product(stack(vs_RB), stack([up.a for up in ups])).to(given_BI.dtype)
            das_RI = [v_RB @ x_BI for v_RB in vs_RB]
            sums: list[Any] = [grad for both in zip(das_RI, dups_SF, strict=True) for grad in both] + [da_RF, ddown_SO]
        return None, None, dx_BI, *(each.to(x_BI.dtype) for each in sums)


def _cpp_forward(x_BI: Tensor, flat: Sequence[Tensor], activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """P, Q and z by the kernel; a replay of the forward finds P and Q made."""
    made: list[Tensor] = []

    def all_at_once() -> tuple[Tensor, Tensor]:
        made.extend(cpp.mlp(x_BI, flat[::2], flat[1::2], activation))
        return made[0], made[1]

    p_BS, q_BS = keep_for_recompute(all_at_once)
    (z_BO,) = made[2:] or low_rank_output(q_BS, [flat[-2].shape[0]], flat[-1:])
    return p_BS, q_BS, z_BO


def _through_hidden_backward(
    activation: str, ps_SB: Sequence[Tensor], ups: Sequence[LowRankFactors], down: LowRankFactors, u_RB: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """∂A, all V_k and all [∂bias_k; ∂B_k] from U."""
    da_RF: Tensor | None = None
    dups_SF: list[Any] = [None] * len(ups)
    vs_RB = [u_RB.new_empty(up.a.shape[0], u_RB.shape[1]) for up in ups]
    _, act_backward = ACTIVATIONS[activation]
    for part in _chunks(u_RB.shape[1], down.a.shape[1], u_RB.device):
        ys_CF = [p[:, part].t() @ up.b for p, up in zip(ps_SB, ups, strict=True)]
        first_CF, hidden_CF = _hidden(activation, ys_CF)
        da_RF = _add_product(da_RF, u_RB[:, part], hidden_CF)
        dh_CF = u_RB[:, part].t() @ down.a
        gated = len(ups) == 2
        dys_CF = [act_backward(dh_CF * ys_CF[1] if gated else dh_CF, ys_CF[0])]
        if gated:
            dys_CF.append(dh_CF * first_CF)
        for k, (up, p_SB, dy_CF) in enumerate(zip(ups, ps_SB, dys_CF, strict=True)):
            vs_RB[k][:, part] = up.without_bias @ dy_CF.t()
            dups_SF[k] = _add_product(dups_SF[k], p_SB[:, part], dy_CF)
    assert da_RF is not None  # there is one chunk at least
    return da_RF, vs_RB, dups_SF


def _chunks(rows: int, hidden_features: int, device: torch.device) -> list[slice]:
    """Chunks of the batch whose hidden activation and its gradient stay in the caches; at least one, if only an empty
    one. On a CPU the caches that its cores share: in smaller chunks two cores lose more by waiting for each other than
    they gain (162 ms against 139)."""
    elements = hidden_features // 2 if device_type(device) == "cpu" else 2 * hidden_features
    return chunks(rows, elements, device) or [slice(0)]


def _hidden(activation: str, ys_CF: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """act(Y_1), and h."""
    first = ACTIVATIONS[activation][0](ys_CF[0])
    return first, first * ys_CF[1] if len(ys_CF) == 2 else first


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right, in place after the first; half-precision products are added in float32."""
    if total is None:
        return (left @ right).to(merge_dtype(left.dtype))
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    total += left @ right
    return total


def _differentiable(
    dz_BO: Tensor, x_BI: Tensor, ups: Sequence[LowRankFactors], activation: str, down: LowRankFactors
) -> tuple[Tensor | None, ...]:
    """The gradients of x and of all factors, which can be differentiated again: through whole hidden activations."""
    inputs = [x_BI, *(tensor for pair in (*ups, down) for tensor in pair)]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    _, hidden = _hidden(activation, low_rank(x_BI, *ups))
    (z_BO,) = low_rank(hidden, down)
    grads = iter(torch.autograd.grad(z_BO, wanted, dz_BO, create_graph=True))
    return tuple(next(grads) if tensor.requires_grad else None for tensor in inputs)
