"""Stacks of matrices in one weight, such as the experts of a layer: which specs hold one, and one matrix of it.

A stack W (in, E, out) of E matrices is the weight of a linear map, in either of two ways::

    TT   (in·E → out)   the expert is the last input mode, or the fastest part of it: the other cores are shared
    BTT  (in → E·out)   each expert has output blocks of its own: a block tensor train for each, nothing is shared

So modes, ranks, decomposition, pruning and files are those of linear layers. docs/method.md §1.

Shapes: E experts, I/O features in and out, R/S left/right rank, N features of an input block, B = A·C blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comera.errors import SpecError
from comera.tt.blocks import group
from comera.tt.dense import merge
from comera.tt.spec import BTTSpec, TTSpec


def stack_shape(kind: type[TTSpec | BTTSpec], experts: int, in_features: int, out_features: int) -> tuple[int, int]:
    """The shape of a spec that holds a stack: its input and output features."""
    return (in_features, experts * out_features) if kind is BTTSpec else (experts * in_features, out_features)


def check_stack(spec: TTSpec | BTTSpec, experts: int, in_features: int, out_features: int) -> None:
    """Raise SpecError unless a spec holds `experts` matrices of these sizes."""
    want = stack_shape(type(spec), experts, in_features, out_features)
    if spec.shape != want:
        matrices = f"{experts} experts {in_features} -> {out_features}"
        raise SpecError(
            f"expected {want[0]} -> {want[1]} for {matrices}, got {spec.shape[0]} -> {spec.shape[1]}: {spec}"
        )
    if isinstance(spec, BTTSpec):
        blocks, size = spec.out_modes
        if experts > 1 and (blocks % experts or blocks // experts * size != out_features):
            raise SpecError(
                f"expected output blocks that make up the {out_features} features of each of {experts} experts, got "
                f"{blocks} of {size}: choose a number of blocks that divides {out_features}"
            )
    elif spec.in_modes[-1] % experts:
        raise SpecError(
            f"expected a last input mode that holds the {experts} experts (a multiple of them), got {spec.in_modes}: "
            "end in_modes with the number of experts, or omit it to have it chosen"
        )


def expert_matrix(spec: TTSpec | BTTSpec, cores: Sequence[Tensor], experts: int, index: int | Tensor) -> Tensor:
    """Matrix (I, O) of one expert from cores that have absorbed the gates; no other expert's is made.

    index: 0 ... experts - 1, or negative from the end; a tensor with one integer causes no synchronization.

    Example:
        >>> import torch
        >>> from comera.tt import materialize, tt_spec
        >>> from comera.tt.experts import expert_matrix
        >>> spec = tt_spec(8 * 12, 20, order=4, rank=6, kernel_size=(8,))  # 8 experts 12 -> 20
        >>> cores = [torch.randn(shape) for shape in spec.core_shapes]
        >>> stack = materialize(spec, cores).view(12, 8, 20)
        >>> torch.allclose(expert_matrix(spec, cores, 8, 5), stack[:, 5], atol=1e-5)
        True
    """
    index_1 = torch.as_tensor(index, device=cores[0].device).reshape(1)
    index_1 = torch.where(index_1 < 0, index_1 + experts, index_1)
    if isinstance(spec, BTTSpec):
        a, c = spec.blocks
        r_BNP, l_BPM = (
            blocks.unflatten(0, (a, experts, c // experts)).index_select(1, index_1).flatten(0, 2)
            for blocks in group(spec, cores)
        )
        blocks_AC = (r_BNP @ l_BPM).unflatten(0, (a, c // experts))
        expert: Tensor = blocks_AC.transpose(1, 2).flatten(2, 3).flatten(0, 1)[: spec.in_features]
        return expert
    last, (rows, cols) = spec.split - 1, spec.padded_shape
    core_RS = cores[last].unflatten(1, (-1, experts)).index_select(2, index_1).squeeze(2)
    matrix = merge([*cores[:last], core_RS, *cores[spec.split :]]).reshape(rows // experts, cols)
    return matrix[: spec.in_features // experts, : spec.out_features]
