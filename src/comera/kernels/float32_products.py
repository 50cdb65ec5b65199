"""Chooses the library of torch's float32 products on a CPU: MKL, or oneDNN where MKL uses half of a processor.

On AMD processors with AVX-512, MKL computes with AVX2: 95 GFLOP/s on a core of an EPYC (family 26), 1,024 × 768 × 768,
where oneDNN reaches 217. Torch goes to oneDNN if the precision of float32 products is "medium". On processors with AMX,
which are Intel's, that rounds operands to bfloat16; others keep float32, which a trial product makes sure of. Products
of a row or a few take longer by some 10 µs. For a loop of one's own: `torch.set_float32_matmul_precision("medium")`.

oneDNN keeps what it compiled for a shape of operands, about 1 MB, for the last 1,024 shapes, and torch keeps as many
again. With falling ranks and batches of any length new shapes never end: a process of 630 MB grew to 1,500. Kept are
128 of each, unless the user's environment says how many. With 64, a dense model that meets seven lengths of batches
compiled some products anew in every step: 5 to 40 % more time for its short batches.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from comera.kernels.cpp.compiler import processor

_BY_ONEDNN, _DEFAULT = "medium", "highest"
_CACHES, _SHAPES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"), "128"  # read at the first product
_MOST_ERROR = 1e-5  # of a norm: float32 has 4e-7, bfloat16 2e-3


def by_onednn() -> bool:
    """Whether oneDNN makes them by torch's settings as they are now."""
    return bool(torch.backends.mkldnn.matmul.fp32_precision == "bf16")  # type: ignore[attr-defined]


def use_fastest(device: torch.device | str) -> bool:
    """Let the faster library make float32 products, in all threads of this process; returns whether that is a change.

    Nothing changes unless the device is a CPU, nor where the user has chosen a precision of products.
    """
    if torch.device(device).type != "cpu" or not mkl_is_slow() or not _is_default():
        return False
    for cache in _CACHES:
        os.environ.setdefault(cache, _SHAPES)
    if not _keeps_float32():
        return False
    torch.set_float32_matmul_precision(_BY_ONEDNN)
    return True


@contextmanager
def fastest(device: torch.device | str) -> Iterator[None]:
    """`use_fastest` until the end of the context."""
    changed = use_fastest(device)
    try:
        yield
    finally:
        if changed:
            torch.set_float32_matmul_precision(_DEFAULT)


@lru_cache(maxsize=1)
def mkl_is_slow() -> bool:
    """Whether this is an AMD processor with AVX-512, and torch has both libraries."""
    words = set(processor().split())
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return both and {"AMD", "avx512f"} <= words and "amx_tile" not in words


def _is_default() -> bool:
    try:
        return torch.get_float32_matmul_precision() == _DEFAULT
    except RuntimeError:  # the user has chosen it for one of torch's backends
        return False


@lru_cache(maxsize=1)
def _keeps_float32() -> bool:
    """Whether a product by oneDNN is as exact as one in float32."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
    torch.set_float32_matmul_precision(_BY_ONEDNN)
    try:
        return _error(a, b) < _MOST_ERROR
    finally:
        torch.set_float32_matmul_precision(_DEFAULT)


def _error(a: Tensor, b: Tensor) -> float:
    """Of a float32 product, relative to its norm."""
    exact = a.double() @ b.double()
    return float(torch.linalg.vector_norm((a @ b).double() - exact) / torch.linalg.vector_norm(exact))
