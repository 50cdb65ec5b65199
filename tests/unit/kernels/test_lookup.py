"""Rows of pairs in C++: against the float64 oracle, for every size of row, and through the table they come from."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from comera.kernels.cpp import compiler, lookup
from comera.nn import TTMEmbedding, TTMEmbeddingBag
from comera.ops.lookup import REPEATED_COLUMNS, ttm_lookup
from comera.ops.lookup_pairs import pair_rows, rank_last
from comera.ops.planner.plan import plan_lookup
from comera.tt.dense import absorb, materialize
from comera.tt.shapes import ttm_spec

from ...helpers.odd_operands import lookup_operands
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
]


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("pairs", "rows", "columns", "rank"), SIZES)
@pytest.mark.parametrize("count", [1, 3])
def test_rows_and_gradients_are_those_of_the_oracle(pairs, rows, columns, rank, count, threads):
    threads(count)
    torch.manual_seed(0)
    drows, left, right, i, k = lookup_operands(pairs, rows, columns, rank)
    exact = [each.double().requires_grad_() for each in (left, right)]
    expected = (exact[0][i] @ exact[1][k].mT).reshape(pairs, columns[0] * columns[1])
    grads = torch.autograd.grad(expected, exact, drows.double())
    found = lookup.pair_rows(left, right, i, k), *lookup.pair_rows_backward(drows, left, right, i, k)
    for one, other in zip(found, (expected.detach(), *grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_sums_do_not_depend_on_the_number_of_threads(threads):
    torch.manual_seed(0)
    operands = lookup_operands(5000, (60, 70), (4, 4), 21)
    threads(1)
    alone = lookup.pair_rows_backward(*operands)
    for count in (2, 3, 7):
        threads(count)
        assert all(map(torch.equal, lookup.pair_rows_backward(*operands), alone))


@pytest.mark.parametrize(("rank", "columns"), [(21, 700), (1, 1), (3, 300), (40, 257), (0, 4), (4, 0)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_core_with_its_rank_last_and_its_gradients(rank, columns, gated, count, threads):
    threads(count)
    torch.manual_seed(0)
    core, dright, gates = torch.randn(rank, columns), torch.randn(columns, rank), torch.randn(rank) if gated else None
    exact = [each.double().requires_grad_() for each in ([core] if gates is None else [core, gates])]
    expected = exact[0].t() if gates is None else (exact[0] * exact[1].unsqueeze(1)).t()
    grads = torch.autograd.grad(expected, exact, dright.double())
    found = lookup.rank_last(core, gates), *lookup.rank_last_backward(dright, core, gates)
    for one, other in zip(found, (expected.detach(), *grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("wrong", [-1, 3, 2**62])
@pytest.mark.parametrize("which", [3, 4])
def test_ids_of_no_row_are_refused(wrong, which):
    operands = list(lookup_operands(5, (3, 3)))
    operands[which][2] = wrong
    for call in (lambda: lookup.pair_rows(*operands[1:]), lambda: lookup.pair_rows_backward(*operands)):
        with pytest.raises(ValueError, match="expected numbers that fit each other"):
            call()


def test_autograd_calls_the_kernel_unless_it_is_to_be_derived_again(monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    drows, left, right, i, k = lookup_operands(pairs=5)
    left.requires_grad_()
    right.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        rows = pair_rows(i, k, left, right)
        once = torch.autograd.grad(rows, (left, right), drows, retain_graph=True)
    assert counter.get_total_flops() == 3 * 2 * 5 * 6 * 7
    again = torch.autograd.grad(rows, (left, right), drows, create_graph=True)
    torch.testing.assert_close(once, again)
    assert all(each.grad_fn is not None for each in again)


@pytest.mark.parametrize("gated", [True, False])
def test_so_it_does_for_a_core_with_its_rank_last(gated, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", "lookup")
    core, dright, gates = torch.randn(3, 40), torch.randn(40, 3), torch.randn(3) if gated else None
    leaves = [each.requires_grad_() for each in (core, gates) if each is not None]
    right = rank_last(core, gates)
    assert "RankLast" in type(right.grad_fn).__name__
    once = torch.autograd.grad(right, leaves, dright, retain_graph=True)
    again = torch.autograd.grad(right, leaves, dright.requires_grad_(), create_graph=True)
    torch.testing.assert_close(once, again)
    assert all(each.grad_fn is not None for each in again)


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
    monkeypatch.setattr(lookup, "pair_rows", lambda *operands: made.append(operands[2].numel()) or plain(*operands))
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
