"""Attention with dropout on a CPU, whose scores stay in the caches.

    S = scale · Q Kᵀ + mask,   P = softmax(S),   O = (M P / (1 - p)) V
    dV = (M P)ᵀ dO,   dP = M (dO Vᵀ),   dS = P (dP - Σ_S P dP),   dQ = scale · dS K,   dK = scale · dSᵀ Q

torch's fused attention has no dropout on a CPU: there it falls back to score matrices of the whole batch, which it
saves. Here S and P are made chunk by chunk, and again in the backward. A C++ kernel (kernels/cpp/csrc/attention.cpp)
handles float32; for float64, and without the kernel, torch's products handle a few samples at a time, from Q, K, V
and the bits of M, in 1.8 to 2 times the time. Without dropout torch's fused attention takes 1.1 to 1.4 times as long as
the kernel, and causal, where neither computes what is hidden, 1.4 to 2.1 times. In half precision that the processor
has no arithmetic for it takes eight times as long as in float32: there everything is computed in float32.

Shapes: B batch, H heads, T queries, S keys, D width of a head; C samples and heads of a chunk, flattened.
"""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from comera.kernels.cpp import attention as cpp
from comera.kernels.recording import fixed
from comera.kernels.select import supports
from comera.kernels.tracing import traced, transformed
from comera.ops.chunking import chunks
from comera.ops.dropout import as_integers, keep_mask, new_seed
from comera.ops.dtypes import autocast_dtype, kernel_dtype, without_autocast, working_dtype
from comera.ops.once import keep_for_recompute

_MIN_QUERIES = 32  # with fewer the kernel is no faster than torch's fused attention

# Queries of all samples and heads. The causal kernel beside torch's, heads of 64, one core of an AMD EPYC 7003, forward
# and backward: 0.8 times as fast with 4 x 4 x 32 queries, 1.0 with 4 x 4 x 64 and 1 x 4 x 96, 1.4 to 1.5 with
# 4 x 12 x 128, 1.9 to 2.1 with 4 x 4 x 256 and 12 x 512; forward alone 0.7, 1.0, 1.3 to 1.6 and 1.6 to 1.8.
_MIN_CAUSAL = 1024


def attention(
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Scaled dot-product attention, as `F.scaled_dot_product_attention` defines it.

    Args:
        q_BHTD, k_BHSD, v_BHSD: (batch, heads, length, width), one dtype; the heads of k and v divide q's.
        mask: boolean (True takes part) or added to the scores, broadcastable to (batch, heads, T, S).
        dropout: probability p of zeroing a weight. scale: by default width^-½.

    Returns:
        (batch, heads, T, width).

    Raises:
        ValueError: a mask, and is_causal. torch documents that as an error, but some of its kernels add both.

    Own code, with first derivatives only, runs on a CPU with dropout and for training in float32; everything else is
    torch's. Half precision is computed in float32 where the processor has no arithmetic for it or the kernel is faster,
    which serves in training alone.
    """
    if is_causal and mask is not None:
        raise ValueError(
            f"expected either a mask or is_causal, got both, the mask of shape {tuple(mask.shape)}: "
            "hide later keys in the mask, too"
        )
    dtype = autocast_dtype(q_BHTD) or q_BHTD.dtype
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in (q_BHTD, k_BHSD, v_BHSD))
    computed = kernel_dtype(q_BHTD, "attention") if trained or dropout else working_dtype(q_BHTD)
    if not traced() and computed != dtype:
        mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
        wide = q_BHTD.float(), k_BHSD.float(), v_BHSD.float()
        with without_autocast(q_BHTD):
            return attention(*wide, mask, dropout=dropout, scale=scale, is_causal=is_causal).to(dtype)
    grouped = k_BHSD.shape[1] != q_BHTD.shape[1]
    kernel = _supported(q_BHTD, k_BHSD, v_BHSD, dropout, is_causal)
    own = q_BHTD.device.type == "cpu" and q_BHTD.ndim == 4 and not is_causal and dropout > 0
    fits = 0 <= dropout < 1 and not traced() and not (mask is not None and mask.requires_grad)
    if not fits or not (kernel or own):
        # torch's fused kernels know neither samples of a vmap nor forward derivatives
        with sdpa_kernel(SDPBackend.MATH) if transformed() else nullcontext():
            return F.scaled_dot_product_attention(
                q_BHTD, k_BHSD, v_BHSD, mask, dropout, scale=scale, is_causal=is_causal, enable_gqa=grouped
            )
    o_BHTD: Tensor
    mask = None if mask is None else _added(mask)
    scale = q_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if kernel:
        o_BHTD = _Kernel.apply(q_BHTD, k_BHSD, v_BHSD, mask, dropout, scale, is_causal)
        return o_BHTD
    if grouped:
        times = q_BHTD.shape[1] // k_BHSD.shape[1]
        k_BHSD, v_BHSD = k_BHSD.repeat_interleave(times, 1), v_BHSD.repeat_interleave(times, 1)
    if mask is not None:
        mask = mask.expand(q_BHTD.shape[0], *mask.shape[1:])
    with without_autocast(q_BHTD):
        o_BHTD = _Attention.apply(q_BHTD, k_BHSD, v_BHSD, mask, dropout, scale)
    return o_BHTD


def _supported(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, dropout: float, is_causal: bool) -> bool:
    """Whether the kernel supports these operands and is faster.

    Without dropout it is faster only outside of autocast's half precision, for enough queries, and if not causal only
    for gradients.
    """
    operands = (q_BHTD, k_BHSD, v_BHSD)
    if not (q_BHTD.ndim == k_BHSD.ndim == v_BHSD.ndim == 4 and supports("attention", *operands)):
        return False
    (batch, heads, queries, width), (_, groups, keys, _) = q_BHTD.shape, k_BHSD.shape
    if k_BHSD.shape != (batch, groups, keys, width) or v_BHSD.shape[:3] != k_BHSD.shape[:3]:
        return False  # torch's attention reports it
    trained = torch.is_grad_enabled() and any(t.requires_grad for t in operands)
    enough = batch * heads * queries >= _MIN_CAUSAL if is_causal else trained and queries >= _MIN_QUERIES
    faster = dropout > 0 or (enough and autocast_dtype(q_BHTD) is None)
    return faster and groups > 0 and heads % groups == 0


def _added(mask: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores, in four dimensions; None if there is nothing to add."""
    mask = mask[(None,) * (4 - mask.ndim)]
    if mask.dtype != torch.bool:
        return mask
    mask = mask[tuple(slice(None) if step else slice(1) for step in mask.stride())]  # expanded dimensions once
    if not (mask.is_meta or fixed()) and mask.all():
        return None
    return torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)


class _Kernel(torch.autograd.Function):
    """Attention by the C++ kernel. settings: scale, is_causal. Saved: O, two numbers a query, and a seed."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, dropout: float, *settings: Any
    ) -> Tensor:
        seed = new_seed() if dropout else None
        mask = None if mask is None else mask.to(q_BHTD.dtype)
        ctx.settings = dropout, *settings
        operands = (q_BHTD, k_BHSD, v_BHSD, mask, seed)
        o_BHTD: Tensor
        o_BHTD, norms = keep_for_recompute(lambda: cpp.attention(*operands, *ctx.settings))
        ctx.save_for_backward(o_BHTD, norms, *operands)
        return o_BHTD

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        return *cpp.attention_backward(do_BHTD, *ctx.saved_tensors, *ctx.settings), None, None, None, None


class _Attention(torch.autograd.Function):
    """Attention by torch's products, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, dropout: float, scale: float
    ) -> Tensor:
        batch, heads, queries, _ = q_BHTD.shape
        keep, ctx.kept_scale = None, 1.0
        if dropout:
            keep, ctx.kept_scale = keep_mask((batch, heads, queries, k_BHSD.shape[2]), dropout)
        ctx.scale = scale
        if batch > 1:  # for the products of chunks, backward too; a single sample is used as it is
            q_BHTD, k_BHSD, v_BHSD = (t.contiguous() for t in (q_BHTD, k_BHSD, v_BHSD))
        ctx.save_for_backward(q_BHTD, k_BHSD, v_BHSD, mask, keep)

        def chunk_by_chunk() -> Tensor:
            # (B, T, H, D) in memory: what follows attention flattens the heads into features without a copy
            o_BTHD = q_BHTD.new_empty(batch, queries, heads, v_BHSD.shape[3])
            for part in _chunks(q_BHTD, k_BHSD):
                q, k, v = _flat(q_BHTD[part]), _flat(k_BHSD[part]), _flat(v_BHSD[part])
                p_CTS = _probabilities(q, k, None if mask is None else mask[part], scale)
                if keep is not None:
                    p_CTS.mul_(as_integers(keep[part]).flatten(0, 1))
                o = _scaled_bmm(p_CTS, v, ctx.kept_scale)
                o_BTHD[part] = o.view(-1, heads, queries, o.shape[2]).transpose(1, 2)
            return o_BTHD

        return keep_for_recompute(chunk_by_chunk).transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do_BHTD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHTD, k_BHSD, v_BHSD, mask, keep = ctx.saved_tensors
        heads = q_BHTD.shape[1]
        grads = [t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (q_BHTD, k_BHSD, v_BHSD)]
        with without_autocast(do_BHTD):
            for part in _chunks(q_BHTD, k_BHSD):
                q, k, v, do = (_flat(t[part]) for t in (q_BHTD, k_BHSD, v_BHSD, do_BHTD))
                p_CTS = _probabilities(q, k, None if mask is None else mask[part], ctx.scale)
                dp_CTS, kept_CTS = _scaled_bmm(do, v.transpose(1, 2), ctx.kept_scale), p_CTS
                if keep is not None:
                    keep_CTS = as_integers(keep[part]).flatten(0, 1)
                    dp_CTS.mul_(keep_CTS)
                    kept_CTS = p_CTS * keep_CTS
                dv = _scaled_bmm(kept_CTS.transpose(1, 2), do, ctx.kept_scale)
                ds_CTS = torch._softmax_backward_data(dp_CTS, p_CTS, -1, p_CTS.dtype)
                dq, dk = _scaled_bmm(ds_CTS, k, ctx.scale), _scaled_bmm(ds_CTS.transpose(1, 2), q, ctx.scale)
                for grad, value in zip(grads, (dq, dk, dv), strict=True):
                    grad[part] = value.view(-1, heads, *value.shape[1:])
        return *grads, None, None, None


def _chunks(q_BHTD: Tensor, k_BHSD: Tensor) -> list[slice]:
    """Chunks of samples whose scores stay in the caches that the cores share."""
    _, heads, queries, _ = q_BHTD.shape
    return chunks(q_BHTD.shape[0], heads * queries * k_BHSD.shape[2], q_BHTD.device)


def _flat(t_BHTD: Tensor) -> Tensor:
    """(C, T, D) in float32 or wider; a view where possible, as for one sample."""
    t_BHTD = t_BHTD.to(torch.promote_types(t_BHTD.dtype, torch.float32))
    return t_BHTD[0] if t_BHTD.shape[0] == 1 else t_BHTD.flatten(0, 1)


def _probabilities(q_CTD: Tensor, k_CSD: Tensor, mask_BHTS: Tensor | None, scale: float) -> Tensor:
    """softmax(scale · Q Kᵀ + mask), zero in rows without any key."""
    s_CTS = _scaled_bmm(q_CTD, k_CSD.transpose(1, 2), scale)
    if mask_BHTS is None:
        return s_CTS.softmax(-1)
    s_BHTS = s_CTS.view(mask_BHTS.shape[0], -1, *s_CTS.shape[1:])
    s_BHTS.add_(mask_BHTS)
    p_CTS = s_CTS.softmax(-1)
    return p_CTS.nan_to_num_(0.0) if mask_BHTS.isinf().any() else p_CTS


def _scaled_bmm(a_CMK: Tensor, b_CKN: Tensor, scale: float) -> Tensor:
    """scale · a b, in one pass over the result."""
    return torch.baddbmm(a_CMK.new_zeros(()), a_CMK, b_CKN, beta=0, alpha=scale)
