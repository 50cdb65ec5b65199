"""y = x W + bias, W a block tensor train (docs/method.md §1): two products of blocks, and a permutation between them.

    forward    h_A = x_A R_A,    y_C = [h_AC]_A L_C + bias
    backward   [dh_AC]_A = dy_C L_Cᵀ,  dx_A = dh_A R_Aᵀ,  ∂R_A = x_Aᵀ dh_A,  ∂L_C = [h_AC]_Aᵀ dy_C

R_A holds the components of input block A, and L_C those of output block C; block (A, C) of W owns the components that
are in both. h has as many elements per row as there are components, about as many as x: it is cheaper to compute again
than to keep.

On a CPU a C++ kernel keeps tiles of h in the caches, and its permutation moves nothing (kernels/cpp/csrc/
block_product.cpp). Triton kernels for GPUs address permuted components, too (kernels/triton_blocks.py).

Shapes: B flattened batch, A/C input/output blocks, N/M features in an input/output block, K components in the order of
(A, C), Q/S most components of an input/output block.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import block_product as cpp
from comera.ops.chunking import pad_last
from comera.ops.dtypes import without_autocast, working_dtype
from comera.ops.linear import flatten_input
from comera.tt.spec import BTTSpec


def btt_linear(
    input: Tensor,
    spec: BTTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    gates: Sequence[Tensor] | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """y = x W + bias, W the block tensor train of `cores`.

    Args:
        input: x (..., in_features), any leading shape.
        cores: R (1, N, K) and L (K, M, 1), of `spec.core_shapes`.
        bias: (out_features,).
        gates: one vector of K; ones by default. A gate at or below `threshold` counts as 0.

    Returns:
        (..., out_features); dtypes and errors as for `tt_linear`. Differentiable twice.

    Source: Qiu et al. 2024 (arXiv:2406.06248), docs/method.md §1.
    """
    x_BI, bias = flatten_input(input, spec, spec.shape, cores, bias)
    with without_autocast(input):
        r_NK, l_KM = cores[0].flatten(0, 1), cores[1].flatten(1)
        if gates is not None:
            (d,) = gates
            r_NK = r_NK * d.masked_fill(d <= threshold, 0.0)
        y_BO = block_product(x_BI, r_NK, l_KM, spec, bias)
    return y_BO.reshape(*input.shape[:-1], spec.out_features)


def block_product(x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, spec: BTTSpec, bias: Tensor | None = None) -> Tensor:
    """y (B, out_features) of a batch (B, in_features) and the weight of R (N, K) and L (K, M), in x's dtype.

    R, L and bias are cast to the `working_dtype` of x. Autocast must be off. Differentiable twice.
    """
    dtype = working_dtype(x_BI)
    operands = [None if each is None else each.to(dtype) for each in (x_BI, r_NK, l_KM, bias)]
    backend = select.block_product_backend(operands)
    if backend == "torch":
        y_BO = _torch_forward(spec, *operands)  # type: ignore[arg-type]
    else:
        y_BO = _BlockProduct.apply(backend, spec, *operands)
    return y_BO.to(x_BI.dtype)


class _BlockProduct(torch.autograd.Function):
    """The formulas at the top of the file, by a kernel; only the operands are saved."""

    @staticmethod
    def forward(ctx: Any, backend: str, spec: BTTSpec, *operands: Tensor | None) -> Tensor:
        ctx.backend, ctx.spec = backend, spec
        ctx.save_for_backward(*operands)
        forward, _ = _BACKENDS[backend]
        return forward(spec, *operands)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy_BO: Tensor) -> tuple[Tensor | None, ...]:
        operands, wants = ctx.saved_tensors, ctx.needs_input_grad[2:]
        with without_autocast(dy_BO):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                return None, None, *_differentiable(dy_BO, ctx.spec, operands, wants)
            _, backward = _BACKENDS[ctx.backend]
            return None, None, *backward(ctx.spec, dy_BO, operands, wants)


Grads = Sequence[Tensor | None]  # of x, R, L and bias


def _cpp_forward(spec: BTTSpec, x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None) -> Tensor:
    return cpp.block_product(x_BI, r_NK, l_KM, bias, _ranks(spec), spec.out_features)


def _cpp_backward(spec: BTTSpec, dy_BO: Tensor, operands: Sequence[Any], wants: Sequence[bool]) -> Grads:
    x_BI, *weight = operands
    wanted = wants[0], wants[1], wants[2] or wants[3]
    made = iter(cpp.block_product_backward(x_BI, dy_BO, *weight, _ranks(spec), *wanted))
    dx_BI, dr_NK, dl_KM = (next(made) if each else None for each in wanted)
    return dx_BI, dr_NK, dl_KM, next(made, None)


def _triton_forward(spec: BTTSpec, x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None) -> Tensor:
    from comera.kernels import triton_blocks as triton

    inputs, outputs = _sides(spec, x_BI.device)
    r_NK, l_KM = r_NK.contiguous(), l_KM.contiguous()
    h_BK = triton.to_components(x_BI, r_NK, (1, r_NK.shape[1]), inputs)
    return triton.to_features(h_BK, l_KM, (l_KM.shape[1], 1), outputs, bias)


def _triton_backward(spec: BTTSpec, dy_BO: Tensor, operands: Sequence[Any], wants: Sequence[bool]) -> Grads:
    from comera.kernels import triton_blocks as triton

    (x_BI, r_NK, l_KM), (inputs, outputs) = (each.contiguous() for each in operands[:3]), _sides(spec, dy_BO.device)
    of_r, of_l = (1, r_NK.shape[1]), (l_KM.shape[1], 1)  # strides along components and features
    dx_BI = dr_NK = dl_KM = None
    if wants[0] or wants[1]:
        dh_BK = triton.to_components(dy_BO, l_KM, of_l, outputs)
        dx_BI = triton.to_features(dh_BK, r_NK, of_r, inputs) if wants[0] else None
        dr_NK = triton.weight_gradient(x_BI, dh_BK, of_r, inputs, r_NK) if wants[1] else None
    if wants[2]:
        h_BK = triton.to_components(x_BI, r_NK, of_r, inputs)
        dl_KM = triton.weight_gradient(dy_BO, h_BK, of_l, outputs, l_KM)
    return dx_BI, dr_NK, dl_KM, dy_BO.sum(0) if wants[3] else None


_BACKENDS = {"cpp": (_cpp_forward, _cpp_backward), "triton": (_triton_forward, _triton_backward)}


def _differentiable(dy_BO: Tensor, spec: BTTSpec, operands: Sequence[Any], wants: Sequence[bool]) -> Grads:
    """The gradients, which can be differentiated again."""
    wanted = [each for each, wants_it in zip(operands, wants, strict=True) if wants_it]
    grads = iter(torch.autograd.grad(_torch_forward(spec, *operands), wanted, dy_BO, create_graph=True))
    return [next(grads) if wants_it else None for wants_it in wants]


@lru_cache(maxsize=256)
def _ranks(spec: BTTSpec) -> Tensor:
    """The ranks of all blocks (A, C), as kernels read them."""
    return torch.tensor(spec.rows_of_ranks, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=256)
def _sides(spec: BTTSpec, device: torch.device) -> tuple[Any, Any]:
    """Input and output blocks, with the tables of their components on the device, for the Triton kernels."""
    from comera.kernels.triton_blocks import Side

    rank_AC = _ranks(spec)
    a, c = spec.blocks
    block_K = torch.arange(a * c).repeat_interleave(rank_AC.flatten())
    sides = []
    for features, size, each, of_block_K in (
        (spec.in_features, spec.sizes[0], rank_AC.sum(1), block_K // c),
        (spec.out_features, spec.sizes[1], rank_AC.sum(0), block_K % c),
    ):
        component_K = of_block_K.sort(stable=True).indices.int()
        start = F.pad(each.cumsum(0), (1, 0)).int()
        sides.append(Side(features, size, int(each.max()), component_K.to(device), start.to(device)))
    return sides[0], sides[1]


def _torch_forward(spec: BTTSpec, x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None) -> Tensor:
    """By batched products; blocks of different ranks are padded to equal ones."""
    (a, c), rank = spec.blocks, spec.block_ranks
    x_ABN = pad_last(x_BI, spec.padded_shape[0]).unflatten(1, (a, -1)).transpose(0, 1)
    if isinstance(rank, int):
        h_BACR = (x_ABN @ r_NK.unflatten(1, (a, c * rank)).transpose(0, 1)).transpose(0, 1).unflatten(2, (c, rank))
        h_CBS = h_BACR.permute(2, 0, 1, 3).flatten(2)
        l_CSM = l_KM.unflatten(0, (a, c, rank)).transpose(0, 1).flatten(1, 2)
    else:
        first_AQ, second_CS, place_CS = _padded(spec, x_BI.device)
        h_ABQ = x_ABN @ F.pad(r_NK, (0, 1))[:, first_AQ].movedim(0, 1)
        h_CBS = F.pad(h_ABQ.transpose(0, 1).flatten(1), (0, 1))[:, place_CS].transpose(0, 1)
        l_CSM = F.pad(l_KM, (0, 0, 0, 1))[second_CS]
    y_CBM = h_CBS @ l_CSM
    y_BO: Tensor = y_CBM.transpose(0, 1).flatten(1)[:, : spec.out_features]
    return y_BO if bias is None else y_BO + bias


def _padded(spec: BTTSpec, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For blocks of different ranks: the components of each input block (A, Q), those of each output block (C, S), both
    padded with K, and where the latter are among the former (C, S), padded with A·Q."""
    (a, c), count, rows = spec.blocks, spec.ranks[1], spec.rows_of_ranks
    rank_AC = torch.tensor(rows, device=device)
    rank_A, rank_C = rank_AC.sum(1), rank_AC.sum(0)
    place_Q = torch.arange(max(map(sum, rows)), device=device)
    place_S = torch.arange(max(map(sum, zip(*rows, strict=True))), device=device)
    block_K = torch.arange(a * c, device=device).repeat_interleave(rank_AC.flatten(), output_size=count)
    sorted_K = (block_K % c).argsort(stable=True)  # the components by output block
    first_AQ = (rank_A.cumsum(0) - rank_A)[:, None] + place_Q
    nth_CS = (rank_C.cumsum(0) - rank_C)[:, None] + place_S
    second_CS = F.pad(sorted_K, (0, 1), value=count)[nth_CS.where(place_S < rank_C[:, None], count)]
    at_K = torch.arange(count, device=device) - first_AQ[:, 0][block_K // c] + block_K // c * len(place_Q)
    place_CS = F.pad(at_K, (0, 1), value=a * len(place_Q))[second_CS]
    return first_AQ.where(place_Q < rank_A[:, None], count), second_CS, place_CS
