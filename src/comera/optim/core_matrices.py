"""Cores as the matrices that products apply, one core at a time.

TT: input cores are (r_{k-1}·n_k × r_k), output cores (r_{k-1} × m_k·r_k). BTT: R is block-diagonal with a block
(N × components of the input block) for each input block, L with a block (components of the output block × M) for each
output block. TTM, where a row is looked up: the slice of an id's digit, (r_{k-1} × n_k·r_k). docs/method.md §9.

Shapes: X matrices of the core, D rows, E columns; A/C input/output blocks, P components of a block.
"""

from torch import Tensor

from comera.tt.blocks import in_places, out_of_places
from comera.tt.spec import BTTSpec, Spec, TTMSpec


def as_matrices(spec: Spec, k: int, core: Tensor) -> Tensor:
    """Core k, or a tensor of its shape, as matrices (X, D, E); blocks of lower rank are filled with zeros."""
    if isinstance(spec, BTTSpec):
        if k == 0:
            r_NACP: Tensor = in_places(spec, core.flatten(0, 1), 1).unflatten(1, spec.blocks)
            return r_NACP.movedim(0, 1).flatten(2)
        l_ACPM: Tensor = in_places(spec, core.flatten(1), 0).unflatten(0, spec.blocks)
        return l_ACPM.movedim(0, 1).flatten(1, 2)
    if isinstance(spec, TTMSpec):
        return core.movedim(1, 0).flatten(2)
    return (core.flatten(0, 1) if k < spec.split else core.flatten(1)).unsqueeze(0)


def from_matrices(spec: Spec, k: int, matrices_XDE: Tensor) -> Tensor:
    """A tensor of the shape of core k; undoes `as_matrices`."""
    if isinstance(spec, BTTSpec):
        inputs, outputs = spec.blocks
        if k == 0:
            r_ANCP: Tensor = matrices_XDE.unflatten(2, (outputs, -1))
            return out_of_places(spec, r_ANCP.movedim(0, 1).flatten(1, 2), 1).unsqueeze(0)
        l_CAPM: Tensor = matrices_XDE.unflatten(1, (inputs, -1))
        return out_of_places(spec, l_CAPM.movedim(1, 0).flatten(0, 1), 0).unsqueeze(-1)
    shape = spec.core_shapes[k]
    if isinstance(spec, TTMSpec):
        slices: Tensor = matrices_XDE.unflatten(2, shape[2:])
        return slices.movedim(0, 1)
    return matrices_XDE.reshape(shape)
