"""Rows of pairs in C++: against the float64 oracle, for every size of row, and through the table they come from."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.kernels.cpp import compiler, lookup
from comera.nn import TTMEmbedding, TTMEmbeddingBag
from comera.ops.lookup import ttm_lookup
from comera.ops.lookup.kernel import PairTable, pair_rows
from comera.ops.lookup.plan import REPEATED_COLUMNS
from comera.ops.planner.plan import plan_lookup
from comera.tt.dense import absorb, materialize
from comera.tt.shapes import ttm_spec

from ...helpers.odd_operands import lookup_operands, lookup_rows_and_gradients
from ...helpers.specs import ttm

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")
SIZES = [
    (5, (3, 4), (2, 3), 7),
    (1, (1, 1), (1, 1), 1),
    (40, (3, 5), (4, 4), 21),
    (300, (7, 90), (5, 3), 33),
    (9, (4, 4), (8, 8), 64),
    (70, (7, 5), (5, 16), 30),
    (33, (2, 3), (16, 48), 9),
    (4, (3, 3), (2, 2), 0),
    (0, (3, 4), (2, 3), 2),
    (6, (2, 2), (0, 3), 5),
    (50, (9, 1), (21, 1), None),
    (3, (1, 1), (1, 1), None),
    (700, (2000, 1), (16, 1), None),
    (4, (3, 1), (0, 1), None),
    (0, (0, 1), (8, 1), None),
]


def exact_results(drows, ids, lefts, rights, gates, limits, paddings, thresholds):
    """Rows and gradients by products in float64, in the order of `lookup_rows_and_gradients`."""
    rows, grads = [], []
    for k, n in enumerate(ids):
        leaves = [each.double().requires_grad_() for each in (lefts[k], rights[k], gates[k]) if each is not None]
        if rights[k] is None:
            made = leaves[0][n] * (n != paddings[k]).unsqueeze(1)
            rows.append(made.detach())
            grads += torch.autograd.grad(made, leaves, drows[k].double())
            continue
        left, right = leaves[0].reshape(leaves[0].shape[-3:]), leaves[1]
        if right.dim() == 4:
            kept = [gates_R * (gates_R > thresholds[k]) for gates_R in leaves[2:]]
            right = right.flatten(2).permute(1, 2, 0) * (kept[0] if kept else 1)
        made = (left[n // len(right)] @ right[n % len(right)].mT).flatten(1) * (n != paddings[k]).unsqueeze(1)
        rows.append(made.detach())
        grads += torch.autograd.grad(made, leaves, drows[k].double())
    return [*rows, *grads]


@pytest.mark.parametrize("tables", [*([each] for each in SIZES), SIZES, SIZES[2:], SIZES[4:7]])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_and_gradients_are_those_of_the_oracle(tables, count):
    torch.set_num_threads(count)
    torch.manual_seed(0)
    operands = lookup_operands(tables)
    found = lookup_rows_and_gradients(*operands)
    for one, other in zip(found, exact_results(*operands), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rank", "rows", "columns"), [(21, 175, 4), (1, 1, 1), (3, 300, 1), (40, 257, 2), (9, 700, 7)])
@pytest.mark.parametrize("gated", [True, False])
def test_cores_of_many_runs(rank, rows, columns, gated):
    torch.manual_seed(0)
    sizes = (900, (5, rows), (2, columns), rank)
    operands = [operand[not gated :] for operand in lookup_operands([sizes] * (1 if gated else 2))]
    found = lookup_rows_and_gradients(*operands)
    for one, other in zip(found, exact_results(*operands), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-3)


def test_gradients_of_rows_that_lie_apart():
    torch.manual_seed(0)
    drows, *operands = lookup_operands([*SIZES[2:5], SIZES[10], (1, (3, 4), (2, 3), 7)])
    expected = lookup_rows_and_gradients(drows, *operands)
    apart = [
        torch.randn(n, columns + 5)[:, 2 : columns + 2].copy_(each) for each in drows for n, columns in [each.shape]
    ]
    assert not any(each.is_contiguous() for each in apart[:4])
    assert all(map(torch.equal, lookup_rows_and_gradients(apart, *operands), expected))
    same = [each[:1].expand(len(each), -1) for each in drows]
    expected = lookup_rows_and_gradients([each.contiguous() for each in same], *operands)
    assert all(map(torch.equal, lookup_rows_and_gradients(same, *operands), expected))


def test_sums_do_not_depend_on_the_number_of_threads_nor_on_other_tables():
    torch.manual_seed(0)
    tables = [(5000, (60, 70), (4, 4), 21), (50, (3, 2), (2, 2), 3), (3000, (900, 1200), (2, 4), 8)]
    operands = lookup_operands(tables)
    torch.set_num_threads(1)
    alone = lookup_rows_and_gradients(*operands)
    for count in (2, 3, 7, 16):
        torch.set_num_threads(count)
        assert all(map(torch.equal, lookup_rows_and_gradients(*operands), alone))
        by_table = [lookup_rows_and_gradients(*([each[k]] for each in operands)) for k in range(3)]
        rows, grads = [found[0] for found in by_table], [grad for found in by_table for grad in found[1:]]
        assert all(map(torch.equal, [*rows, *grads], alone))


@pytest.mark.parametrize("wrong", [-1, 12, 2**62])
@pytest.mark.parametrize("table", [0, 1, 2])
def test_ids_of_no_row_are_refused(wrong, table):
    operands = lookup_operands(((5, (3, 4), (2, 3), 7),) * 3)
    drows, ids, lefts, rights, gates, *numbers = operands
    made = [*lookup.pair_rows(ids, lefts, rights, gates, *numbers)[3:], None]
    ids[table][2] = wrong
    for call in (
        lambda: lookup.pair_rows(ids, lefts, rights, gates, *numbers),
        lambda: lookup.pair_rows_backward(drows, ids, lefts, rights, made, gates, *numbers, [True, True, False] * 3),
    ):
        with pytest.raises(ValueError, match="expected numbers that fit each other"):
            call()


def test_only_wanted_gradients_are_made():
    torch.manual_seed(0)
    drows, ids, lefts, rights, gates, *numbers = lookup_operands()
    made = [*lookup.pair_rows(ids, lefts, rights, gates, *numbers)[3:], None]

    def gradients(wanted):
        return lookup.pair_rows_backward(drows, ids, lefts, rights, made, gates, *numbers, wanted)

    every = [True, True, True, True, True, False, True, True, False]
    names = [k for k, want in enumerate(every) if want]
    of_all = dict(zip(names, gradients(every), strict=True))
    for few in ([0], [1], [2], [3, 7], [], names):
        found = gradients([k in few for k in range(9)])
        assert all(map(torch.equal, found, [of_all[k] for k in few]))
        assert len(found) == len(few)


def tables_of(operands):
    """What `pair_rows` takes, with leaves that need gradients."""
    _, ids, *rest = operands
    lefts, rights, gates = ([t if t is None else t.requires_grad_() for t in each] for each in rest[:3])
    tables = [PairTable(*each) for each in zip(ids, lefts, rights, gates, *rest[3:], strict=True)]
    return tables, [t for table in tables for t in table[1:4] if t is not None]


def test_autograd_calls_the_kernel_unless_it_is_to_be_derived_again(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    operands = lookup_operands()
    drows, (tables, leaves) = operands[0], tables_of(operands)
    with FlopCounterMode(display=False) as counter:
        rows = pair_rows(tables)
        once = torch.autograd.grad(rows, leaves, drows, retain_graph=True)
    assert counter.get_total_flops() == 3 * 2 * (5 * 6 * 7 + 6 * 6 * 5 + 5 * 4 * 3)
    again = torch.autograd.grad(rows, leaves, drows, create_graph=True)
    torch.testing.assert_close(once, again)
    assert all(each.grad_fn is not None for each in again)


def test_a_backward_through_some_tables_leaves_the_others_alone():
    operands = lookup_operands()
    drows, (tables, leaves) = operands[0], tables_of(operands)
    rows = pair_rows(tables)
    every = torch.autograd.grad(rows, leaves, drows, retain_graph=True)
    for create_graph in (False, True):
        found = torch.autograd.grad(
            rows[1], leaves, drows[1], retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        expected = [grad if 3 <= k < 5 else None for k, grad in enumerate(every)]
        torch.testing.assert_close(found, expected)


def test_changed_cores_cannot_be_derived():
    tables, leaves = tables_of(lookup_operands())
    rows = pair_rows(tables)
    with torch.no_grad():
        leaves[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows[1].sum().backward()


@pytest.mark.parametrize("kind", [TTMEmbedding, TTMEmbeddingBag])
def test_a_table_looks_up_each_id_without_finding_the_different_ones(kind, monkeypatch):
    torch.manual_seed(0)
    layer = kind(ttm_spec(200_000, 15, order=2, rank=5), padding_idx=2)
    ids, drows = torch.randint(0, 40, (60, 1)), torch.randn(15)
    results = {}
    for setting in ("lookup", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        layer.zero_grad()
        rows = layer(ids)
        (rows * drows).sum().backward()
        results[setting] = [rows.detach(), *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(results["lookup"], results["none"], rtol=1e-5, atol=1e-5)
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    monkeypatch.setattr(torch, "unique", None)
    layer(ids)
    monkeypatch.setenv("COMERA_KERNELS", "none")
    with pytest.raises(TypeError):
        layer(ids)


@pytest.mark.parametrize("columns", [REPEATED_COLUMNS, REPEATED_COLUMNS + 1])
def test_of_wide_rows_each_different_one_is_made_once(columns, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    torch.manual_seed(0)
    layer, made = TTMEmbedding(ttm_spec(200_000, columns, order=2, rank=2)), []
    plain = lookup.pair_rows
    monkeypatch.setattr(lookup, "pair_rows", lambda *operands: made.append(operands[0][0].numel()) or plain(*operands))
    layer(torch.tensor([7, 3, 7, 7]))
    assert made == [4 if columns == REPEATED_COLUMNS else 2]


def test_gates_and_repeated_ids(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    spec = ttm((3, 4, 2), (2, 3, 2), 3, pad_rows=5)
    cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
    gates = [torch.randn(rank, requires_grad=True) for rank in spec.inner_ranks]
    ids = torch.randint(0, spec.num_embeddings, (90,))
    for option in plan_lookup(spec, 8).options:
        rows = ttm_lookup(ids, spec, cores, gates=gates, plan=plan_lookup(spec, 8).using(option.ends))
        exact = materialize(spec, absorb(cores, gates))[ids]
        torch.testing.assert_close(rows, exact, rtol=1e-5, atol=1e-5)
        found, expected = (torch.autograd.grad(each.square().sum(), (*cores, *gates)) for each in (rows, exact))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
