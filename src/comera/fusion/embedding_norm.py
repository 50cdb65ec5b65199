"""The LayerNorm of a sum of embeddings, in one pass over memory (ops/residual_norm.py)."""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comera.fusion.lazy import value_of
from comera.fusion.merge_cache import MergeCache
from comera.fusion.obstacles import call_obstacle, replaced_obstacle, submodule
from comera.fusion.registry import BlockPattern, Instead, StandIn
from comera.fusion.sums import NO_DROPOUT, Sum, layer_norm_obstacle, norm_of_sums
from comera.kernels.tracing import traced
from comera.ops.dtypes import autocast_dtype
from comera.ops.residual_norm import residual_layer_norm


@dataclass(frozen=True)
class EmbeddingNorm(BlockPattern):
    """How a module holds the norm of a sum of embeddings: norm(tokens + table(ids) + ...), in its forward.

    tables: names of the `nn.Embedding` layers whose rows are added; the embeddings of tokens may come from any layer.
    norm: name of the LayerNorm.

    Example:
        >>> import torch
        >>> from comera.fusion import EmbeddingNorm, fuse_, register_block
        >>> class Embeddings(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.token, self.kind = torch.nn.Embedding(99, 64), torch.nn.Embedding(2, 64)
        ...         self.norm = torch.nn.LayerNorm(64)
        ...     def forward(self, ids, kinds):
        ...         return self.norm(self.token(ids) + self.kind(kinds))
        >>> register_block(Embeddings, EmbeddingNorm(tables=("kind",), norm="norm"))
        >>> embeddings, ids = Embeddings(), torch.arange(6).view(2, 3)
        >>> before = embeddings(ids, ids % 2)
        >>> fuse_(embeddings).fused("embedding norm"), torch.allclose(embeddings(ids, ids % 2), before, atol=1e-5)
        (('',), True)
    """

    tables: tuple[str, ...]
    norm: str = "LayerNorm"
    kind = "embedding norm"
    method = "forward"

    def obstacle(self, module: nn.Module) -> str | None:
        for name in self.tables:
            if (reason := _table_obstacle(name, submodule(module, name))) is not None:
                return reason
        return layer_norm_obstacle(NO_DROPOUT, submodule(module, self.norm)) or replaced_obstacle(module, self)

    def run(self, module: nn.Module, cache: MergeCache, /, *args: Any, **kwargs: Any) -> Any:
        if traced() or self.obstacle(module):
            return self.run_plain(module, *args, **kwargs)
        tables = {name: submodule(module, name) for name in self.tables}
        given = {name: Instead(table, partial(_rows, table)) for name, table in tables.items()}
        given[self.norm] = norm_of_sums(submodule(module, self.norm))
        return self.run_plain(StandIn(module, given), *args, **kwargs)


def _table_obstacle(name: str, table: nn.Module) -> str | None:
    """Why the rows of a table cannot be added by one operation; None if they can."""
    if type(table) is not nn.Embedding:
        return f"{name} is a {type(table).__name__}, not an nn.Embedding"
    if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
        return f"{name} has max_norm, scale_grad_by_freq or sparse gradients"
    return f"{name} {reason}" if (reason := call_obstacle(table)) else None


def _rows(layer: nn.Embedding, ids: Tensor) -> "_Rows":
    """The rows of a table, which wait for what they are added to."""
    rows = layer.num_embeddings
    if ids.numel() <= rows:  # of a large table those that are wanted
        return _Rows.of(layer(ids))
    if layer.padding_idx is None:
        return _Rows(layer.weight, ids)
    return _Rows(layer(torch.arange(rows, device=ids.device)), ids)  # whose gradient knows of the padding


class _Rows(Sum):
    """z + table[ids], which a norm computes together with itself; without z the rows alone, which wait for z."""

    def __init__(self, table: Tensor, ids: Tensor, z: Tensor | None = None) -> None:
        super().__init__(z)
        self._table, self._ids = table, ids

    @classmethod
    def of(cls, values: Tensor) -> "_Rows":
        """All rows of `values`, one after the other."""
        shape = values.shape[:-1]
        return cls(values.reshape(-1, values.shape[-1]), torch.arange(prod(shape), device=values.device).view(shape))

    def compute(self) -> Tensor:
        rows = F.embedding(self._ids, self._table)
        return rows if self._z is None else self._z + rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._ids.shape, self._table.shape[-1])) if self._z is None else self._z.shape

    def reshape(self, *shape: Any) -> Tensor:
        return self.value.reshape(*shape)

    view = reshape

    def normed(self, norm: nn.Module) -> Tensor:
        """The norm of the sum."""
        z, table = self._z, self._table
        plain = z is not None and z.dtype == table.dtype and autocast_dtype(z) is None
        if z is None or not plain or type(norm) is not nn.LayerNorm or norm.normalized_shape != z.shape[-1:]:
            y: Tensor = norm(self.value)
            return y
        return residual_layer_norm(z, table, norm.weight, norm.bias, norm.eps, rows=self._ids)[1]

    def __add__(self, other: Any) -> Any:
        if isinstance(other, _Rows) and not (self._z is not None and other._z is not None):
            return self._joined(other)
        if isinstance(other, Tensor) and self._z is None and _reaches(self._ids.shape, other.shape[:-1]):
            return _Rows(self._table, self._ids.expand(other.shape[:-1]), other)
        return self.value + value_of(other)

    __radd__ = __add__

    def _joined(self, other: "_Rows") -> "_Rows":
        """The sum of both. Each pair of rows is a row of one table where these are fewer than the sums themselves."""
        z = other._z if self._z is None else self._z
        shape = torch.broadcast_shapes(self._ids.shape, other._ids.shape)
        if len(self._table) * len(other._table) > prod(shape):
            values = F.embedding(self._ids, self._table) + F.embedding(other._ids, other._table)
            rows = _Rows.of(values)
        else:
            pairs = (self._table[:, None] + other._table).flatten(0, 1)
            one = torch.arange(len(other._table), device=other._ids.device)[:, None]
            checked = F.embedding(other._ids, one).squeeze(-1)  # an id outside its table is no row of another pair
            rows = _Rows(pairs, self._ids * len(other._table) + checked)
        return rows if z is None else rows + z


def _reaches(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a tensor of the first shape can be expanded to the other one."""
    sizes = zip(reversed(shape), reversed(other), strict=False)
    return len(shape) <= len(other) and all(size in (1, wanted) for size, wanted in sizes)
