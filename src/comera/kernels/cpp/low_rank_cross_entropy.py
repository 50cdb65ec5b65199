"""The operations of low_rank_cross_entropy.cpp: losses of a head of low rank, and gradients, without its logits.

They differ in how B lies in memory: as the second factor of a weight, or as the rows of a table."""

from torch import Tensor

from comera.kernels.cpp.cross_entropy import checked_labels
from comera.kernels.cpp.library import call, checked, floats, operation
from comera.kernels.cpp.memory import empty


def _flops(batch: int, rank: int, classes: int, bias: bool, wants_b: bool) -> int:
    """The logits twice, U and ∂B."""
    return 2 * batch * classes * (2 * (rank + bias) + rank + (rank + bias) * wants_b)


@operation(lambda p, b, labels, ignored, wants_b: _flops(p[0], p[1], b[1], b[0] > p[1], wants_b))
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
    p_BR, b_SV, bias = floats("P", p_BR), floats("B", b_SV), b_SV.shape[0] - p_BR.shape[1]
    (batch, rank), classes = p_BR.shape, b_SV.shape[1]
    labels_B = checked_labels(labels_B, batch, classes, ignored)
    losses, u_BR, db_SV = empty(batch), empty(batch, rank), empty(*(b_SV.shape if wants_b else (0, classes)))
    biases, dbias = (b_SV[0], db_SV[0] if wants_b else None) if bias else (None, None)
    db = db_SV[bias:] if wants_b else None
    operands = p_BR, b_SV[bias:], 0, biases, labels_B
    call("low_rank_cross_entropy", batch, rank, classes, *operands, ignored, losses, u_BR, db, dbias)
    return losses, u_BR, db_SV


@operation(
    lambda p, table, bias, labels, ignored, wants_table: _flops(p[0], p[1], table[0], bias is not None, wants_table)
)
def linear_cross_entropy(
    p_BR: Tensor, table_VR: Tensor, bias_V: Tensor | None, labels_B: Tensor, ignored: int, wants_table: bool
) -> list[Tensor]:
    """Losses (B) of the logits P tableᵀ + bias, U (B, R) = dz table; where wanted ∂table, and ∂bias if there is one.

    As `low_rank_cross_entropy` otherwise.
    """
    if p_BR.ndim != 2 or table_VR.ndim != 2 or p_BR.shape[1] != table_VR.shape[1]:
        came = f"{list(p_BR.shape)} and {list(table_VR.shape)}"
        raise RuntimeError(f"expected rows and a table of as many columns, got {came}")
    (batch, rank), classes = p_BR.shape, table_VR.shape[0]
    p_BR, table_VR, bias_V = floats("P", p_BR), floats("a table", table_VR), checked("bias", bias_V, classes)
    labels_B = checked_labels(labels_B, batch, classes, ignored)
    made = [empty(batch), empty(batch, rank)]
    if wants_table:
        made += [empty(classes, rank), *([] if bias_V is None else [empty(classes)])]
    losses, u_BR, dtable, dbias = (*made, None, None)[:4]
    operands = p_BR, table_VR, 1, bias_V, labels_B
    call("low_rank_cross_entropy", batch, rank, classes, *operands, ignored, losses, u_BR, dtable, dbias)
    return made
