"""The operations of mlp.cpp.

Shapes: B batch, I/O in/out features, F hidden features, R rank, S rows of b: the rank, and one more with a bias.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.gated import ACTIVATIONS
from comera.kernels.cpp.library import call, checked, floats, operation, words
from comera.kernels.cpp.low_rank import Factors, checked_factors, starts
from comera.kernels.cpp.memory import empty


def _checked(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor]) -> list[Factors]:
    """The weights as the kernels read them. Raises RuntimeError unless they fit x and each other."""
    if len(as_RI) != len(bs_SF) or len(as_RI) not in (2, 3):
        raise RuntimeError(f"expected A and b of two or three weights, got {len(as_RI)} and {len(bs_SF)}")
    ups = checked_factors(as_RI[:-1], bs_SF[:-1], x_BI.shape[1])
    hidden = {up.out_features for up in ups}
    if len(hidden) > 1:
        raise RuntimeError(f"expected two weights to as many hidden features, got {hidden}")
    return [*ups, *checked_factors(as_RI[-1:], bs_SF[-1:], *hidden)]


def _words(weights: Sequence[Factors], p_BS: Tensor, q_BS: Tensor, z_BO: Tensor, grads: Sequence[Tensor] = ()) -> bytes:
    """The weights as low_rank.h has them. grads: ∂A and ∂b of each in turn."""
    *ups, down = weights
    flat: list[int] = []
    for k, (up, p) in enumerate(zip(ups, starts(p_BS, ups), strict=True)):
        flat += up.words(p, None, *grads[2 * k : 2 * k + 2])
    return words([*flat, *down.words(q_BS.data_ptr(), z_BO, *grads[-2:])])


def _mlp_flops(x: Any, a: Any, b: Any, activation: str) -> int:
    """P_k, Y_k, Q and z."""
    return int(2 * x[0] * sum(r * i + s * o for (r, i), (s, o) in zip(a, b, strict=True)))


@operation(_mlp_flops)
def mlp(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor], activation: str) -> list[Tensor]:
    """All [1 P_k] in one tensor, [1 Q] (`Factors.width` columns each) and z (B, O).

    x (B, I); A (R, I) and b (S, F) of one or two weights of x, then A (R, F) and b (S, O) of that of h. The first row
    of a b is its bias, if it has one row more than its A. activation: a name in ACTIVATIONS.
    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    batch, features = x_BI.shape
    x_BI, weights = floats("x", x_BI), _checked(x_BI, as_RI, bs_SF)
    *ups, down = weights
    p_width = sum(up.width for up in ups)
    p_BS, q_BS, z_BO = empty(batch, p_width), empty(batch, down.width), empty(batch, down.out_features)
    given = batch, features, x_BI, len(ups), _words(weights, p_BS, q_BS, z_BO), p_width, down.width
    call("mlp", ACTIVATIONS.index(activation), *given)
    return [p_BS, q_BS, z_BO]


def _mlp_backward_flops(x: Any, p: Any, q: Any, dz: Any, a: Any, b: Any, activation: str, dx: bool) -> int:
    """For each weight of x: Y_k again, ∂B_k, V_k, ∂A_k and its share of dx; for that of h: dh and ∂A, U and ∂B."""
    each = [(rank, inputs, rows, outputs) for (rank, inputs), (rows, outputs) in zip(a, b, strict=True)]
    total = sum((2 * rows + rank) * hidden + (1 + dx) * rank * inputs for rank, inputs, rows, hidden in each[:-1])
    rank, hidden, rows, outputs = each[-1]
    return int(2 * x[0] * (total + 2 * rank * hidden + (rank + rows) * outputs))


@operation(_mlp_backward_flops)
def mlp_backward(
    x_BI: Tensor,
    p_BS: Tensor,
    q_BS: Tensor,
    dz_BO: Tensor,
    as_RI: Sequence[Tensor],
    bs_SF: Sequence[Tensor],
    activation: str,
    wants_x: bool,
) -> list[Tensor]:
    """dx where wanted, then ∂A and [∂bias; ∂B] of each weight in turn. Raises RuntimeError as `mlp` does."""
    batch, features = x_BI.shape
    x_BI, weights = floats("x", x_BI), _checked(x_BI, as_RI, bs_SF)
    *ups, down = weights
    p_width = sum(up.width for up in ups)
    p_BS, q_BS = checked("P", p_BS, batch, p_width), checked("Q", q_BS, batch, down.width)
    dz_BO = checked("dz", dz_BO, batch, down.out_features)
    dx_BI = empty(batch, features) if wants_x else None
    grads = [made for up in ups for made in (x_BI.new_empty(up.rank, features), torch.empty_like(up.b))]
    grads += [x_BI.new_empty(down.rank, ups[0].out_features), torch.empty_like(down.b)]
    given = batch, features, x_BI, len(ups), _words(weights, p_BS, q_BS, dz_BO, grads), p_width, down.width
    call("mlp_backward", ACTIVATIONS.index(activation), *given, dx_BI)
    return [*([] if dx_BI is None else [dx_BI]), *grads]
