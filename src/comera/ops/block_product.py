"""y = x W + bias, W a block tensor train (docs/method.md §1): two products of blocks, and a permutation between them.

    forward    h_A = x_A R_A,    y_C = [h_AC]_A L_C + bias
    backward   [dh_AC]_A = dy_C L_Cᵀ,  dx_A = dh_A R_Aᵀ,  ∂R_A = x_Aᵀ dh_A,  ∂L_C = [h_AC]_Aᵀ dy_C

R_A holds the components of input block A, and L_C those of output block C; block (A, C) of W owns the components that
are in both. h has as many elements per row as there are components, about as many as x: it is cheaper to compute again
than to keep.

Shapes: B flattened batch, A/C input/output blocks, N/M features in an input/output block, K components in the order of
(A, C), Q/S most components of an input/output block.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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
        dtype = working_dtype(x_BI)
        y_BO = block_product(pad_last(x_BI, spec.padded_shape[0]).to(dtype), r_NK.to(dtype), l_KM.to(dtype), spec)
        y_BO = y_BO[:, : spec.out_features].to(x_BI.dtype)
        y_BO = y_BO if bias is None else y_BO + bias
    return y_BO.reshape(*input.shape[:-1], spec.out_features)


def block_product(x_BI: Tensor, r_NK: Tensor, l_KM: Tensor, spec: BTTSpec) -> Tensor:
    """The product of a batch (B, A·N) with the weight of R (N, K) and L (K, M): (B, C·M)."""
    (a, c), rank = spec.blocks, spec.block_ranks
    x_ABN = x_BI.unflatten(1, (a, -1)).transpose(0, 1)
    if isinstance(rank, int):
        h_BACR = (x_ABN @ r_NK.unflatten(1, (a, c * rank)).transpose(0, 1)).transpose(0, 1).unflatten(2, (c, rank))
        h_CBS = h_BACR.permute(2, 0, 1, 3).flatten(2)
        l_CSM = l_KM.unflatten(0, (a, c, rank)).transpose(0, 1).flatten(1, 2)
    else:
        first_AQ, second_CS, place_CS = _padded(spec, x_BI.device)
        h_ABQ = x_ABN @ F.pad(r_NK, (0, 1))[:, first_AQ].movedim(0, 1)
        h_CBS = F.pad(h_ABQ.transpose(0, 1).flatten(1), (0, 1))[:, place_CS].transpose(0, 1)
        l_CSM = F.pad(l_KM, (0, 0, 0, 1))[second_CS]
    y_CBM: Tensor = h_CBS @ l_CSM
    return y_CBM.transpose(0, 1).flatten(1)


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
