"""Operations of attention.cpp. Shapes: B batch, H heads, G heads of keys and values, T queries, S keys, D/E widths."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp.build import library
from comera.kernels.cpp.library import define, pointer
from comera.kernels.cpp.memory import empty
from comera.kernels.cpp.residual_norm import rounded
from comera.kernels.flops import flop_formula


class _View(Structure):
    _fields_ = (("at", c_void_p), ("batch", c_long), ("head", c_long), ("row", c_long))


class _Problem(Structure):
    _fields_ = (
        *((name, c_long) for name in ("batch", "heads", "kv_heads", "queries", "keys", "width", "value_width")),
        *((name, _View) for name in ("q", "k", "v", "mask")),
        ("seed", c_void_p),
        ("dropped", c_long),
        ("scale", c_float),
        ("kept_scale", c_float),
        ("causal", c_int),
    )


@cache
def _functions() -> tuple[Callable[..., None], Callable[..., None]]:
    forward, backward = library().attention, library().attention_backward
    problem, view = POINTER(_Problem), POINTER(_View)
    forward.argtypes = [problem, view, c_void_p, c_int]
    backward.argtypes = [problem, view, view, c_void_p, view, view, view, c_int]
    forward.restype = backward.restype = None
    return forward, backward


def _forward(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    q_BHTD, k_BGSD, v_BGSE = _with_rows(q_BHTD), _with_rows(k_BGSD), _with_rows(v_BGSE)
    mask = _expanded(mask, q_BHTD, k_BGSD)
    problem = _problem(q_BHTD, k_BGSD, v_BGSE, mask, seed, p, scale, is_causal)
    o_BHTE = _heads_side_by_side(q_BHTD, v_BGSE.shape[3])
    norms = q_BHTD.new_empty(2, *q_BHTD.shape[:3])
    _functions()[0](problem, byref(_view(o_BHTE)), pointer(norms), torch.get_num_threads())
    return o_BHTE, norms


def _backward(
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
    do_BHTE, o_BHTE, norms = _with_rows(do_BHTE), _with_rows(o_BHTE), norms.contiguous()
    q_BHTD, k_BGSD, v_BGSE = _with_rows(q_BHTD), _with_rows(k_BGSD), _with_rows(v_BGSE)
    mask = _expanded(mask, q_BHTD, k_BGSD)
    problem = _problem(q_BHTD, k_BGSD, v_BGSE, mask, seed, p, scale, is_causal)
    dq, dk, dv = (_heads_side_by_side(t, t.shape[3]) for t in (q_BHTD, k_BGSD, v_BGSE))
    views = [byref(_view(t)) for t in (do_BHTE, o_BHTE, dq, dk, dv)]
    _functions()[1](problem, *views[:2], pointer(norms), *views[2:], torch.get_num_threads())
    return dq, dk, dv


def _problem(
    q_BHTD: Tensor,
    k_BGSD: Tensor,
    v_BGSE: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
) -> Any:
    (batch, heads, queries, width), (_, groups, keys, _) = q_BHTD.shape, k_BGSD.shape
    dropped, kept_scale = rounded(p)
    return byref(
        _Problem(
            *(batch, heads, groups, queries, keys, width, v_BGSE.shape[3]),
            *(_view(q_BHTD), _view(k_BGSD), _view(v_BGSE), _View() if mask is None else _view(mask)),
            *(pointer(seed), dropped, scale, kept_scale, is_causal),
        )
    )


def _expanded(mask: Tensor | None, q_BHTD: Tensor, k_BGSD: Tensor) -> Tensor | None:
    """(B, H, T, S), the keys side by side, strides 0 for what is broadcast."""
    if mask is None:
        return None
    keys = k_BGSD.shape[2]
    return _with_rows(mask[(None,) * (4 - mask.ndim)].expand(-1, -1, -1, keys)).expand(*q_BHTD.shape[:3], keys)


def _with_rows(t: Tensor) -> Tensor:
    """The same numbers, with those of its last dimension side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _view(t: Tensor) -> _View:
    return _View(t.data_ptr(), *t.stride()[:3])


def _heads_side_by_side(like_BHTD: Tensor, width: int) -> Tensor:
    """Empty, (B, H, T, width): what follows attention flattens the heads of a query into features without a copy."""
    batch, heads, length, _ = like_BHTD.shape
    return empty(batch, length, heads, width).transpose(1, 2)


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? seed, float p, float scale, bool is_causal"

attention = define(f"attention({_OPERANDS}) -> (Tensor o, Tensor norms)", _forward)
"""O (B, H, T, E) from q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), G dividing H, and a float mask that is added to
the scores, broadcastable to (B, H, T, S). seed: one int64, of dropout with probability p; None for none.

norms (2, B, H, T): of each query the largest score, and one over the sum of the exponentials below it."""

attention_backward = define(
    f"attention_backward(Tensor do, Tensor o, Tensor norms, {_OPERANDS}) -> (Tensor dq, Tensor dk, Tensor dv)",
    _backward,
)
"""The gradients of q, k and v from that of O, and O and norms themselves."""


@flop_formula(torch.ops.comera.attention)
def _flops(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Q Kᵀ and P V."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (width + v[3]))


@flop_formula(torch.ops.comera.attention_backward)
def _flops_backward(
    do: Any, o: Any, norms: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    """Q Kᵀ, dS K and dSᵀ Q; dO Vᵀ and Pᵀ dO."""
    batch, heads, queries, width = q
    return int(2 * batch * heads * queries * k[2] * (3 * width + 2 * v[3]))
