"""All tables of a model in one lookup: against the float64 dense oracle, and to the bit against each by itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from comera.errors import DataError, IdError
from comera.kernels.cpp import compiler, lookup
from comera.nn import TTMEmbedding, TTMEmbeddingBag, lookup_tables
from comera.ops.lookup import LookupTable, ttm_lookup, ttm_lookups
from comera.tt.shapes import ttm_spec

from ...helpers.specs import ttm

needs_kernel = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


def some_tables(dtype=torch.float32):
    """Tables of every kind, in an order that mixes them; some gates are pruned."""
    torch.manual_seed(0)
    scaled = TTMEmbedding(ttm_spec(30_000, 16, order=2, rank=3))
    scaled.embed_scale = 3.0
    tables = [
        TTMEmbeddingBag(ttm_spec(20_000, 16, order=2, rank=5), padding_idx=2),
        nn.EmbeddingBag(7, 16, mode="sum"),
        TTMEmbedding(ttm_spec(40_000, 16, order=3, rank=6), padding_idx=-1),
        TTMEmbeddingBag(ttm_spec(9_000, 15, order=2, rank=1), mode="mean"),
        nn.Embedding(50, 16, padding_idx=1),
        scaled,
        TTMEmbedding(ttm_spec(20_000, 48, order=2, rank=4), padding_idx=5),  # wide: each different row once
        TTMEmbeddingBag(ttm((300, 200), (4, 4), 0)),
        TTMEmbedding(ttm_spec(30, 8, order=2, rank=4)),  # made dense
        TTMEmbedding(ttm((5000, 1), (1, 16), 4)),  # plain low rank
        nn.Embedding(11, 24),
        nn.EmbeddingBag(400, 5, mode="mean", padding_idx=3),
    ]
    for table in tables:
        for gates in getattr(getattr(table, "tt", None), "rank_params", ()):
            gates.data[1:3] = torch.tensor([0.001, 0.7])[: max(0, len(gates) - 1)]
    return nn.ModuleList(tables).to(dtype)


def rows_in(table):
    return table.num_embeddings


def some_ids(tables, batch):
    """Ids that repeat, paddings and the last row among them where there is room."""
    torch.manual_seed(1)
    columns = [torch.randint(rows_in(table), (batch,)) for table in tables]
    for table, ids in zip(tables, columns, strict=True):
        ids[1:4], ids[4:5] = ids[:1], rows_in(table) - 1
        if table.padding_idx is not None:
            ids[5:7] = table.padding_idx
    return torch.stack(columns, 1) if columns else torch.zeros(batch, 0, dtype=torch.int64)


def one_by_one(tables, ids):
    bags = (nn.EmbeddingBag, TTMEmbeddingBag)
    columns = zip(tables, ids.unbind(1), strict=True)
    return [table(each.unsqueeze(1) if isinstance(table, bags) else each) for table, each in columns]


def with_gradients(rows, tables):
    torch.manual_seed(2)
    drows = [torch.randn(each.shape, dtype=torch.float64).to(each.dtype) for each in rows]
    parameters = list(tables.parameters())
    return [*rows, *torch.autograd.grad(rows, parameters, drows, materialize_grads=True, allow_unused=True)]


def dense_rows(tables, ids):
    """The rows of the materialized tables, in float64."""
    rows = []
    for table, ids_B in zip(tables, ids.unbind(1), strict=True):
        row = F.embedding(ids_B, table.weight) * getattr(table, "embed_scale", 1.0)
        rows.append(row if table.padding_idx is None else row * (ids_B != table.padding_idx).unsqueeze(1))
    return rows


@pytest.mark.parametrize("kernels", [pytest.param("all", marks=needs_kernel), "none"])
@pytest.mark.parametrize("batch", [0, 1, 60])
def test_rows_and_gradients_are_those_of_the_dense_tables(batch, kernels, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    tables = some_tables()
    ids, exact = some_ids(tables, batch), copy.deepcopy(tables).double()
    found = with_gradients(lookup_tables(tables, ids), tables)
    expected = with_gradients(dense_rows(exact, ids), exact)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch", [0, 1, 300])
@pytest.mark.parametrize("count", [1, 2])
def test_equal_to_each_table_by_itself_to_the_bit(batch, count):
    tables = some_tables()
    ids = some_ids(tables, batch)
    torch.set_num_threads(count)
    alone = with_gradients(one_by_one(tables, ids), tables)
    for few in (slice(None), slice(1), slice(2, 3), slice(10, 12), slice(0)):
        found = lookup_tables(tables[few], ids[:, few])
        assert all(map(torch.equal, found, alone[: len(tables)][few]))
    together = with_gradients(lookup_tables(tables, ids), tables)
    summed = {id(table.weight) for table in tables if isinstance(table, nn.EmbeddingBag)}  # by torch in another order
    names = [*tables, *tables.parameters()]
    for owner, one, other in zip(names, together, alone, strict=True):
        if id(owner) in summed:
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)


@needs_kernel
def test_sums_do_not_depend_on_the_number_of_threads():
    tables = nn.ModuleList(some_tables()[k] for k in (0, 1, 3, 5, 6, 7, 10, 11))  # none of torch's work
    ids, found = some_ids(tables, 700), []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        found.append(with_gradients(lookup_tables(tables, ids), tables))
        assert all(map(torch.equal, found[-1], found[0]))


@needs_kernel
def test_the_kernel_is_called_once_each_way(monkeypatch):
    calls = []
    for name in ("pair_rows", "pair_rows_backward"):
        plain = getattr(lookup, name)
        monkeypatch.setattr(lookup, name, lambda *given, plain=plain: calls.append(len(given[0])) or plain(*given))
    tables = some_tables()
    rows = lookup_tables(tables, some_ids(tables, 60))
    sum(each.sum() for each in rows).backward()
    assert calls == [9, 9]  # three of torch's


def test_ids_of_each_table_may_come_apart_and_as_int32():
    tables = some_tables()
    ids = some_ids(tables, 9)
    expected = lookup_tables(tables, ids)
    for given in (ids.int(), list(ids.unbind(1)), [each.int() for each in ids.unbind(1)]):
        assert all(map(torch.equal, lookup_tables(tables, given), expected))


def test_bags_of_one_id_are_passed_on():
    tables = some_tables()
    ids = some_ids(tables, 9).unsqueeze(2).unbind(1)
    found = lookup_tables(tables, ids)
    assert all(map(torch.equal, found, [table(each) for table, each in zip(tables, ids, strict=True)]))


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (torch.zeros(4, 3, dtype=torch.int64), r"ids \(batch, 2\), a column for each table, got ids of shape \[4, 3\]"),
        (torch.zeros(4, dtype=torch.int64), r"got ids of shape \[4\]"),
        (
            [torch.zeros(4, dtype=torch.int64)],
            r"2 tensors of ids \(batch,\) or \(batch, 1\), .* got 1 of shapes \[\[4\]\]",
        ),
        ([torch.zeros(4, 2, dtype=torch.int64)] * 2, r"got 2 of shapes \[\[4, 2\], \[4, 2\]\]"),
    ],
)
def test_ids_that_do_not_fit_the_tables_are_refused(ids, found):
    with pytest.raises(DataError, match=found):
        lookup_tables(some_tables()[:2], ids)


@pytest.mark.parametrize("wrong", [-1, None, 2**62])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 6, 8, 9, 10])
def test_an_id_outside_of_its_table_is_named_with_the_table(k, wrong):
    tables = some_tables()
    ids, rows = some_ids(tables, 9), tables[k].num_embeddings
    ids[7, k] = rows if wrong is None else wrong
    expected = (
        rf"expected every id in 0 ... {rows - 1} for table {k} of {rows} rows, got {int(ids[7, k])} at position \[7\]"
    )
    with pytest.raises(IdError, match=expected) as caught:
        lookup_tables(tables, ids)
    assert caught.value.__context__ is None


def test_ids_of_another_dtype_are_refused():
    tables = some_tables()
    with pytest.raises(TypeError, match="int32 or int64"):
        lookup_tables(tables, some_ids(tables, 3).float())


class Doubled(TTMEmbedding):
    def forward(self, input):
        return 2 * super().forward(input)


class Shifted(nn.Module):
    def forward(self, core):
        return core + 1


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # ids have no gradient
def test_a_call_that_somebody_looks_at_is_made():
    tables = some_tables()
    ids, seen = some_ids(tables, 9), []
    plain = lookup_tables(tables, ids)
    handles = [
        tables[0].register_forward_pre_hook(lambda *given: seen.append("pre")),
        tables[0].register_forward_hook(lambda module, given, rows: -rows),
        tables[2].register_full_backward_pre_hook(lambda *given: seen.append("backward")),
    ]
    tables[5].forward = lambda ids: torch.zeros(ids.shape[0], 16)
    rows = lookup_tables(tables, ids)
    assert torch.equal(rows[0], -plain[0])
    assert not rows[5].any()
    rows[2].sum().backward()
    assert seen == ["pre", "backward"]
    for handle in handles:
        handle.remove()
    del tables[5].forward
    everywhere = nn.modules.module.register_module_forward_hook(lambda module, *given: seen.append(type(module)))
    lookup_tables(tables, ids)
    everywhere.remove()
    assert seen[2:] == [type(table) for table in tables]
    assert all(map(torch.equal, lookup_tables(tables, ids), plain))


def test_what_is_no_table_of_ours_is_called():
    tables = some_tables()
    ids = some_ids(tables, 9)
    plain = lookup_tables(tables, ids)
    tables[5].__class__ = Doubled
    tables[10].register_forward_hook(lambda module, given, rows: -rows)
    tables[11].sparse = True
    tables[0].tt.requires_grad_(False)
    parametrize.register_parametrization(tables[2].tt.cores, "0", Shifted())
    given = [*tables, lambda ids_B: ids_B.float().unsqueeze(1), lambda ids_B1: tables[1](ids_B1)]
    rows = lookup_tables(given, [*ids.unbind(1), ids[:, 1], ids[:, 1:2]])
    assert torch.equal(rows[5], 2 * plain[5])
    assert torch.equal(rows[10], -plain[10])
    rows[11].sum().backward()
    assert tables[11].weight.grad.is_sparse
    assert not torch.equal(rows[2], plain[2])
    assert torch.equal(rows[-2], ids[:, 1:2].float())
    assert torch.equal(rows[-1], plain[1])


@pytest.mark.parametrize(
    "table",
    [
        nn.Embedding(9, 4, padding_idx=2),
        nn.Embedding(9, 4, max_norm=0.5),
        nn.Embedding(9, 4, scale_grad_by_freq=True),
        nn.EmbeddingBag(9, 4, max_norm=0.5),
        nn.EmbeddingBag(9, 4, scale_grad_by_freq=True, mode="mean"),
        nn.Embedding(9, 4, dtype=torch.bfloat16),
    ],
)
def test_tables_of_torch_that_do_more_than_to_copy_rows(table):
    ids = torch.tensor([[2], [5], [2], [2]])
    alone = copy.deepcopy(table)
    results = []
    for rows in (alone(ids if isinstance(table, nn.EmbeddingBag) else ids[:, 0]), lookup_tables([table], ids)[0]):
        rows.square().sum().backward()
        results.append(rows)
    assert torch.equal(*results)
    assert torch.equal(table.weight, alone.weight)
    assert torch.equal(table.weight.grad, alone.weight.grad)


def test_frozen_tables_get_no_gradients():
    tables = some_tables()
    tables[0].requires_grad_(False)
    tables[3].tt.cores[0].requires_grad_(False)
    tables[5].tt.rank_params.requires_grad_(False)
    rows = lookup_tables(tables, some_ids(tables, 9))
    assert not rows[0].requires_grad
    sum(each.sum() for each in rows).backward()
    without = [name for name, parameter in tables.named_parameters() if parameter.grad is None]
    frozen = [name for name, parameter in tables.named_parameters() if not parameter.requires_grad]
    assert without == frozen
    assert len(frozen) == 5


def test_a_tied_table_gets_the_sum_of_its_gradients():
    tables = some_tables()[:1]
    twice = nn.ModuleList([tables[0], TTMEmbedding(tables[0].tt)])
    ids = some_ids(twice, 20)
    together = with_gradients(lookup_tables(twice, ids), twice)
    alone = with_gradients(one_by_one(twice, ids), twice)
    torch.testing.assert_close(together, alone)


def test_second_derivatives_are_those_of_the_dense_tables():
    found = []
    for dtype, look_up in ((torch.float32, lookup_tables), (torch.float64, dense_rows)):
        tables = nn.ModuleList(some_tables()[k] for k in (0, 2, 3, 5, 10, 11)).to(dtype)
        parameters = list(tables.parameters())
        rows = look_up(tables, some_ids(tables, 20))
        grads = torch.autograd.grad(sum(each.pow(3).sum() for each in rows), parameters, create_graph=True)
        again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), parameters)
        found.append([each.double() for each in again])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_double_precision_passes_gradcheck():
    tables = nn.ModuleList(some_tables(torch.float64)[k] for k in (0, 2, 3, 5))
    ids = some_ids(tables, 8)
    names, parameters = zip(*tables.named_parameters(), strict=True)

    def rows(*values):
        return tuple(functional_call(Together(tables), dict(zip(names, values, strict=True)), (ids,)))

    assert torch.autograd.gradcheck(rows, parameters, fast_mode=True)


class Together(nn.Module):
    """A model of tables alone; its parameters have the names of the list's."""

    def __init__(self, tables):
        super().__init__()
        self._modules.update(tables._modules)

    def forward(self, ids):
        return lookup_tables(list(self._modules.values()), ids)


# torch.compile itself instantiates torch.autograd.Function for its own bookkeeping and warns about it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_transforms_of_functions_and_compiled_graphs_call_each_table():
    tables = some_tables()
    model, ids = Together(tables), some_ids(tables, 9)
    expected = with_gradients(model(ids), tables)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(with_gradients(compiled(ids), tables), expected)
    torch._dynamo.reset()
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    torch.manual_seed(2)
    drows = [torch.randn(each.shape, dtype=torch.float64).float() for each in expected[: len(tables)]]

    def loss(parameters):
        rows = functional_call(model, parameters, (ids,))
        return sum((each * drow).sum() for each, drow in zip(rows, drows, strict=True))

    found = torch.func.grad(loss)(parameters)
    torch.testing.assert_close(list(found.values()), expected[len(tables) :])


def test_autocast_and_checkpoints_change_nothing():
    tables = some_tables()
    ids = some_ids(tables, 30)
    expected = with_gradients(lookup_tables(tables, ids), tables)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = lookup_tables(tables, ids)
    assert all(map(torch.equal, with_gradients(rows, tables), expected))
    rows = checkpoint(lambda ids: tuple(lookup_tables(tables, ids)), ids, use_reentrant=False)
    assert all(map(torch.equal, with_gradients(rows, tables), expected))


@needs_kernel
def test_flops_are_counted_as_of_each_table_by_itself(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    tables = some_tables()
    ids, counts = some_ids(tables, 30), []
    for look_up in (one_by_one, lookup_tables):
        with FlopCounterMode(display=False) as counter:
            sum(each.sum() for each in look_up(tables, ids)).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_operation_takes_ids_of_any_shape():
    tables = [table for table in some_tables() if isinstance(table, TTMEmbedding | TTMEmbeddingBag)]
    shapes = [(), (3,), (0,), (2, 5), (4, 1), (2, 0, 3), (2, 2, 2)]
    ids = [torch.randint(table.num_embeddings, shape) for table, shape in zip(tables, shapes, strict=False)]
    given = [LookupTable(t.spec, list(t.tt.cores), t.tt.gates(), t.padding_idx) for t in tables[: len(ids)]]
    found = ttm_lookups(ids, given)
    for one, each, table in zip(found, ids, given, strict=True):
        expected = ttm_lookup(each, table.spec, table.cores, gates=table.gates, padding_idx=table.padding_idx)
        assert torch.equal(one, expected)
        assert one.shape == (*each.shape, table.spec.embedding_dim)
