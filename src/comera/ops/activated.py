"""y = act(x A) B + bias: a weight in low-rank form with an activation between its factors (CoLA).

    forward    P = A xᵀ,   Q = act(P),   y = [1; Q]ᵀ [bias; B]

By plain products under autograd. P has rank elements per row of the batch: recomputation (memory/replay.py) keeps it
and makes Q and y again, which is what CoLA-M does.

Shapes: B flattened batch, I/O in/out features, R rank.
"""

from torch import Tensor

from comera.ops.activations import ACTIVATIONS
from comera.ops.low_rank import LowRankFactors, transposed_product


def activated_low_rank(x_BI: Tensor, factors: LowRankFactors, activation: str) -> Tensor:
    """act(x Aᵀ) B + bias.

    Args:
        x_BI: the batch (B, in_features).
        factors: of one weight, in the `kernel_dtype` of x. Autocast must be off.
        activation: a name in `ACTIVATIONS`.

    Returns:
        (B, out_features) in x's dtype. Differentiable twice.

    Source: docs/method.md §1.
    """
    act, _ = ACTIVATIONS[activation]
    q_RB = act(factors.a @ x_BI.to(factors.a.dtype).t())
    return transposed_product(factors.with_ones(q_RB), factors.b).to(x_BI.dtype)
