"""Operation of narrow.cpp."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from comera.native.build import library, takes
from comera.native.ops import define, pointer

# Measured on two cores of an AMD EPYC 7003 at 768 and 3,072 features: from 1,024 rows on 1.3 to 2.2 times faster at
# ranks to 31, 1.3 at 64, as fast as torch's product at 90; at 512 rows 1.3 at rank 31, slower at 128 rows.
LEAST_ROWS, MOST_RANK = 1024, 64


@cache
def _function() -> Callable[..., None]:
    function = library().narrow
    function.argtypes, function.restype = [c_long, c_long, c_long, c_void_p, c_void_p, c_void_p, c_int], None
    return function


def _narrow(a_RI: Tensor, x_BI: Tensor) -> Tensor:
    a_RI, x_BI = a_RI.contiguous(), x_BI.contiguous()
    (rank, features), rows = a_RI.shape, x_BI.shape[0]
    p_RB = a_RI.new_empty(rank, rows)
    operands = pointer(a_RI), pointer(x_BI), pointer(p_RB)
    _function()(rows, features, rank, *operands, torch.get_num_threads())
    return p_RB


def takes_narrow(a_RI: Tensor, x_BI: Tensor) -> bool:
    """Whether `narrow` takes the product, which no graph may go through, and is faster at it."""
    sizes = x_BI.shape[0] >= LEAST_ROWS and a_RI.shape[0] <= MOST_RANK and x_BI.is_contiguous()
    return sizes and not torch.is_grad_enabled() and takes("narrow", a_RI, x_BI)


narrow = define("narrow(Tensor a, Tensor x) -> Tensor", _narrow)
"""P = A xᵀ (R, B) from A (R, I) and x (B, I)."""


@register_flop_formula(torch.ops.comera.narrow)  # type: ignore[untyped-decorator]
def _flops(a: Any, x: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(2 * a[0] * a[1] * x[0])
