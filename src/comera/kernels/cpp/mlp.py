"""The operations of mlp.cpp.

Shapes: B batch, I/O in/out features, F hidden features, R rank, S rows of b: the rank, and one more with a bias.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, checked, floats, operation, words
from comera.kernels.cpp.low_rank import Factors, checked_factors
from comera.kernels.cpp.memory import empty

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")  # in the order of mlp.cpp


def _checked(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor]) -> list[Factors]:
    """The weights as the kernels read them. Raises RuntimeError unless they fit x and each other."""
    if len(as_RI) != len(bs_SF) or len(as_RI) not in (2, 3):
        raise RuntimeError(f"expected A and b of two or three weights, got {len(as_RI)} and {len(bs_SF)}")
    features, hidden = x_BI.shape[1], bs_SF[0].shape[1]
    ups = [checked_factors(a, b, features) for a, b in zip(as_RI[:-1], bs_SF[:-1], strict=True)]
    if ups[-1].out_features != hidden:
        raise RuntimeError(f"expected two weights to {hidden} hidden features, got {ups[-1].out_features}")
    return [*ups, checked_factors(as_RI[-1], bs_SF[-1], hidden)]


def _words(weights: Sequence[Factors], p_BS: Tensor, q_BS: Tensor, z_BO: Tensor, grads: Sequence[Tensor] = ()) -> bytes:
    """The weights as low_rank.h has them. grads: ∂A and ∂b of each in turn."""
    flat: list[int] = []
    at, last = p_BS.data_ptr(), len(weights) - 1
    for k, (a, b, rank, rows, outputs, size) in enumerate(weights):
        p, y = (q_BS.data_ptr(), z_BO.data_ptr()) if k == last else (at, 0)
        da, db = (grads[2 * k].data_ptr(), grads[2 * k + 1].data_ptr()) if grads else (0, 0)
        flat += (rank, rows, outputs, a.data_ptr(), b.data_ptr(), p, y, da, db)
        at += 4 * size
    return words(flat)


def _mlp_flops(x: Any, a: Any, b: Any, activation: str) -> int:
    """P_k, Y_k, Q and z."""
    return int(2 * x[0] * sum(r * i + s * o for (r, i), (s, o) in zip(a, b, strict=True)))


@operation("mlp(Tensor x, Tensor[] a, Tensor[] b, str activation) -> Tensor[]", _mlp_flops)
def mlp(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SF: Sequence[Tensor], activation: str) -> list[Tensor]:
    """All [1 P_k] in one tensor, [1 Q] (`low_rank.width` columns each) and z (B, O).

    x (B, I); A (R, I) and b (S, F) of one or two weights of x, then A (R, F) and b (S, O) of that of h. The first row
    of a b is its bias, if it has one row more than its A. activation: a name in ACTIVATIONS.
    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    batch, features = x_BI.shape
    x_BI, weights = floats("x", x_BI), _checked(x_BI, as_RI, bs_SF)
    *ups, down = weights
    p_width = sum(up.width for up in ups)
    p_BS, q_BS, z_BO = empty(batch, p_width), empty(batch, down.width), empty(batch, down.out_features)
    given = batch, features, x_BI.data_ptr(), len(weights), _words(weights, p_BS, q_BS, z_BO), p_width, down.width
    call("mlp", ACTIVATIONS.index(activation), *given, torch.get_num_threads())
    return [p_BS, q_BS, z_BO]


def _mlp_backward_flops(x: Any, p: Any, q: Any, dz: Any, a: Any, b: Any, activation: str, dx: bool) -> int:
    """For each weight of x: Y_k again, ∂B_k, V_k, ∂A_k and its share of dx; for that of h: dh and ∂A, U and ∂B."""
    each = [(rank, inputs, rows, outputs) for (rank, inputs), (rows, outputs) in zip(a, b, strict=True)]
    total = sum((2 * rows + rank) * hidden + (1 + dx) * rank * inputs for rank, inputs, rows, hidden in each[:-1])
    rank, hidden, rows, outputs = each[-1]
    return int(2 * x[0] * (total + 2 * rank * hidden + (rank + rows) * outputs))


@operation(
    "mlp_backward(Tensor x, Tensor p, Tensor q, Tensor dz, Tensor[] a, Tensor[] b, str activation, bool dx)"
    " -> Tensor[]",
    _mlp_backward_flops,
)
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
    dx_BI = [empty(batch, features)] if wants_x else []
    grads = [torch.empty_like(factor) for weight in weights for factor in weight[:2]]
    given = (
        batch,
        features,
        x_BI.data_ptr(),
        len(weights),
        _words(weights, p_BS, q_BS, dz_BO, grads),
        p_width,
        down.width,
    )
    dx = address(dx_BI[0] if wants_x else None)
    call("mlp_backward", ACTIVATIONS.index(activation), *given, dx, torch.get_num_threads())
    return [*dx_BI, *grads]
