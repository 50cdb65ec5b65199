"""The operation of low_rank_cross_entropy.cpp: losses of a head of low rank, and gradients, without its logits."""

from typing import Any

from torch import Tensor

from comera.kernels.cpp.cross_entropy import checked_labels
from comera.kernels.cpp.library import call, floats, operation
from comera.kernels.cpp.memory import empty


def _flops(p: Any, b: Any, labels: Any, ignored: int, wants_b: bool) -> int:
    """The logits twice, U and ∂B."""
    return int(2 * p[0] * b[1] * (2 * b[0] + p[1] + b[0] * wants_b))


@operation(_flops)
def low_rank_cross_entropy(
    p_BR: Tensor, b_SV: Tensor, labels_B: Tensor, ignored: int, wants_b: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (B) of the logits [1 P] [bias; B] or P B, U (B, R) = dz Bᵀ, and [∂bias; ∂B] (S, V), which is empty unless
    `wants_b`; gradients of the sum of the losses. Rows whose label is `ignored` add nothing.

    p: (B, R). b: (R, V), or (1 + R, V) with a bias.
    Raises RuntimeError unless both are float32 on the CPU, and labels one int64 a row, in [0, V) or `ignored`.
    """
    if p_BR.ndim != 2 or b_SV.ndim != 2 or not 0 <= b_SV.shape[0] - p_BR.shape[1] <= 1:
        came = f"{list(p_BR.shape)} and {list(b_SV.shape)}"
        raise RuntimeError(f"expected P (rows, rank), and B of as many rows as the rank or one more, got {came}")
    (batch, rank), (rows, classes) = p_BR.shape, b_SV.shape
    p_BR, b_SV = floats("P", p_BR), floats("B", b_SV)
    labels_B = checked_labels(labels_B, batch, classes, ignored)
    losses, u_BR = empty(batch), empty(batch, rank)
    db_SV = empty(*(b_SV.shape if wants_b else (0, classes)))
    db = db_SV if wants_b else None
    call("low_rank_cross_entropy", batch, rank, rows, classes, p_BR, b_SV, labels_B, ignored, losses, u_BR, db)
    return losses, u_BR, db_SV
