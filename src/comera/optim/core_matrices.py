"""Cores as the matrices that products apply: those of one place in several tensor trains of one spec at a time.

TT: input cores are (r_{k-1}·n_k × r_k), output cores (r_{k-1} × m_k·r_k). BTT: R is block-diagonal with a block
(N × components of the input block) for each input block, L with a block (components of the output block × M) for each
output block. TTM, where a row is looked up: the slice of an id's digit, (r_{k-1} × n_k·r_k). docs/method.md §9.

Shapes: G cores, X matrices of a core, D rows, E columns; A/C input/output blocks, P components of a block.
"""

from torch import Tensor

from comera.tt.blocks import in_places, out_of_places
from comera.tt.ngram import NGramSpec
from comera.tt.spec import BTTSpec, Spec, TTMSpec


def as_matrices(spec: Spec, k: int, cores: Tensor) -> Tensor:
    """Cores k, or tensors of their shape, (G, ...) as matrices (G, X, D, E); blocks of lower rank are filled with
    zeros."""
    if isinstance(spec, BTTSpec):
        if k == 0:
            r_GNACP: Tensor = in_places(spec, cores.flatten(1, 2), 2).unflatten(2, spec.blocks)
            return r_GNACP.movedim(1, 2).flatten(3)
        l_GACPM: Tensor = in_places(spec, cores.flatten(2), 1).unflatten(1, spec.blocks)
        return l_GACPM.movedim(1, 2).flatten(2, 3)
    if isinstance(spec, TTMSpec):
        return cores.movedim(2, 1).flatten(3)
    if isinstance(spec, NGramSpec):
        return cores.unsqueeze(1)
    return (cores.flatten(1, 2) if k < spec.split else cores.flatten(2)).unsqueeze(1)


def from_matrices(spec: Spec, k: int, matrices_GXDE: Tensor) -> Tensor:
    """Tensors (G, ...) of the shape of core k; undoes `as_matrices`."""
    if isinstance(spec, BTTSpec):
        inputs, outputs = spec.blocks
        if k == 0:
            r_GANCP: Tensor = matrices_GXDE.unflatten(3, (outputs, -1))
            return out_of_places(spec, r_GANCP.movedim(1, 2).flatten(2, 3), 2).unsqueeze(1)
        l_GCAPM: Tensor = matrices_GXDE.unflatten(2, (inputs, -1))
        return out_of_places(spec, l_GCAPM.movedim(2, 1).flatten(1, 2), 1).unsqueeze(-1)
    shape = spec.core_shapes[k]
    if isinstance(spec, TTMSpec):
        slices: Tensor = matrices_GXDE.unflatten(3, shape[2:])
        return slices.movedim(1, 2)
    return matrices_GXDE.reshape(-1, *shape)
