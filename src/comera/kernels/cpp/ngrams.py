"""The operations of ngrams.cpp: features of all n-grams of a batch, and the gradients of its tables.

Shapes: B sequences, T positions, L ids of a sequence and before it, V rows of a table, W its columns, E the columns of
all tables but the first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comera.kernels.cpp.library import address, call, check_shape, checked, floats, on_cpu, operation, words
from comera.kernels.cpp.memory import empty


@operation()
def ngrams(
    ids: Tensor, reach: Tensor, tables: Sequence[Tensor], needed: Sequence[Tensor], eps: float
) -> tuple[Tensor, Tensor]:
    """e (B, T, E), the features of orders 2, 3, … of each position, and ρ (B, T, orders) of their norms.

    ids: (B, L) int64. reach: (B, T) int64, how many earlier ids a position may read. tables: (V, W), none wider than
    the one before. needed: for all but the first, ones and zeros (W,).
    Raises RuntimeError for shapes and dtypes that do not fit, ValueError for an id that the tables do not have.
    """
    ids, reach, tables, needed = _operands(ids, reach, tables, needed)
    about, e, rho = _made(ids, reach, tables)
    call("ngrams", _tables(tables, needed), len(tables), about, eps, e, rho)
    return e, rho


@operation()
def ngrams_backward(
    de: Tensor, e: Tensor, rho: Tensor, ids: Tensor, reach: Tensor, tables: Sequence[Tensor], needed: Sequence[Tensor]
) -> list[Tensor]:
    """The gradients of the tables from that of e. Raises RuntimeError as `ngrams` does."""
    ids, reach, tables, needed = _operands(ids, reach, tables, needed)
    about, dx, like_rho = _made(ids, reach, tables)
    de, e, rho = checked("de", de, *dx.shape), checked("e", e, *dx.shape), checked("rho", rho, *like_rho.shape)
    grads, d0 = [empty(*table.shape) for table in tables], empty(*reach.shape, tables[0].shape[1])
    call("ngrams_backward", _tables(tables, needed, grads), len(tables), about, de, e, rho, dx, d0)
    return grads


def _operands(
    ids: Tensor, reach: Tensor, tables: Sequence[Tensor], needed: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """All of them as the kernel reads them, after a check that they fit each other."""
    for name, each in (("ids", ids), ("reach", reach)):
        if each.dtype != torch.int64 or not on_cpu(each) or each.dim() != 2:
            raise RuntimeError(f"expected {name} as a matrix of int64 on the CPU, got {list(each.shape)} {each.dtype}")
    if len(ids) != len(reach) or ids.shape[1] < reach.shape[1] + len(tables) - 1:
        raise RuntimeError(
            f"expected ids of {len(reach)} sequences with {len(tables) - 1} before their {reach.shape[1]}, got "
            f"{list(ids.shape)}"
        )
    rows, most = tables[0].shape
    for k, table in enumerate(tables):
        if table.dim() != 2 or table.shape[0] != rows or table.shape[1] > most:
            raise RuntimeError(f"expected table {k} of {rows} rows and at most {most} columns, got {list(table.shape)}")
        most = table.shape[1]
    if len(needed) != len(tables) - 1:
        raise RuntimeError(f"expected what {len(tables) - 1} orders need, got {len(needed)}")
    for k, (own, table) in enumerate(zip(needed, tables[1:], strict=True), start=1):
        check_shape(f"needed {k}", own, (table.shape[1],))
    held = [floats(f"table {k}", table) for k, table in enumerate(tables)]
    return ids.contiguous(), reach.contiguous(), held, [floats(f"needed {k}", own) for k, own in enumerate(needed)]


def _made(ids: Tensor, reach: Tensor, tables: Sequence[Tensor]) -> tuple[bytes, Tensor, Tensor]:
    """The ids as ngrams.cpp has them, a tensor like e, and one like ρ."""
    (batch, positions), (_, length) = reach.shape, ids.shape
    about = words([address(ids), address(reach), batch, length, positions, tables[0].shape[0]])
    return (
        about,
        empty(batch, positions, sum(table.shape[1] for table in tables[1:])),
        empty(batch, positions, len(tables) - 1),
    )


def _tables(tables: Sequence[Tensor], needed: Sequence[Tensor], grads: Sequence[Tensor | None] | None = None) -> bytes:
    parts = zip(tables, (None, *needed), grads or [None] * len(tables), strict=True)
    return words([word for t, n, g in parts for word in (address(t), t.shape[1], address(n), address(g))])
