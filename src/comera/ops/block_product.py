"""y = x W + bias, W a block tensor train (docs/method.md §1): two products of blocks, and a permutation between them.

    forward    h_A = x_A R_A,    y_C = [h_AC]_A L_C + bias        with R = R̂ diag(g) for gates g
    backward   [dh_AC]_A = dy_C L_Cᵀ,  dx_A = dh_A R_Aᵀ,  ∂R_A = x_Aᵀ dh_A,  ∂L_C = [h_AC]_Aᵀ dy_C
               ∂R̂ = ∂R diag(g),  ∂g = the column sums of R̂ ∂R

R_A holds the components of input block A, and L_C those of output block C; block (A, C) of W owns the components that
are in both. h has as many elements per row as there are components, about as many as x: the backward makes it again,
which costs less than to fetch it from memory, and memory is what this package is about.

On a CPU a C++ kernel keeps tiles of h in the caches, and its permutation moves nothing (kernels/cpp/csrc/
block_product.cpp). Triton kernels for GPUs address permuted components, too (kernels/triton_blocks.py).

Shapes: B flattened batch, A/C input/output blocks, N/M features in an input/output block, K components in the order of
(A, C), Q/S most components of an input/output block.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import block_product as cpp
from comera.kernels.tracing import constant_when_traced, traced, unrecorded_by_jit
from comera.ops.dtypes import kernel_dtype, without_autocast
from comera.ops.linear import by_torch_alone, check_operands, flatten_input
from comera.ops.once import unrecorded
from comera.tt.dense import materialize
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
    (y,) = btt_linears(input, [BTTWeight(spec, cores, bias, gates, threshold)])
    return y


class BTTWeight(NamedTuple):
    """The arguments of `btt_linear` besides the input."""

    spec: BTTSpec
    cores: Sequence[Tensor]
    bias: Tensor | None = None
    gates: Sequence[Tensor] | None = None
    threshold: float = 0.0


def btt_linears(input: Tensor, weights: Sequence[BTTWeight]) -> list[Tensor]:
    """`btt_linear` of one input and several weights, such as queries, keys and values, as one call of the kernel."""
    if by_torch_alone(input):
        return [_by_torch(input, *weight) for weight in weights]
    factors = []
    for spec, cores, bias, gates, threshold in weights:
        x_BI, bias = flatten_input(input, spec, spec.shape, cores, bias)
        d_K = None if gates is None else F.threshold(gates[0], threshold, 0.0)
        factors.append(BlockFactors(spec, cores[0].squeeze(0), cores[1].squeeze(2), bias, d_K))
    with without_autocast(input):
        ys_BO = block_products(x_BI, factors)
    return [y_BO if input.ndim == 2 else y_BO.view(*input.shape[:-1], y_BO.shape[1]) for y_BO in ys_BO]


def _by_torch(
    input: Tensor,
    spec: BTTSpec,
    cores: Sequence[Tensor],
    bias: Tensor | None,
    gates: Sequence[Tensor] | None,
    threshold: float,
) -> Tensor:
    dtype = unrecorded_by_jit(check_operands, input, spec, spec.shape, cores, bias)
    with without_autocast(input):
        r_NK = cores[0].squeeze(0)
        r_NK = r_NK if gates is None else r_NK * gates[0].masked_fill(gates[0] <= threshold, 0.0)
        r_NK, l_KM, bias = r_NK.to(dtype), cores[1].squeeze(2).to(dtype), None if bias is None else bias.to(dtype)
        if not select.is_irregular(input):
            x_BI = input.reshape(prod(input.shape[:-1]), spec.in_features).to(dtype)
            y_BO = batched_product(spec, x_BI, r_NK, l_KM, bias, unrecorded_by_jit(component_places, spec, x_BI.device))
            return y_BO.view(*input.shape[:-1], spec.out_features)
        weight = materialize(spec, [r_NK.unsqueeze(0), l_KM.unsqueeze(2)])
    return F.linear(input, weight.t(), bias)


class BlockFactors(NamedTuple):
    """A block tensor train with the blocks of `spec`: R (N, K), L (K, M), bias (out_features,) and gates (K,)."""

    spec: BTTSpec
    r: Tensor
    l: Tensor  # noqa: E741  # its name in the formulas
    bias: Tensor | None = None
    gates: Tensor | None = None


def block_products(x_BI: Tensor, weights: Sequence[BlockFactors], *, backend: str | None = None) -> tuple[Tensor, ...]:
    """y_k = x W_k + bias_k of several block tensor trains that share x, as one call.

    Args:
        x_BI: the batch (B, in_features).
        weights: one or more. They are cast to the `kernel_dtype` of x. Autocast must be off.
        backend: as in `low_rank`.

    Returns:
        One tensor (B, out_features) per weight, in x's dtype. Saved for the backward: the operands.
        Differentiable twice.

    Example:
        >>> import torch
        >>> from comera.ops.block_product import BlockFactors, block_products
        >>> from comera.tt import BTTSpec
        >>> q, k = (BTTSpec(12, out, in_modes=(3, 4), out_modes=(5, 2), block_ranks=1) for out in (10, 9))
        >>> r, l = torch.randn(4, 15), torch.randn(15, 2)
        >>> [tuple(y.shape) for y in block_products(torch.randn(7, 12), [BlockFactors(q, r, l), BlockFactors(k, r, l)])]
        [(7, 10), (7, 9)]
    """
    dtype = kernel_dtype(x_BI, "block_product")
    specs = tuple(each.spec for each in weights)
    operands = [x_BI, *(tensor for each in weights for tensor in each[1:])]
    operands = [each if each is None or each.dtype == dtype else each.to(dtype) for each in operands]
    backend = backend or select.block_product_backend(operands)
    if backend != "cpp":
        operands = _through_gates(operands)
    if backend == "torch":
        ys_BO = _torch_forwards(specs, operands)
    else:
        ys_BO = _BlockProducts.apply(backend, specs, *operands)
    return ys_BO if dtype == x_BI.dtype else tuple(y_BO.to(x_BI.dtype) for y_BO in ys_BO)


def block_product(
    x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, spec: BTTSpec, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """y (B, out_features) of a batch (B, in_features) and one weight without gates: see `block_products`."""
    return block_products(x_BI, [BlockFactors(spec, r_NK, l_KM, bias)], backend=backend)[0]


Operands = Sequence[Any]  # x; R, L, bias or None and gates or None of each weight
Grads = list[Tensor | None]  # of the operands


class _BlockProducts(torch.autograd.Function):
    """The formulas at the top of the file, by a kernel; only the operands are saved."""

    @staticmethod
    def forward(ctx: Any, backend: str, specs: tuple[BTTSpec, ...], *operands: Tensor | None) -> tuple[Tensor, ...]:
        ctx.backend, ctx.specs = backend, specs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands)
        forward, _ = _BACKENDS[backend]
        return tuple(forward(specs, operands))

    @staticmethod
    def backward(ctx: Any, *dys_BO: Tensor | None) -> tuple[Tensor | None, ...]:
        (x_BI, *flat), (wants_x, *wants) = ctx.saved_tensors, ctx.needs_input_grad[2:]
        grads: Grads = [None] * len(flat)
        reached = [k for k, dy_BO in enumerate(dys_BO) if dy_BO is not None]
        if not reached:
            return (None,) * (3 + len(flat))
        with without_autocast(x_BI):
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: by torch's own autograd
                backward = _differentiable
            else:
                _, backward = _BACKENDS[ctx.backend]
            at = [j for k in reached for j in range(4 * k, 4 * k + 4)]
            given = [x_BI, *(flat[j] for j in at)]
            wanted = [wants_x, *(wants[j] for j in at)]
            dx_BI, *made = backward([ctx.specs[k] for k in reached], [dys_BO[k] for k in reached], given, wanted)
        for j, grad in zip(at, made, strict=True):
            grads[j] = grad
        return None, None, dx_BI, *grads


def _cpp_forward(specs: Sequence[BTTSpec], operands: Operands) -> Sequence[Tensor]:
    outs = [spec.out_features for spec in specs]
    x_BI, *flat = operands
    return cpp.block_product(x_BI, flat[::4], flat[1::4], flat[2::4], flat[3::4], [*map(_ranks, specs)], outs)


def _cpp_backward(specs: Sequence[BTTSpec], dys_BO: Sequence[Any], operands: Operands, wants: Sequence[bool]) -> Grads:
    (x_BI, *flat), (wants_x, *rest) = operands, wants
    wants_r, wants_l = any(rest[::4]) or any(rest[3::4]), any(rest[1::4]) or any(rest[2::4])
    tensors = flat[::4], flat[1::4], flat[2::4], flat[3::4]
    made = iter(cpp.block_product_backward(x_BI, dys_BO, *tensors, [*map(_ranks, specs)], wants_x, wants_r, wants_l))
    computed = [wants_x, *(wants_l if k % 4 in (1, 2) else wants_r for k in range(len(flat)))]
    return [
        next(made) if each and tensor is not None else None for each, tensor in zip(computed, operands, strict=True)
    ]


def _torch_forwards(specs: Sequence[BTTSpec], operands: Operands) -> tuple[Tensor, ...]:
    x_BI, *flat = _through_gates(operands)
    return tuple(_torch_forward(spec, x_BI, *flat[4 * k : 4 * k + 3]) for k, spec in enumerate(specs))


def _through_gates(operands: Operands) -> list[Any]:
    """R diag(g), and no gates."""
    x_BI, flat = operands[0], list(operands[1:])  # *flat is a tuple where torch 2.12 compiles this
    for k in range(0, len(flat), 4):
        if flat[k + 3] is not None:
            flat[k], flat[k + 3] = flat[k] * flat[k + 3], None
    return [x_BI, *flat]


def _triton_forwards(specs: Sequence[BTTSpec], operands: Operands) -> Sequence[Tensor]:
    x_BI, *flat = operands
    return [_triton_forward(spec, x_BI, *flat[4 * k : 4 * k + 3]) for k, spec in enumerate(specs)]


def _triton_backwards(
    specs: Sequence[BTTSpec], dys_BO: Sequence[Any], operands: Operands, wants: Sequence[bool]
) -> Grads:
    (x_BI, *flat), (wants_x, *rest), dx_BI, grads = operands, wants, None, list[Tensor | None]()
    for k, (spec, dy_BO) in enumerate(zip(specs, dys_BO, strict=True)):
        here = slice(4 * k, 4 * k + 3)
        each, *made = _triton_backward(spec, dy_BO, [x_BI, *flat[here]], [wants_x, *rest[here]])
        dx_BI = each if dx_BI is None or each is None else dx_BI + each
        grads += [*made, None]
    return [dx_BI, *grads]


def _triton_forward(spec: BTTSpec, x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None) -> Tensor:
    from comera.kernels import triton_blocks as triton

    inputs, outputs = _sides(spec, x_BI.device)
    r_NK, l_KM = r_NK.contiguous(), l_KM.contiguous()
    h_BK = triton.to_components(x_BI, r_NK, (1, r_NK.shape[1]), inputs)
    return triton.to_features(h_BK, l_KM, (l_KM.shape[1], 1), outputs, bias)


def _triton_backward(spec: BTTSpec, dy_BO: Tensor, operands: Operands, wants: Sequence[bool]) -> Grads:
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
    return [dx_BI, dr_NK, dl_KM, dy_BO.sum(0) if wants[3] else None]


_BACKENDS = {"cpp": (_cpp_forward, _cpp_backward), "triton": (_triton_forwards, _triton_backwards)}


def _differentiable(
    specs: Sequence[BTTSpec], dys_BO: Sequence[Any], operands: Operands, wants: Sequence[bool]
) -> Grads:
    """The gradients, which can be differentiated again."""
    wanted = [each for each, wants_it in zip(operands, wants, strict=True) if wants_it]
    grads = iter(torch.autograd.grad(_torch_forwards(specs, operands), wanted, dys_BO, create_graph=True))
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
    return batched_product(spec, x_BI, r_NK, l_KM, bias, component_places(spec, x_BI.device))


def batched_product(
    spec: BTTSpec, x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, bias: Tensor | None, places: Sequence[Tensor]
) -> Tensor:
    """y (B, out_features) by batched products of torch, all in one dtype; blocks of different ranks are padded to equal
    ones by `places`, the `component_places` of the spec."""
    (a, c), rank = spec.blocks, spec.block_ranks
    padding = spec.padded_shape[0] - spec.in_features
    x_ABN = (F.pad(x_BI, (0, padding)) if padding else x_BI).unflatten(1, (a, -1)).transpose(0, 1)
    if isinstance(rank, int):
        h_BACR = (x_ABN @ r_NK.unflatten(1, (a, c * rank)).transpose(0, 1)).transpose(0, 1).unflatten(2, (c, rank))
        h_CBS = h_BACR.permute(2, 0, 1, 3).flatten(2)
        l_CSM = l_KM.unflatten(0, (a, c, rank)).transpose(0, 1).flatten(1, 2)
    else:
        first_AQ, second_CS, place_CS = places
        h_ABQ = x_ABN @ r_NK[:, first_AQ].movedim(0, 1)
        h_CBS = h_ABQ.transpose(0, 1).flatten(1)[:, place_CS].transpose(0, 1)
        l_CSM = F.pad(l_KM, (0, 0, 0, 1))[second_CS]
    y_CBM = h_CBS @ l_CSM
    y_BO: Tensor = y_CBM.transpose(0, 1).flatten(1)[:, : spec.out_features]
    return y_BO if bias is None else y_BO + bias


def component_places(spec: BTTSpec, device: torch.device) -> tuple[Tensor, ...]:
    """For blocks of different ranks, else nothing: the components of each input block (A, Q), those of each output
    block (C, S), and where the latter are among the former (C, S). Only the second are padded with K, so L with zeros,
    by which h is multiplied there whatever it is: the others are padded with any, which copies neither R nor h.

    Kept, since a copy of the ranks in each forward would make the host wait for a GPU: in a compiled one, too.
    """
    if isinstance(spec.block_ranks, int):
        return ()
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        places: tuple[Tensor, ...] = getattr(_COMPILED, _name_of_places(spec, device))
        return places
    if traced():
        return _component_places(spec, device)
    return _places(spec, device)


def _places(spec: BTTSpec, device: torch.device) -> tuple[Tensor, ...]:
    with unrecorded(), torch.inference_mode(False):
        return _kept_places(spec, device, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE))


class _Compiled:
    """Places by name, as attributes: of what is made while torch.compile traces, it can read these as tensors."""


_COMPILED = _Compiled()


@constant_when_traced
def _name_of_places(spec: BTTSpec, device: torch.device) -> str:
    places = _places(spec, device)
    name = f"places_{id(places)}"
    setattr(_COMPILED, name, places)
    return name


@lru_cache(maxsize=256)
def _kept_places(spec: BTTSpec, device: torch.device, fake: object) -> tuple[Tensor, ...]:
    """fake: the mode whose tensors these are, if they are fake ones."""
    return _component_places(spec, device)


def _component_places(spec: BTTSpec, device: torch.device) -> tuple[Tensor, ...]:
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
    place_CS = F.pad(at_K, (0, 1))[second_CS]
    return first_AQ.where(place_Q < rank_A[:, None], 0), second_CS, place_CS
