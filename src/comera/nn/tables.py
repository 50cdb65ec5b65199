"""All of a model's tables in one lookup: in one call of the kernel each way, not one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from comera.errors import DataError
from comera.kernels.select import supports
from comera.kernels.tracing import traced
from comera.nn.embedding import TTMEmbedding, TTMEmbeddingBag, TTMTable
from comera.nn.tensor_train import is_plain
from comera.ops.lookup import DenseTable, Table, ttm_lookups

_Together = TTMTable | nn.Embedding | nn.EmbeddingBag  # what one lookup makes the rows of


def lookup_tables(tables: Sequence[Callable[[Tensor], Tensor]], ids: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The rows of many tables for one batch: of each what it returns itself, to the bit. So are gradients, except that
    those of torch's tables are summed in the order of the ids.

    A recommendation model has some dozen tables. Called one by one, each takes its own checks, nodes of autograd and
    meetings of threads, which take longer than its rows; here one operation makes the rows of all that are in float32
    on the CPU, of compressed tables and of dense ones with dense gradients. Every other table is called as it is: with
    sparse gradients, hooks or a limit of its rows' norm, subclasses, and all of them under torch.compile.

    Args:
        tables: `TTMEmbedding`, `TTMEmbeddingBag`, `nn.Embedding`, `nn.EmbeddingBag` or anything else that makes rows
            (B, D) of ids (B,). Bags get their ids as (B, 1).
        ids: int32 or int64, (B, tables), or for each table one tensor (B,). One that is (B, 1) is passed on as it is:
            so a wrapper or a module of your own gets bags of one id.

    Returns:
        The rows of each table, (B, D), in the dtype of its parameters. Of ids (B, 1) what the table returns for these:
        bags (B, D), other tables of ours and of torch (B, 1, D).

    Raises:
        DataError: ids that do not fit the tables.
        IdError: an id outside of its table; which table is counted from 0. On an accelerator and under torch.compile
            this is a device-side assertion.
        TypeError: ids of another dtype.

    Example:
        >>> import torch
        >>> from comera.nn import TTMEmbeddingBag, lookup_tables
        >>> from comera.tt import ttm_spec
        >>> users, items = (TTMEmbeddingBag(ttm_spec(rows, 16, order=2, rank=8)) for rows in (1_000_000, 40_000))
        >>> days = torch.nn.EmbeddingBag(7, 16, mode="sum")
        >>> ids = torch.tensor([[999_999, 17, 6], [3, 39_999, 0]])  # two samples, three tables
        >>> torch.stack(lookup_tables([users, items, days], ids), 1).shape
        torch.Size([2, 3, 16])

    Source: docs/method.md §5.
    """
    columns = _columns(ids, len(tables))
    if traced():
        return [_rows(table, ids_B) for table, ids_B in zip(tables, columns, strict=True)]
    together = {k: table for k, table in enumerate(tables) if _is_ours(table) or _is_dense(table)}
    given = [_table(table, f"table {k}") for k, table in together.items()]
    made = ttm_lookups([_ids(table, columns[k]) for k, table in together.items()], given)
    rows = {k: _scaled(table, made_BD) for (k, table), made_BD in zip(together.items(), made, strict=True)}
    return [rows[k] if k in rows else _rows(table, columns[k]) for k, table in enumerate(tables)]


def _columns(ids: Tensor | Sequence[Tensor], count: int) -> Sequence[Tensor]:
    """The ids of each table, (B,) or (B, 1)."""
    if isinstance(ids, Tensor):
        if ids.dim() != 2 or ids.shape[1] != count:
            raise DataError(
                f"expected ids (batch, {count}), a column for each table, got ids of shape {list(ids.shape)}"
            )
        return ids.unbind(1)
    if len(ids) != count or any(each.dim() != 1 and each.shape[1:] != (1,) for each in ids):
        came = f"{len(ids)} of shapes {[list(each.shape) for each in ids]}"
        raise DataError(f"expected {count} tensors of ids (batch,) or (batch, 1), one for each table, got {came}")
    return ids


def _rows(table: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    """What a table itself returns."""
    return table(ids.unsqueeze(1) if _is_bag(table) and ids.dim() == 1 else ids)


def _is_bag(table: object) -> bool:
    return isinstance(table, nn.EmbeddingBag | TTMEmbeddingBag)


def _table(table: _Together, name: str) -> Table:
    """A table as `ttm_lookups` takes it."""
    if isinstance(table, TTMTable):
        return table.lookup_table(name)
    return DenseTable(table.weight, table.padding_idx, name)


def _ids(table: _Together, ids: Tensor) -> Tensor:
    """The ids to look up: a bag of one id is its row."""
    return ids.flatten() if _is_bag(table) else ids


def _scaled(table: _Together, rows: Tensor) -> Tensor:
    return table.scaled(rows) if isinstance(table, TTMTable) else rows


def _is_ours(table: object) -> TypeGuard[TTMTable]:
    """Whether a call of a table does no more than to look up rows of its tensor train."""
    return isinstance(table, TTMTable) and _is_unseen(table, TTMEmbedding, TTMEmbeddingBag) and is_plain(table.tt)


def _is_dense(table: object) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether a call of a table of torch does no more than to copy rows, which the kernel supports."""
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or not _is_unseen(table, nn.Embedding, nn.EmbeddingBag):
        return False
    if table.sparse or table.max_norm is not None or table.scale_grad_by_freq:
        return False
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:  # returns this row, whatever it is
        return False
    return supports("lookup", table.weight)


def _is_unseen(table: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether a call of a module of one of these types, no subclass, is that of its type, unobserved."""
    hooked = table._forward_hooks or table._forward_pre_hooks or table._backward_hooks or table._backward_pre_hooks
    own = "forward" in vars(table) or table._compiled_call_impl is not None
    return type(table) in types and not (hooked or own or _has_any_global_hook())
