"""y = (x A) B + bias with every product in float8: on devices with scaled products, and emulated on others.

A tensor is quantized as X ≈ s · X̂, X̂ in float8: e4m3 (3 bits of mantissa, up to 448). s > 0 is one scale (tensorwise)
or one for each row that a product contracts (rowwise), and follows from the largest magnitude of what it scales:

    forward    P = x̂ Âᵀ,         y = P̂ B̂ + bias
    backward   U = dŷ B̂ᵀ,        dx = Û Â,      ∂A = Ûᵀ x̂,      ∂B = P̂ᵀ dŷ,      ∂bias = Σ dy

P, U and the results are accumulated in float32; gradients pass the rounding as if it were not there (straight-through).
bias, merge and everything else stay in their own dtype. Saved for the backward: x̂, Â, B̂, P̂, a byte an element.

Gradients may be in e5m2 instead (hybrid, the published choice): 2 bits of mantissa, up to 57,344. It has 32 binades
instead of 18, but a scale for each tensor and step makes up for that, and the bit that it lacks costs more.

Powers of two. s is the smallest power of two at which the largest magnitude does not overflow. Scaling is exact then:
the cast is the only rounding, quantizing twice is quantizing once, and a weight does not jump to another grid whenever
the largest element of its tensor changes. It costs no precision, since float8 has an exponent, and of the range at most
one of 18 (e4m3) or 32 (e5m2) binades.

Scales by row. A scale may not vary along the contraction, but each operand meets two: x that of its columns in P and
that of its rows in ∂A. Instead of a second quantization (and a second x̂ to save), the scale of an operand that is met
the other way goes into the gradient that it meets, before that is quantized: ∂A = (s_x · U)ᵀ x̂, where s_x · U is exact;
likewise with A in dx, with B in U and with P in ∂B. So a row of x with large elements
costs the other rows no precision.

What is not finite. A tensor (or row) with an inf or NaN is NaN after quantization, so a run that diverges shows it;
float8 itself would turn what overflows into NaN in e4m3 and into inf in e5m2. Tensors whose largest magnitude is below
`_LEAST` are scaled as if it were that, so that products of two scales stay normal float32 numbers. Zeros stay zero.

Shapes: B flattened batch, I/O in/out features, R rank, S rank plus the row of the bias (if there is one); M/N rows of
the operands of a product, K its contraction.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from comera.kernels import select
from comera.kernels.scaled_mm import scaled_mm
from comera.kernels.tracing import traced
from comera.ops.dtypes import without_autocast
from comera.ops.low_rank import LowRankFactors

Recipe = Literal["tensorwise", "rowwise", "hybrid"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LEAST = 2.0**-50


class Quantized(NamedTuple):
    """values · scale. values: float8 (M, K). scale: float32, powers of two, (1, 1) or one a row (M, 1)."""

    values: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """In float32, exactly."""
        return self.values.float() * self.scale


def quantize(x_MK: Tensor, dtype: torch.dtype, recipe: Recipe) -> Quantized:
    """Round a matrix to float8, scaled as a whole or by row.

    Args:
        x_MK: of any floating-point dtype and layout; not differentiated.
        dtype: E4M3 or E5M2.
        recipe: "rowwise": each row has a scale of its own; else there is one.
    """
    x_MK = x_MK.float()
    rowwise = recipe == "rowwise"
    if x_MK.numel() == 0:
        amax = x_MK.new_zeros(x_MK.shape[0] if rowwise else 1, 1)
    else:
        amax = x_MK.abs().amax(1, keepdim=True) if rowwise else x_MK.abs().amax().reshape(1, 1)
    largest = torch.finfo(dtype).max
    encoding = _power_of_two_below(largest / amax.clamp(min=_LEAST))
    encoding = encoding.masked_fill(~amax.isfinite(), torch.nan)
    # The largest magnitude may exceed `largest` by the rounding of the quotient, which the cast rounds away.
    return Quantized((x_MK * encoding).to(dtype), encoding.reciprocal())


def _power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two at or below each float32 number, which must be normal: its bits without the mantissa."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def scaled_product(left: Quantized, right: Quantized, dtype: torch.dtype) -> Tensor:
    """left rightᵀ (M, N), accumulated in float32. Contracts the last axes of left (M, K) and right (N, K).

    The emulation multiplies the dequantized operands in float32. These have few bits of mantissa, which TF32 keeps.
    """
    if left.values.numel() == 0 or right.values.numel() == 0:
        return left.scale.new_zeros(left.values.shape[0], right.values.shape[0], dtype=dtype)
    if select.scaled_product_backend(left.values.device) == "scaled_mm":
        return scaled_mm(*left, *right, dtype)
    return (left.dequantized() @ right.dequantized().t()).to(dtype)


def fp8_low_rank(x_BI: Tensor, factors: LowRankFactors, recipe: Recipe) -> Tensor:
    """y = (x Aᵀ) B + bias, all products in float8.

    Args:
        x_BI: the batch (B, in_features).
        factors: A (R, in_features) and B (R, out_features) or [bias; B], in any floating-point dtype. Autocast must be
            off.
        recipe: "tensorwise": one scale a tensor; "rowwise": one a row; "hybrid": one a tensor, gradients in e5m2.

    Returns:
        (B, out_features) in x's dtype. Differentiable once: a backward with create_graph raises RuntimeError.

    Source: docs/method.md §4.
    """
    made: tuple[Tensor, ...] = _FP8LowRank.apply(x_BI, *factors, recipe)
    return made[0]


class _FP8LowRank(torch.autograd.Function):
    """The formulas at the top of the file. What the backward needs are outputs, as torch.func wants it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BI: Tensor, a_RI: Tensor, b_SO: Tensor, recipe: Recipe) -> tuple[Tensor, ...]:
        factors = LowRankFactors(a_RI, b_SO)
        x, a = quantize(x_BI, E4M3, recipe), quantize(a_RI, E4M3, recipe)
        b = quantize(factors.without_bias.t(), E4M3, recipe)  # (O, R)
        p = quantize(scaled_product(x, a, torch.float32), E4M3, recipe)
        y_BO = scaled_product(p, b, torch.float32)
        if factors.has_bias:
            y_BO = y_BO + b_SO[0]
        return y_BO.to(x_BI.dtype), *x, *a, *b, *p

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x_BI, a_RI, b_SO, ctx.recipe = inputs
        ctx.dtypes = x_BI.dtype, a_RI.dtype, b_SO.dtype
        ctx.has_bias = LowRankFactors(a_RI, b_SO).has_bias
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if dy_BO is None:
            return None, None, None, None
        if torch.is_grad_enabled() and not traced():  # create_graph: the rounding has no derivative
            raise RuntimeError(
                "expected one backward through an FP8 layer, got one that is to be differentiated again "
                "(create_graph=True): take FP8 back with comera.fp8_(model, None)"
            )
        saved, recipe = ctx.saved_tensors, ctx.recipe
        of_gradients = E5M2 if recipe == "hybrid" else E4M3
        x, a, b, p = (Quantized(*saved[k : k + 2]) for k in (0, 2, 4, 6))
        wants_x, wants_a, wants_b, _ = ctx.needs_input_grad
        x_dtype, a_dtype, b_dtype = ctx.dtypes
        dx_BI = da_RI = db_SO = None
        with without_autocast(dy_BO):
            dy_BO = dy_BO.float()
            if wants_x or wants_a:
                dy = quantize(dy_BO * b.scale.t(), of_gradients, recipe)
                u_BR = scaled_product(dy, _unscaled(b), torch.float32)
            if wants_x:
                u = quantize(u_BR * a.scale.t(), of_gradients, recipe)
                dx_BI = scaled_product(u, _unscaled(a), x_dtype)
            if wants_a:
                u = quantize((u_BR * x.scale).t(), of_gradients, recipe)
                da_RI = scaled_product(u, _unscaled(x), a_dtype)
            if wants_b:
                dy = quantize((dy_BO * p.scale).t(), of_gradients, recipe)
                db_SO = scaled_product(dy, _unscaled(p), b_dtype).t()
                if ctx.has_bias:
                    db_SO = torch.cat([dy_BO.sum(0, keepdim=True).to(b_dtype), db_SO])
        return dx_BI, da_RI, db_SO, None


def _unscaled(x: Quantized) -> Quantized:
    """The transposed values (K, M) alone, where the scale of x is in what they meet."""
    return Quantized(x.values.t(), torch.ones_like(x.scale[:1]))
