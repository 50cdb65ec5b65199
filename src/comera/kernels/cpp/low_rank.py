"""The operations of low_rank.cpp: y_k = x A_k B_k + bias_k of weights that share x.

Shapes: B batch, I/O in/out features, R rank, S rows of b: the rank, and one more with a bias.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, checked, floats, operation, words
from comera.kernels.cpp.memory import empty


class Factors(NamedTuple):
    """A (where it is needed) and b of one weight as the kernels read them, and their sizes."""

    a: Tensor | None
    b: Tensor
    rank: int
    rows: int
    out_features: int

    @property
    def width(self) -> int:
        """Columns of memory that its [1 P] takes, for vectors as long as any processor's."""
        return max(self.rows - self.rank + -(-self.rank // 16) * 16, -(-self.rows // 16) * 16)

    def words(self, p: int, y: Tensor | None, da: Tensor | None = None, db: Tensor | None = None) -> tuple[int, ...]:
        """The weight as low_rank.h has it; p: the address of its [1 P]."""
        tensors = address(self.a), address(self.b), p, address(y), address(da), address(db)
        return self.rank, self.rows, self.out_features, *tensors


def _factors(a_RI: Tensor | None, b_SO: Tensor, rank: int) -> Factors:
    rows, outputs = b_SO.shape
    if not 0 <= rows - rank <= 1:
        raise RuntimeError(f"expected b of rank {rank} with as many rows or one more, got {list(b_SO.shape)}")
    return Factors(None if a_RI is None else floats("A", a_RI), floats("b", b_SO), rank, rows, outputs)


def checked_factors(as_RI: Sequence[Tensor], bs_SO: Sequence[Tensor], features: int) -> list[Factors]:
    """Raises RuntimeError unless each A has `features` columns, each b as many rows as its A or one more, all float32
    on the CPU."""
    for a_RI in as_RI:
        if a_RI.shape[1:] != (features,):
            raise RuntimeError(f"expected A (rank, {features}), got {list(a_RI.shape)}")
    return [_factors(a, b, a.shape[0]) for a, b in zip(as_RI, bs_SO, strict=True)]


def starts(p_BS: Tensor, weights: Sequence[Factors]) -> list[int]:
    """The addresses at which the [1 P_k] of the weights begin in one tensor."""
    return list(accumulate((4 * weight.width for weight in weights[:-1]), initial=p_BS.data_ptr()))


def _output_words(p_BS: Tensor, weights: Sequence[Factors], ys_BO: Sequence[Tensor]) -> bytes:
    each = zip(weights, starts(p_BS, weights), ys_BO, strict=True)
    return words(word for weight, p, y_BO in each for word in weight.words(p, y_BO))


@operation(lambda x, a, b: 2 * x[0] * (sum(r * i for r, i in a) + sum(s * o for s, o in b)))
def low_rank(x_BI: Tensor, as_RI: Sequence[Tensor], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    """All [1 P_k] in one tensor (B, Σ width), then y_k (B, O), from x (B, I), A_k (R, I) and [bias_k; B_k] (S, O).

    Raises RuntimeError for shapes that do not fit each other or are not float32 on the CPU.
    """
    batch, features = x_BI.shape
    x_BI, weights = floats("x", x_BI), checked_factors(as_RI, bs_SO, features)
    columns = sum(weight.width for weight in weights)
    p_BS, ys_BO = empty(batch, columns), [empty(batch, weight.out_features) for weight in weights]
    call("low_rank", batch, features, x_BI, len(weights), _output_words(p_BS, weights, ys_BO), columns)
    return [p_BS, *ys_BO]


@operation(lambda p, ranks, b: 2 * p[0] * sum(s * o for s, o in b))
def low_rank_output(p_BS: Tensor, ranks: Sequence[int], bs_SO: Sequence[Tensor]) -> list[Tensor]:
    """The y_k of `low_rank` from its P, to the same bits. Raises RuntimeError as `low_rank` does."""
    weights = [_factors(None, b, rank) for rank, b in zip(ranks, bs_SO, strict=True)]
    batch, columns = p_BS.shape[0], sum(weight.width for weight in weights)
    p_BS, ys_BO = checked("P", p_BS, batch, columns), [empty(batch, weight.out_features) for weight in weights]
    call("low_rank_output", batch, len(weights), _output_words(p_BS, weights, ys_BO), columns)
    return ys_BO


def _low_rank_backward_flops(x: Any, p: Any, dy: Any, a: Any, b: Any, dx: bool, da: bool, db: bool) -> int:
    """U_k, dx and ∂A_k, ∂B_k."""
    total = 0
    for (rank, features), (rows, out), each in zip(a, b, dy, strict=True):
        if each is not None:
            total += rank * (out * (dx or da) + features * (dx + da)) + rows * out * db
    return int(2 * x[0] * total)


@operation(_low_rank_backward_flops)
def low_rank_backward(
    x_BI: Tensor,
    p_BS: Tensor,
    dys_BO: Sequence[Tensor | None],
    as_RI: Sequence[Tensor],
    bs_SO: Sequence[Tensor],
    wants_x: bool,
    wants_a: bool,
    wants_b: bool,
) -> list[Tensor]:
    """dx, then ∂A_k, then [∂bias_k; ∂B_k] of those k that have a dy_k, each where wanted.

    Raises RuntimeError as `low_rank` does.
    """
    batch, features = x_BI.shape
    x_BI, weights = floats("x", x_BI), checked_factors(as_RI, bs_SO, features)
    columns = sum(weight.width for weight in weights)
    p_BS = checked("P", p_BS, batch, columns)
    dys_BO = [checked("dy", dy, batch, weight.out_features) for dy, weight in zip(dys_BO, weights, strict=True)]
    dx_BI = empty(batch, features) if wants_x else None
    das_RI: list[Tensor | None] = []
    dbs_SO: list[Tensor | None] = []
    flat: list[int] = []
    for weight, p, dy_BO in zip(weights, starts(p_BS, weights), dys_BO, strict=True):
        if dy_BO is not None:
            das_RI.append(x_BI.new_empty(weight.rank, features) if wants_a else None)
            dbs_SO.append(torch.empty_like(weight.b) if wants_b else None)
            flat += weight.words(p, dy_BO, das_RI[-1], dbs_SO[-1])
    call("low_rank_backward", batch, features, x_BI, len(das_RI), words(flat), columns, dx_BI)
    return [made for made in (dx_BI, *das_RI, *dbs_SO) if made is not None]
