"""The operations of attention.cpp.

Shapes: B batch, H heads, G heads of keys and values, T queries, S keys, D width of queries and keys, E of values.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from comera.kernels.cpp.library import call, operation, strided, words
from comera.kernels.cpp.memory import empty
from comera.kernels.cpp.residual_norm import drop

_NO_VIEW = [0] * 4


def _attention_flops(q: Any, k: Any, v: Any, *_: Any) -> int:
    """Q Kᵀ and P V."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (width + v[3]))


@operation(_attention_flops)
def attention(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """O (B, H, T, E) from q (B, H, T, D), k (B, G, S, D) and v (B, G, S, E), G dividing H, and norms (2, B, H, T).

    mask: floats added to the scores, broadcastable to (B, H, T, S). seed: one int64, of dropout with probability p;
    None for no dropout. norms: for each query the largest score, and one over the sum of the exponentials below it.
    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    sizes, kept = _checked(q_BHTD, k_BGSD, v_BGSE, mask)
    (batch, heads, queries, _), value_width = q_BHTD.shape, v_BGSE.shape[3]
    o_BHTE, norms = with_contiguous_heads(batch, heads, queries, value_width), empty(2, batch, heads, queries)
    call("attention", *sizes_and_views(sizes, [*kept, o_BHTE]), *drop(seed, p), scale, is_causal, norms)
    return o_BHTE, norms


def _attention_backward_flops(do: Any, o: Any, norms: Any, q: Any, k: Any, v: Any, *_: Any) -> int:
    """Q Kᵀ, dS K and dSᵀ Q; dO Vᵀ and Pᵀ dO."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3]))


@operation(_attention_backward_flops)
def attention_backward(
    do_BHTE: Tensor,
    o_BHTE: Tensor,
    norms: Tensor,
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v from that of O, and O and norms of the forward. Raises RuntimeError as it does."""
    sizes, kept = _checked(q_BHTD, k_BGSD, v_BGSE, mask)
    batch, heads, groups, queries, keys, width, value_width = sizes
    outputs = strided("do", do_BHTE, batch, heads, queries, value_width), strided("o", o_BHTE, *do_BHTE.shape)
    norms = strided("norms", norms, 2, batch, heads, queries).contiguous()
    dq = with_contiguous_heads(batch, heads, queries, width)
    dk, dv = (with_contiguous_heads(batch, groups, keys, size) for size in (width, value_width))
    views = sizes_and_views(sizes, [*kept, *outputs, dq, dk, dv])
    call("attention_backward", *views, *drop(seed, p), scale, is_causal, norms)
    return dq, dk, dv


def _checked(
    q_BHTD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, mask: Tensor | None
) -> tuple[tuple[int, ...], list[Tensor | None]]:
    """B, H, G, T, S, D and E; q, k, v and the mask as the kernels read them, the mask (B, H, T, S)."""
    if not (q_BHTD.dim() == k_BGSD.dim() == v_BGSE.dim() == 4):
        raise RuntimeError(f"expected q, k, v in 4 dimensions, got {[list(t.shape) for t in (q_BHTD, k_BGSD, v_BGSE)]}")
    (batch, heads, queries, width), groups, (keys, value_width) = q_BHTD.shape, k_BGSD.shape[1], v_BGSE.shape[2:]
    if not groups or heads % groups:
        raise RuntimeError(f"expected heads of keys that divide {heads} heads of queries, got {groups}")
    q_BHTD, k_BGSD = strided("q", q_BHTD, *q_BHTD.shape), strided("k", k_BGSD, batch, groups, keys, width)
    v_BGSE = strided("v", v_BGSE, batch, groups, keys, value_width)
    if mask is not None:  # only the last dimension may have to be copied: the others are broadcast with strides 0
        mask = mask[(None,) * (4 - mask.dim())].expand(-1, -1, -1, keys)
        mask = strided("mask", mask, *mask.shape).expand(batch, heads, queries, keys)
    return (batch, heads, groups, queries, keys, width, value_width), [q_BHTD, k_BGSD, v_BGSE, mask]


def sizes_and_views(sizes: tuple[int, ...], tensors: Sequence[Tensor | None]) -> tuple[bytes, bytes]:
    """Sizes, and tensors in four dimensions with a contiguous last one, as the kernels read them (csrc/views.h)."""
    return words(sizes), words(w for t in tensors for w in (_NO_VIEW if t is None else (t.data_ptr(), *t.stride()[:3])))


def with_contiguous_heads(batch: int, heads: int, length: int, width: int) -> Tensor:
    """(B, H, T, width), laid out so that the heads of a query flatten into features without a copy."""
    return empty(batch, length, heads, width).transpose(1, 2)
