"""The dtype an operation computes in: autocast's, that of its operands, or float32 where half precision is slow, or
slower than the kernels, which are for float32."""

import platform
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from comera.kernels.cpp import compiler
from comera.kernels.cpp.library import device_type, unavailable_reason
from comera.kernels.select import LOW_RANK_MOST_RANK, asked
from comera.kernels.tracing import constant_when_traced, traced, transformed


def merge_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that small cores are merged in: float32 for half precision, else their own.

    Merging in bfloat16 would cost 2 dB of signal to noise (a linear layer) to 5 dB (a lookup) and save no time.
    """
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype that autocast would use for a product with `tensor`; None where it would leave it alone."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return None
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def product_dtype(input: Tensor, core: Tensor) -> torch.dtype:
    """The dtype of a product of `input` with the weight of such cores: autocast's, or their own.

    Raises TypeError when it is neither.
    """
    dtype = autocast_dtype(input)
    if dtype is None and input.dtype != core.dtype:
        raise TypeError(
            f"expected an input in the dtype of the cores, {core.dtype}, got {input.dtype}: "
            "cast one of them, or run under torch.autocast"
        )
    return dtype or input.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the dtype of their operands, on the tensor's device."""
    return nullcontext() if autocast_dtype(tensor) is None else torch.autocast(tensor.device.type, enabled=False)


def product(a_MK: Tensor, b_KN: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b + bias, computed in float32 where the processor has no arithmetic for a's half precision.

    There torch's half-precision products run at 1 to 25 GFLOP/s a core, depending on the layout of the operands (AMD
    EPYC 7003; float32: 90), so two conversions cost little. The operands are saved in half precision.
    """
    if not widens(a_MK) or transformed():
        return a_MK @ b_KN if bias is None else torch.addmm(bias, a_MK, b_KN)
    y_MN: Tensor = _WideProduct.apply(a_MK, b_KN, bias)
    return y_MN


def working_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of torch's products with `tensor`: autocast's or its own; float32 where half precision is slow."""
    dtype = autocast_dtype(tensor) or tensor.dtype
    return torch.float32 if _is_slow(dtype, tensor.device) else dtype


def kernel_dtype(tensor: Tensor, kernel: str, rank: int = 0) -> torch.dtype:
    """The dtype in which a kernel, or torch in its place, computes with `tensor`: the `working_dtype`, or float32 where
    the kernel is faster.

    That is on a CPU whose units for half precision are twice as fast as those for float32, and not sixteen times, as
    with AMX. Steps under autocast in bfloat16 by torch and by the kernels, two cores of an AMD EPYC with AVX-512 BF16:
    six encoders at 32 × 128 537 and 450 ms, one sample 49 and 37, a Llama-style model at 4 × 256 567 and 400. Attention
    alone is three times as fast; layers of 4,096 features and one sample are up to a tenth slower. Against dense:
    `python benchmarks/step.py --cases "batch 1, bf16"`, `python benchmarks/layer.py --precision bf16`.

    kernel: its name in `select`; rank: of the factors that meet the tensor.
    """
    dtype = working_dtype(tensor)
    if dtype.itemsize == 2 and rank <= LOW_RANK_MOST_RANK and _is_faster(kernel, tensor.device):
        return torch.float32
    return dtype


def widens(tensor: Tensor) -> bool:
    """Whether products of a half-precision `tensor` are better computed in float32: on CPUs without units for it."""
    return _is_slow(tensor.dtype, tensor.device)


def _is_faster(kernel: str, device: torch.device) -> bool:
    """Whether a kernel in float32 takes less time than torch's products in half precision."""
    if traced() or device_type(device) != "cpu" or asked(kernel) is False:
        return False
    return not _matrix_units() and unavailable_reason() is None


@cache
def _matrix_units() -> bool:
    """Whether the processor multiplies whole tiles of half precision, or is of a kind that nothing was measured on."""
    return platform.machine() != "x86_64" or "amx_bf16" in compiler.processor().split()


def _is_slow(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype.itemsize == 2 and not _half_units(dtype)


@constant_when_traced
def _half_units(dtype: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported())


class _WideProduct(torch.autograd.Function):
    """y = a b + bias in float32, rounded once. Saved: a, b in half precision. da = dy bᵀ, db = aᵀ dy."""

    @staticmethod
    def forward(ctx: Any, a_MK: Tensor, b_KN: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(a_MK, b_KN)
        a, b = a_MK.float(), b_KN.float()
        return (a @ b if bias is None else torch.addmm(bias.float(), a, b)).to(a_MK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        a_MK, b_KN = ctx.saved_tensors
        wants_a, wants_b, wants_bias = ctx.needs_input_grad
        da_MK = db_KN = dbias_N = None
        with without_autocast(dy_MN):
            dy = dy_MN.float()
            if wants_a:
                da_MK = (dy @ b_KN.float().t()).to(a_MK.dtype)
            if wants_b:
                db_KN = (a_MK.float().t() @ dy).to(b_KN.dtype)
            if wants_bias:
                dbias_N = dy.sum(0).to(dy_MN.dtype)
        return da_MK, db_KN, dbias_N
