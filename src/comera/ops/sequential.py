"""y = x W + bias for a tensor train in groups of cores: each group is merged first, then x absorbs one after another.

Groups, and the order in which their cores merge, come from the plan (ops/planner/groups.py). Two special cases: one
group for the input cores and one for the output cores give the factors of (x A) B; a single group gives the dense
weight. No group needs to end between input and output cores.

    group  (R, M·N, S)     M its input modes, N its output modes, either may be empty
    input  T (R·M, M'·B) → Gᵀ T  (S, M'·B)      M' the input modes still to come: features first, the batch last
    then   T (B·N', R·M) → T G   (B·N', N·S)    N' the output modes already there

Every step is one product of two matrices and a view of its result. With the batch last, input cores need no small
product per sample, whose weight would get a gradient per sample too; the price is one transposed copy of x, and only
where the first group leaves input modes to come.

Shapes: B flattened batch, I/O in/out features, R/S left/right rank, N mode(s), K contracted. Sizes are given in full,
never as -1: ranks may be 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from comera.ops.chunking import pad_last
from comera.ops.dtypes import merge_dtype, product
from comera.ops.planner.groups import Group, Groups
from comera.tt.spec import TTSpec


def merge_group(group: Group, cores: Sequence[Tensor]) -> Tensor:
    """Product of the cores of a group, in its order; (R, modes, S), differentiable."""
    if group.pair is None:
        return cores[group.first]
    left_RNK, right_KNS = merge_group(group.pair[0], cores), merge_group(group.pair[1], cores)
    (r, m, _), (_, n, s) = left_RNK.shape, right_KNS.shape
    return (left_RNK.flatten(0, 1) @ right_KNS.flatten(1)).view(r, m * n, s)


def contract_groups(
    x_BI: Tensor, spec: TTSpec, cores: Sequence[Tensor], groups: Groups, bias: Tensor | None = None
) -> Tensor:
    """y = x W + bias by `groups`; autocast must be off.

    x_BI: (batch, in_features). bias: (out_features,). Both in the dtype of the products with the batch; the cores are
    merged in their own dtype or float32. Returns (batch, out_features), contiguous, in x's dtype.
    """
    batch, split, modes = x_BI.shape[0], spec.split, spec.modes
    cores = [core.to(merge_dtype(core.dtype)) for core in cores]
    first, done, t = 0, 1, x_BI.t()
    for group in groups:
        last = group.end
        group_RNS = merge_group(group, cores)
        r, _, s = group_RNS.shape
        here, there = prod(modes[first : min(last, split)]), prod(modes[max(first, split) : last])
        weight_KN = group_RNS.reshape(r * here, there * s)
        if first == 0 and last < split:
            t = pad_last(x_BI, prod(spec.in_modes)).t()
        elif first == 0:
            weight_KN = weight_KN[: spec.in_features]
        if last <= split:
            t = product(weight_KN.t().to(x_BI.dtype), t.reshape(weight_KN.shape[0], prod(modes[last:split]) * batch))
        else:
            t_BK = t.reshape(weight_KN.shape[0], batch).t() if first <= split else t.view(batch * done, r)
            whole = first <= split and last == spec.order  # all output modes at once
            weight_KN = weight_KN[:, : spec.out_features] if whole else weight_KN
            t = product(t_BK, weight_KN.to(x_BI.dtype), bias if whole else None)
            bias = None if whole else bias
            done *= there
        first = last
    y_BO = t.view(batch, done)[:, : spec.out_features] if t.shape != (batch, spec.out_features) else t
    return y_BO.contiguous() if bias is None else y_BO + bias
