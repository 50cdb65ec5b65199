"""Smaller tables against the dense table that each stands for, values and gradients; and their sizes to a budget."""

import pytest
import torch
from torch import nn

from comera.baselines import smaller_tables_
from comera.baselines.embedding_tables import (
    TABLES,
    HashedTable,
    NarrowTable,
    QuotientRemainderTable,
    SmallerTable,
    fit_sizes,
)
from comera.errors import ConfigError, ConversionError

ROWS, DIM = 23, 5
SIZES = {"hashing": 6, "quotient_remainder": 7, "narrow_tables": 3}
SHAPES = [(10_000, 16), (3, 16), (700, 16), (90_000, 16), (1, 16), (12_345, 16)]


def dense_rows(table: SmallerTable) -> torch.Tensor:
    """All rows, each by the formula of its method, (ROWS, DIM)."""
    if isinstance(table, HashedTable):
        return torch.stack([table.table.weight[i % table.size] for i in range(ROWS)])
    if isinstance(table, QuotientRemainderTable):
        quotients, remainders = table.quotients.weight, table.remainders.weight
        return torch.stack([quotients[i // table.size] * remainders[i % table.size] for i in range(ROWS)])
    assert isinstance(table, NarrowTable)
    return table.table.weight @ table.projection.weight.T


@pytest.mark.parametrize("method", TABLES)
def test_it_is_the_sum_over_rows_of_a_dense_table(method: str) -> None:
    torch.manual_seed(0)
    table = TABLES[method](ROWS, DIM, SIZES[method]).double()
    for p in table.parameters():
        nn.init.normal_(p)
    ids = torch.cat([torch.arange(ROWS), torch.randint(ROWS, (31,))]).reshape(-1, 3)  # every row, many of them again
    upstream = torch.randn(len(ids), DIM, dtype=torch.float64)
    parameters = list(table.parameters())
    for repeated in (ids, ids[:, :1], ids[:0], torch.full((4, 2), 9)):
        found = table(repeated)
        expected = dense_rows(table)[repeated].sum(1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        weight = upstream[: len(repeated)]
        gradients = torch.autograd.grad((found * weight).sum(), parameters)
        for one, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), parameters), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *_: table(ids[:4]), parameters)


@pytest.mark.parametrize("method", TABLES)
def test_sparse_gradients_are_those_of_dense_ones(method: str) -> None:
    torch.manual_seed(0)
    table = TABLES[method](ROWS, DIM, SIZES[method])
    ids = torch.randint(ROWS, (8, 2))
    gradients = []
    for sparse in (False, True):
        table.zero_grad()
        for part in table.modules():
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = sparse
        table(ids).square().sum().backward()
        found = [p.grad for p in table.parameters() if p.grad is not None]
        gradients.append([grad.to_dense() if grad.is_sparse else grad for grad in found])
    for dense, sparse_one in zip(*gradients, strict=True):
        torch.testing.assert_close(sparse_one, dense)


def test_no_two_ids_share_both_rows_of_a_quotient_remainder_table() -> None:
    for rows in (1, 2, 23, 24, 25, 1000):
        for most in (0, 12, 40, 10**6):
            size = QuotientRemainderTable.fit(rows, 1, most)
            assert len({(i // size, i % size) for i in range(rows)}) == rows
            larger = QuotientRemainderTable.elements(rows, 1, size + 1)
            assert size == rows or larger > most or size == -int(-(rows**0.5) // 1)


@pytest.mark.parametrize("method", TABLES)
@pytest.mark.parametrize("ratio", [1.5, 5.0, 13.0])
def test_tables_keep_to_the_budget_and_use_it(method: str, ratio: float) -> None:
    kind = TABLES[method]
    sizes = fit_sizes(kind, SHAPES, ratio, method)
    stored = [
        rows * dim if size is None else kind.elements(rows, dim, size)
        for (rows, dim), size in zip(SHAPES, sizes, strict=True)
    ]
    budget = sum(rows * dim for rows, dim in SHAPES) / ratio
    assert sum(stored) <= budget
    dense = [rows * dim for rows, dim in SHAPES]
    assert [size is None for size in sizes] == [one == other for one, other in zip(stored, dense, strict=True)]
    assert sizes[1] is None
    assert sizes[4] is None
    # no larger size of any table would fit
    for (rows, dim), size, now in zip(SHAPES, sizes, stored, strict=True):
        assert size is None or kind.elements(rows, dim, size + 1) - now > budget - sum(stored)


def test_large_tables_share_what_small_ones_leave() -> None:
    sizes = fit_sizes(HashedTable, SHAPES, 3.0, "hashing")
    budget = sum(rows for rows, _ in SHAPES) / 3
    assert sizes[:3] == [None, None, None]  # 10,703 rows that fit
    assert sizes[3] == int(budget) - 1 - 10_703 - 12_345
    assert sizes[5] is None
    sizes = fit_sizes(HashedTable, SHAPES, 5.0, "hashing")
    cap, left = divmod(int(sum(rows for rows, _ in SHAPES) / 5) - 704, 3)
    assert sizes == [cap + left, None, None, cap, None, cap]


def test_conversion_in_place() -> None:
    torch.manual_seed(0)
    tables = [nn.EmbeddingBag(rows, 16, mode="sum", dtype=torch.float64) for rows in (400, 9)]
    model = nn.ModuleDict({"deep": nn.ModuleList(tables), "top": nn.Linear(3, 2)}).eval()
    total = sum(p.numel() for p in model.parameters())
    applied = smaller_tables_(model, "hashing", ratio=4.0)
    assert applied.dense_total == total
    assert [(row.name, row.after, row.dense, row.note) for row in applied.rows] == [
        ("deep.0", "HashedTable", 6400, "93 rows"),
        ("deep.1", "EmbeddingBag", 144, "fits"),
    ]
    new = model.get_submodule("deep.0")
    assert isinstance(new, HashedTable)
    assert (new.table.weight.dtype, new.training) == (torch.float64, False)
    assert model.get_submodule("deep.1") is tables[1]


def test_it_allocates_nothing_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([nn.EmbeddingBag(10**9, 64, mode="sum")])
    smaller_tables_(model, "quotient_remainder", ratio=1000.0)
    assert all(p.is_meta for p in model.parameters())
    assert isinstance(model[0], QuotientRemainderTable)


@pytest.mark.parametrize("method", TABLES)
def test_rows_start_as_large_as_those_of_a_dense_table(method: str) -> None:
    torch.manual_seed(0)
    size = {"hashing": 400, "quotient_remainder": 400, "narrow_tables": 4}[method]
    rows = TABLES[method](2000, 64, size)(torch.arange(2000).unsqueeze(1))
    std = (3 * (2000 if method == "narrow_tables" else 400)) ** -0.5
    assert rows.mean().item() == pytest.approx(0, abs=std / 10)
    assert rows.std().item() == pytest.approx(std, rel=0.2)


def test_what_cannot_be_is_refused() -> None:
    tables = nn.ModuleList([nn.EmbeddingBag(rows, 8, mode="sum") for rows in (100, 50)])
    with pytest.raises(
        ConfigError,
        match=r"compress.ratio 20 leaves 60 parameters, and the smallest tables of the method narrow_tables have 166: "
        r"the ratio can be 7\.22 at most",
    ):
        smaller_tables_(tables, "narrow_tables", ratio=20.0)
    assert all(type(table) is nn.EmbeddingBag for table in tables)
    with pytest.raises(ConversionError, match=r"expected layers of type nn\.EmbeddingBag"):
        smaller_tables_(nn.Sequential(nn.Linear(2, 2)), "hashing", ratio=2.0)
    with pytest.raises(ConversionError, match=r"0: expected a table with mode='sum', no padding and no max_norm"):
        smaller_tables_(nn.ModuleList([nn.EmbeddingBag(9, 2, mode="mean")]), "hashing", ratio=2.0)
