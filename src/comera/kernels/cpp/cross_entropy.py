"""The operation of cross_entropy.cpp: losses of rows of logits, and their gradients."""

import torch
from torch import Tensor

from comera.kernels.cpp.library import call, check_shape, floats, on_cpu, operation
from comera.kernels.cpp.memory import empty
from comera.kernels.recording import fixed


def checked_labels(labels: Tensor, rows: int, classes: int, ignored: int) -> Tensor:
    """`labels` as kernels read them.

    Raises RuntimeError unless they are one int64 a row, on the CPU, in [0, classes) or `ignored`.
    """
    check_shape("labels", labels, (rows,))
    if labels.dtype is not torch.int64 or not on_cpu(labels):
        raise RuntimeError(f"expected labels of dtype int64 on the CPU, got {labels.dtype} on {labels.device}")
    labels = labels.contiguous()
    if fixed():
        good = (((labels >= 0) & (labels < classes)) | (labels == ignored)).all()
        torch._assert_async(good, f"expected labels from 0 to {classes - 1} or {ignored}")
        return labels
    wrong = labels[:0] if labels.is_meta else labels[((labels < 0) | (labels >= classes)) & (labels != ignored)]
    if wrong.numel():
        raise RuntimeError(f"expected labels from 0 to {classes - 1} or {ignored}, got {wrong[0].item()}")
    return labels


@operation()
def cross_entropy(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses (rows) of logits (rows, classes), and their gradients softmax - onehot(label) (rows, classes); zeros in
    rows whose label is `ignored`.

    Raises RuntimeError unless logits are float32 on the CPU and labels one int64 a row, in [0, classes) or `ignored`.
    """
    if logits.ndim != 2:
        raise RuntimeError(f"expected logits of two dimensions, got {list(logits.shape)}")
    rows, classes = logits.shape
    logits = floats("logits", logits)
    labels = checked_labels(labels, rows, classes, ignored)
    losses, gradients = empty(rows), empty(rows, classes)
    call("cross_entropy", rows, classes, logits, labels, ignored, losses, gradients)
    return losses, gradients
