"""Cross-entropy of the output head of a language model, without its logits ever being held whole.

    forward    z_CV = head(x_CI),   loss_C = log Σ_V exp(z) - z[label],   dz = softmax(z) - onehot(label)
               dx_CI, dθ by the head's own derivative at dz, chunk by chunk of the rows
    backward   dx · g, dθ · g,   g the derivative of the sum of the losses

The logits of 1,024 tokens in a vocabulary of 32,768 take 134 MB, and torch holds them, their log-softmax and two
gradients of that size: more than the rest of a small model's training step takes in memory and, compressed, in time.
Here a chunk goes through the head and back before the next one begins, so the head is computed once.

For a head of low rank, z = P B + bias, a C++ kernel does without logits in memory: it makes each of them twice, as
tiles in the caches of a core (kernels/cpp/csrc/low_rank_cross_entropy.cpp).

Shapes: B rows (tokens), C rows of a chunk, I features, V classes, R rank, S rank plus the bias's row; θ the tensors of
the head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import cross_entropy as cpp
from comera.kernels.cpp import low_rank_cross_entropy as cpp_low_rank
from comera.ops.chunking import chunks

Head = Callable[..., Tensor]
"""(x_CI, *tensors) -> logits (C, V)."""
_Kernel = Callable[..., list[Tensor]]
"""(P, *weight, labels, ignored, whether the weight needs gradients) -> losses, gradients of P and of the weight."""

_LARGER = 4  # chunks than elsewhere: each one adds once more to the gradients of the head's tensors


def head_cross_entropy(
    x_BI: Tensor, labels_B: Tensor, classes: int, head: Head, tensors: Sequence[Tensor], ignored: int = -100
) -> Tensor:
    """The sum over rows of the cross-entropy of head(x), in float32 at least; rows labelled `ignored` add nothing.

    Args:
        x_BI: input of the head. labels_B: int64, in [0, classes) or `ignored`.
        head: a function of rows of x and of all that needs gradients, `tensors`; autograd differentiates it.

    Returns:
        A scalar, with first derivatives only.
    """
    loss: Tensor = _HeadCrossEntropy.apply(x_BI, labels_B, classes, head, ignored, *tensors)
    return loss


def low_rank_cross_entropy(p_BR: Tensor, b_SV: Tensor, labels_B: Tensor, ignored: int = -100) -> Tensor:
    """The sum over rows of the cross-entropy of logits P B + bias; rows labelled `ignored` add nothing.

    Args:
        p_BR: the low-rank activations P = x A of the head's input.
        b_SV: B (R, V), or [bias; B] (1 + R, V).
        labels_B: int64, in [0, V) or `ignored`.

    Returns:
        A scalar in float32 at least, with first derivatives only.
    """
    if select.low_rank_head_backend(p_BR, b_SV) == "cpp":
        loss: Tensor = _LowRankCrossEntropy.apply(_of_factor, labels_B, ignored, p_BR, b_SV)
        return loss
    has_bias = b_SV.shape[0] > p_BR.shape[1]

    def head(p_CR: Tensor, b_SV: Tensor) -> Tensor:
        return torch.addmm(b_SV[0], p_CR, b_SV[1:]) if has_bias else p_CR @ b_SV

    return head_cross_entropy(p_BR, labels_B, b_SV.shape[1], head, [b_SV], ignored)


def linear_cross_entropy(
    p_BR: Tensor, table_VR: Tensor, bias_V: Tensor | None, labels_B: Tensor, ignored: int = -100
) -> Tensor:
    """`low_rank_cross_entropy` of logits P tableᵀ + bias: Bᵀ lies in memory as a table of the classes' rows.

    Args:
        p_BR: rows, the input of a dense head or low-rank activations.
        table_VR: the weight of the head, or the left factor of a table of low rank. bias_V: or None.
        labels_B: int64, in [0, V) or `ignored`.

    Returns:
        A scalar in float32 at least, with first derivatives only.
    """
    tensors = [table_VR] if bias_V is None else [table_VR, bias_V]
    if select.low_rank_head_backend(p_BR, *tensors) == "cpp":
        kernel = cpp_low_rank.linear_cross_entropy
        loss: Tensor = _LowRankCrossEntropy.apply(kernel, labels_B, ignored, p_BR, table_VR, bias_V)
        return loss
    return head_cross_entropy(p_BR, labels_B, table_VR.shape[0], F.linear, tensors, ignored)


def _of_factor(p_BR: Tensor, b_SV: Tensor, labels_B: Tensor, ignored: int, wants_b: bool) -> list[Tensor]:
    losses_B, u_BR, db_SV = cpp_low_rank.low_rank_cross_entropy(p_BR, b_SV, labels_B, ignored, wants_b)
    return [losses_B, u_BR, db_SV] if wants_b else [losses_B, u_BR]


class _LowRankCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss, and scaled in the backward where they lie: a copy of a large table's takes
    as long as a layer of a small model. What a backward gives away a second one computes again."""

    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, labels_B: Tensor, ignored: int, *operands: Tensor | None) -> Tensor:
        _, *wants = ctx.needs_input_grad[3:]
        ctx.kernel, ctx.ignored = kernel, ignored
        ctx.save_for_backward(labels_B, *operands)
        losses_B, *ctx.made = kernel(*operands, labels_B, ignored, any(wants))
        return losses_B.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        labels_B, *operands = ctx.saved_tensors
        made, ctx.made = ctx.made, None
        if made is None:
            _, *made = ctx.kernel(*operands, labels_B, ctx.ignored, any(ctx.needs_input_grad[4:]))
        grads = [grad.mul_(dloss) for grad in made]
        grads += [None] * (len(operands) - len(grads))
        wanted = zip(grads, ctx.needs_input_grad[3:], strict=True)
        return None, None, None, *(grad if wants else None for grad, wants in wanted)


class _HeadCrossEntropy(torch.autograd.Function):
    """Gradients are computed with the loss, chunk by chunk, and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any, x_BI: Tensor, labels_B: Tensor, classes: int, head: Head, ignored: int, *tensors: Tensor
    ) -> Tensor:
        (x_wanted, *_) = ctx.needs_input_grad
        wanted = ctx.needs_input_grad[5:]
        leaves = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, wanted, strict=True)]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        dx_BI = torch.empty_like(x_BI, memory_format=torch.contiguous_format) if x_wanted else None
        sums: list[Tensor] = []
        loss = x_BI.new_zeros((), dtype=torch.promote_types(x_BI.dtype, torch.float32))
        for rows in chunks(x_BI.shape[0], -(-classes // _LARGER), x_BI.device):
            x_CI = x_BI[rows].detach().requires_grad_(x_wanted)
            with torch.enable_grad():
                z_CV = head(x_CI, *leaves)
            losses_C, dz_CV = _losses(z_CV.detach(), labels_B[rows], ignored)
            loss += losses_C.sum()
            inputs = [x_CI, *trained] if x_wanted else trained
            if not inputs:
                continue
            grads = list(torch.autograd.grad(z_CV, inputs, dz_CV))
            if dx_BI is not None:
                dx_BI[rows] = grads.pop(0)
            sums = [total.add_(grad) for total, grad in zip(sums, grads, strict=True)] if sums else grads
        if not sums:  # without rows
            sums = [torch.zeros_like(leaf) for leaf in trained]
        each = iter(sums)
        ctx.save_for_backward(dx_BI, *(next(each) if needs else None for needs in wanted))
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dx_BI, *grads = (None if grad is None else grad * dloss.to(grad.dtype) for grad in ctx.saved_tensors)
        return dx_BI, None, None, None, None, *grads


def _losses(z_CV: Tensor, labels_C: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """Losses of the rows, in float32 at least, and their gradients in z's dtype."""
    if select.supports("cross_entropy", z_CV):
        return cpp.cross_entropy(z_CV, labels_C, ignored)
    logp_CV = F.log_softmax(z_CV, -1, dtype=torch.promote_types(z_CV.dtype, torch.float32))
    kept_C = labels_C != ignored
    index_C1 = labels_C.where(kept_C, 0)[:, None]
    losses_C = -logp_CV.gather(1, index_C1)[:, 0].where(kept_C, 0)
    dz_CV = logp_CV.exp_().scatter_add_(1, index_C1, -torch.ones_like(losses_C)[:, None])
    return losses_C, dz_CV.mul_(kept_C[:, None]).to(z_CV.dtype)
