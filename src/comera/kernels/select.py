"""Which backend runs an operation: a C++ kernel, a Triton kernel, or torch's own operations.

COMERA_KERNELS overrides the choice: "all", "none", or names of kernels separated by commas.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from comera.errors import ConfigError
from comera.kernels.cpp import build

TRITON = ("low_rank", "rows")
CPP = ("low_rank", "mlp", "attention", "residual_norm", "merge", "gradients", "adamw", "memory")
NAMES = tuple(dict.fromkeys((*TRITON, *CPP)))
_PLAIN = (Tensor, nn.Parameter)  # subclasses may have no memory of their own


def supports(kernel: str, *tensors: Tensor) -> bool:
    """Whether the C++ `kernel` supports these operands: one at least, float32 in CPU memory, not traced."""
    plain = bool(tensors) and all(type(t) in _PLAIN and t.dtype == torch.float32 and t.is_cpu for t in tensors)
    if not plain or torch.compiler.is_compiling() or asked(kernel) is False:
        return False
    return unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Why there are no C++ kernels on this machine; None where there are."""
    return build.unavailable_reason()


def asked(kernel: str) -> bool | None:
    """Whether the user asks for `kernel`, a name in NAMES; None where the user leaves the choice to the measurements.

    Raises ConfigError when COMERA_KERNELS names an unknown kernel.
    """
    names = _names(os.environ.get("COMERA_KERNELS", ""))
    return None if names is None else kernel in names


@lru_cache(maxsize=8)
def _names(setting: str) -> frozenset[str] | None:
    if not setting:
        return None
    names = frozenset({"all": NAMES, "none": ()}.get(setting, tuple(setting.split(","))))
    if not names <= set(NAMES):
        raise ConfigError(f"expected COMERA_KERNELS to be all, none or some of {', '.join(NAMES)}; got {setting!r}")
    return names


LEAST_ROWS, MOST_RANK = 2, 128
MLP_RANK, MLP_ROWS = 256, 16


def low_rank_backend(x_BI: Tensor, factors: Sequence[Tensor]) -> str:
    sizes = x_BI.shape[0] >= LEAST_ROWS and max(a.shape[0] for a in factors[::2]) <= MOST_RANK
    return "cpp" if sizes and supports("low_rank", x_BI, *factors) else "torch"


def mlp_backend(x_BI: Tensor, factors: Sequence[Tensor]) -> str:
    fits = max(a.shape[0] for a in factors[::2]) <= MLP_RANK and x_BI.shape[0] >= MLP_ROWS
    return "cpp" if fits and supports("mlp", x_BI, *factors) else "torch"


def merge_backend(dtype: torch.dtype, tensors: Sequence[Tensor]) -> str:
    return "cpp" if dtype == torch.float32 and supports("merge", *tensors) else "torch"
