"""Smaller embedding tables: what a user would pick instead of tensor trains where tables do not fit.

    hashing             row(i) = W[i mod m]                       W (m, D): ids share rows
    quotient_remainder  row(i) = Q[⌊i/m⌋] ⊙ R[i mod m]            Q (⌈V/m⌉, D), R (m, D): no two ids share both
    narrow_tables       row(i) = P W[i]                           W (V, d), P (D, d), d < D: each id has its own row

Sources: Weinberger et al. 2009 (arXiv:0902.2206); Shi et al. 2019 (arXiv:1909.02107), with products; Ginart et al. 2019
(arXiv:1909.11810), widths by the budget instead of by popularity.

V rows of a table, D its width, B bags, N ids in a bag."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from math import floor, isqrt, sqrt
from typing import Any, ClassVar

from torch import Tensor, nn

from comera.baselines.common import Replaced, elements
from comera.convert import LayerRow
from comera.errors import ConfigError, ConversionError


class SmallerTable(nn.Module, ABC):
    """Stands for a table of sums over bags, (num_embeddings, embedding_dim), with fewer parameters. ids (B, N) int64 ->
    (B, embedding_dim). size: how many of what `unit` names it stores."""

    unit: ClassVar[str]

    def __init__(self, num_embeddings: int, embedding_dim: int, size: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.size = num_embeddings, embedding_dim, size
        self.make_layers()
        self.reset_parameters()

    @staticmethod
    @abstractmethod
    def elements(rows: int, dim: int, size: int) -> int:
        """Parameters of such a table; they grow with the size."""

    @classmethod
    def fit(cls, rows: int, dim: int, most: int) -> int:
        """The largest size with at most `most` parameters; the least possible one if all have more."""
        return max(1, most // cls.elements(rows, dim, 1))

    @abstractmethod
    def make_layers(self) -> None:
        """Set the layers."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Draw the parameters anew, so that rows are as large as those of a table of as many rows as are stored."""

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.size} {self.unit}"


def _draw_rows(table: nn.Embedding | nn.EmbeddingBag) -> None:
    bound = sqrt(1 / table.num_embeddings)
    nn.init.uniform_(table.weight, -bound, bound)


class HashedTable(SmallerTable):
    """The hashing trick: ids share the rows of a smaller table."""

    unit = "rows"

    @staticmethod
    def elements(rows: int, dim: int, size: int) -> int:
        return size * dim

    def make_layers(self) -> None:
        self.table = nn.EmbeddingBag(self.size, self.embedding_dim, mode="sum")

    def reset_parameters(self) -> None:
        _draw_rows(self.table)

    def forward(self, ids: Tensor) -> Any:
        return self.table(ids % self.size)


class QuotientRemainderTable(SmallerTable):
    """Products of a row chosen by the quotient of the id and one chosen by its remainder."""

    unit = "remainders"

    @staticmethod
    def elements(rows: int, dim: int, size: int) -> int:
        return (size + -(-rows // size)) * dim

    @classmethod
    def fit(cls, rows: int, dim: int, most: int) -> int:
        # m + ⌈V/m⌉ is least at about √V and grows from there; of the sizes beyond it, the largest has the fewest ids
        # that share a remainder
        sizes = range(isqrt(rows - 1) + 1, rows + 1)
        count = bisect_right(sizes, most, key=lambda size: cls.elements(rows, dim, size))
        return sizes[max(0, count - 1)]

    def make_layers(self) -> None:
        self.quotients = nn.Embedding(-(-self.num_embeddings // self.size), self.embedding_dim)
        self.remainders = nn.Embedding(self.size, self.embedding_dim)

    def reset_parameters(self) -> None:
        # At first the hashing trick. Rejected: both within [√(1/V), 1], as DLRM's published code draws them; products
        # then have a mean of a quarter, and cross-entropy was 1.3 % higher after a pass over a sample of Criteo's log.
        nn.init.ones_(self.quotients.weight)
        _draw_rows(self.remainders)

    def forward(self, ids: Tensor) -> Any:
        return (self.quotients(ids // self.size) * self.remainders(ids % self.size)).sum(1)


class NarrowTable(SmallerTable):
    """A table of fewer columns and a projection of its rows."""

    unit = "columns"

    @staticmethod
    def elements(rows: int, dim: int, size: int) -> int:
        return size * (rows + dim)

    def make_layers(self) -> None:
        self.table = nn.EmbeddingBag(self.num_embeddings, self.size, mode="sum")
        self.projection = nn.Linear(self.size, self.embedding_dim, bias=False)

    def reset_parameters(self) -> None:
        _draw_rows(self.table)
        nn.init.normal_(self.projection.weight, std=sqrt(1 / self.size))  # keeps the size of rows

    def forward(self, ids: Tensor) -> Any:
        return self.projection(self.table(ids))


TABLES: dict[str, type[SmallerTable]] = {
    "hashing": HashedTable,
    "quotient_remainder": QuotientRemainderTable,
    "narrow_tables": NarrowTable,
}
"""The method's name -> its table."""


def smaller_tables_(model: nn.Module, method: str, ratio: float) -> Replaced:
    """Replace the embedding tables of a model in place by smaller ones with parameters drawn anew.

    Args:
        model: its layers of type nn.EmbeddingBag are the tables. They may be on the meta device, and then no dense
            table is ever allocated: call `to_empty`, and `reset_parameters` of each, afterwards.
        method: "hashing", "quotient_remainder" or "narrow_tables".
        ratio: all tables together shall have at most 1/ratio of their parameters. No table gets more than a cap that
            is the same for all, so small tables stay as they are; what rounding leaves goes to the smallest of the
            others.

    Returns:
        What became of each table; training needs no more than `comera.param_groups`.

    Raises:
        ConfigError: a ratio at which even the smallest such tables have too many parameters: narrow ones with a single
            column have one for each row.
        ConversionError: no tables, or tables that do not take plain sums.

    Example:
        >>> import torch
        >>> from comera.baselines import smaller_tables_
        >>> sizes = (10_000, 500, 20)
        >>> tables = torch.nn.ModuleList([torch.nn.EmbeddingBag(rows, 16, mode="sum") for rows in sizes])
        >>> [(row.stored, row.note) for row in smaller_tables_(tables, "hashing", ratio=10).rows]
        [(8512, '532 rows'), (8000, 'fits'), (320, 'fits')]
        >>> tables[0](torch.tensor([[3], [9_999]])).shape
        torch.Size([2, 16])

    Source: see the top of the file.
    """
    kind = TABLES[method]
    tables = _tables(model)
    shapes = [(table.num_embeddings, table.embedding_dim) for table in tables.values()]
    dense_total = elements(model.parameters())
    rows = []
    for (name, old), size in zip(tables.items(), fit_sizes(kind, shapes, ratio, method), strict=True):
        new: nn.EmbeddingBag | SmallerTable = old
        if size is not None:
            with old.weight.device:
                new = kind(old.num_embeddings, old.embedding_dim, size).to(old.weight.dtype).train(old.training)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, new)
        before, after = type(old).__name__, type(new).__name__
        stored, note = elements(new.parameters()), f"{size} {kind.unit}" if size else "fits"
        rows.append(LayerRow(name, before, after, None, old.weight.numel(), stored, None, note))
    return Replaced(tuple(rows), dense_total)


def fit_sizes(
    kind: type[SmallerTable], shapes: Sequence[tuple[int, int]], ratio: float, method: str
) -> list[int | None]:
    """The size of each table of the shape (rows, columns); None: it stays as it is. Other arguments and errors: see
    `smaller_tables_`."""

    def fitted(shape: tuple[int, int], most: int) -> tuple[int, int | None]:
        """The parameters and the size of a table; None: it stays as it is."""
        rows, dim = shape
        found = kind.fit(rows, dim, most) if most < rows * dim else None
        elements = rows * dim if found is None else kind.elements(rows, dim, found)
        return (rows * dim, None) if elements >= rows * dim else (elements, found)

    def stored(shape: tuple[int, int], most: int) -> int:
        return fitted(shape, most)[0]

    dense = sum(rows * dim for rows, dim in shapes)
    budget = int(dense / ratio)
    caps = range(1, max(rows * dim for rows, dim in shapes) + 1)
    count = bisect_right(caps, budget, key=lambda most: sum(stored(shape, most) for shape in shapes))
    if not count:
        least = sum(stored(shape, 1) for shape in shapes)
        raise ConfigError(
            f"compress.ratio {ratio:g} leaves {budget:,} parameters, and the smallest tables of the method {method} "
            f"have {least:,}: the ratio can be {floor(100 * dense / least) / 100:g} at most"
        )
    most = [caps[count - 1]] * len(shapes)
    left = budget - sum(map(stored, shapes, most))
    for k in sorted(range(len(shapes)), key=lambda k: shapes[k]):
        before = stored(shapes[k], most[k])
        most[k] = max(most[k], before + left)
        left -= stored(shapes[k], most[k]) - before
    return [fitted(*each)[1] for each in zip(shapes, most, strict=True)]


def _tables(model: nn.Module) -> dict[str, nn.EmbeddingBag]:
    """The tables of a model by name. Raises ConversionError for none, and for those that do more than sum rows."""
    found = {name: table for name, table in model.named_modules() if name and type(table) is nn.EmbeddingBag}
    if not found:
        raise ConversionError(f"nothing to convert in {type(model).__name__}: expected layers of type nn.EmbeddingBag")
    for name, table in found.items():
        if table.mode != "sum" or table.padding_idx is not None or table.max_norm is not None:
            raise ConversionError(f"{name}: expected a table with mode='sum', no padding and no max_norm, got {table}")
    return found
