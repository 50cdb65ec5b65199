"""The kernel of n-grams: against float64 with all gradients, threads, what it refuses, and who uses it."""

import copy

import pytest
import torch

from comera.errors import IdError
from comera.kernels import select
from comera.kernels.cpp import ngrams as kernels
from comera.ops.ngram import EPS, NGramIds, ngram_features
from comera.tt import init_cores
from comera.tt.ngram import NGramSpec

from ...helpers.odd_operands import ngrams_operands
from ...helpers.refused import CHANGE_IDS, CHANGES, assert_all_refused

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)
SPECS = [
    NGramSpec(300, 5, longest=6, heads=160),
    NGramSpec(7, 5, longest=4, heads=33),
    NGramSpec(7, 5, longest=4, heads=6).keeping([torch.tensor([0, 4]), torch.tensor([1, 4, 5]), torch.tensor([2])]),
    NGramSpec(7, 5, longest=4, heads=6).keeping([torch.tensor([0, 4]), torch.tensor([1]), torch.tensor([]).long()]),
    NGramSpec(7, 5, longest=3, heads=17, inner=3),
    NGramSpec(1, 5, longest=2, heads=1),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pruned", [0.0, 0.4])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_features_and_gradients_are_those_of_float64(spec, pruned, threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    exact = [table.requires_grad_() for table in init_cores(spec, 1.0, dtype=torch.float64)[:-1]]
    gates = [(torch.rand(rank) >= pruned).double() for rank in spec.inner_ranks]
    ids = NGramIds.of(torch.randint(spec.num_embeddings, (5, 40)), spec.longest)
    ids = ids._replace(reach=ids.reach % 20)  # a second document in each row
    u = torch.randn(*ids.ids.shape, 3, dtype=torch.float64, requires_grad=True) if spec.inner else None
    results = []
    for dtype in (torch.float64, torch.float32):
        tables = [table.detach().to(dtype).requires_grad_() for table in exact]
        tokens = None if u is None else u.detach().to(dtype).requires_grad_()
        leaves = [*tables, *([] if tokens is None else [tokens])]
        e = ngram_features(ids, spec, tables, [g.to(dtype) for g in gates], tokens)
        needs = torch.cat([(g != 0) for g in gates]).to(dtype)  # what P reads
        dy = torch.randn(e.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype) * needs
        results.append([e * needs, *torch.autograd.grad(e, leaves, dy)])
    for found, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_kernel_computes_and_gradients_are_of_any_order(monkeypatch):
    spec, calls = SPECS[1], []
    run = kernels.ngrams
    monkeypatch.setattr("comera.ops.ngram.cpp.ngrams", lambda *given: calls.append(given) or run(*given))
    torch.manual_seed(0)
    tables = [table.requires_grad_() for table in init_cores(spec, 1.0)[:-1]]
    gates = [torch.ones(rank) for rank in spec.inner_ranks]
    ids = NGramIds.of(torch.randint(7, (2, 6)), 4)
    found = []
    for setting in ("all", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        e = ngram_features(ids, spec, tables, gates)
        first = torch.autograd.grad(e.square().sum(), tables, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), tables)])
    assert len(calls) == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    ngram_features(ids, spec, [table.double() for table in tables], gates)
    ngram_features(
        ids,
        NGramSpec(7, 5, 3, 2, head_rank=2),
        init_cores(NGramSpec(7, 5, 3, 2, head_rank=2), 1.0)[:-1],
        [torch.ones(4)] * 2,
    )
    assert len(calls) == 1


def test_sums_do_not_depend_on_the_number_of_threads():
    de, *operands = ngrams_operands(4, 300, 50, (160, 160, 70))
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        e, rho = kernels.ngrams(*operands, EPS)
        found.append([e, rho, *kernels.ngrams_backward(de, e, rho, *operands)])
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_ids_that_no_table_has_are_refused_where_they_are_read():
    de, ids, reach, tables, needed = ngrams_operands()
    e, rho = kernels.ngrams(ids, reach, tables, needed, EPS)
    for wrong in (-1, 7, 2**40):
        changed = ids.clone()
        changed[1, -1] = wrong
        with pytest.raises(ValueError, match="ngrams"):
            kernels.ngrams(changed, reach, tables, needed, EPS)
        with pytest.raises(ValueError, match="ngrams_backward"):
            kernels.ngrams_backward(de, e, rho, changed, reach, tables, needed)
        unread = ids.clone()
        unread[:, 0] = wrong  # before the first document
        assert torch.equal(kernels.ngrams(unread, reach, tables, needed, EPS)[0], e)
    spec = SPECS[1]
    with pytest.raises(IdError, match="from 0 to 6 for n-grams"):
        ngram_features(
            NGramIds.of(torch.full((1, 3), 7), 4),
            spec,
            init_cores(spec, 1.0)[:-1],
            [torch.ones(rank) for rank in spec.inner_ranks],
        )


@pytest.mark.parametrize("change", CHANGES, ids=CHANGE_IDS)
def test_wrong_operands_are_refused(change):
    de, ids, reach, tables, needed = ngrams_operands()
    e, rho = kernels.ngrams(ids, reach, tables, needed, EPS)

    def backward(de, e, rho, needed, tables=tables):
        return kernels.ngrams_backward(de, e, rho, ids, reach, tables, needed)

    assert_all_refused(backward, [de, e, rho, needed], change)
    assert_all_refused(lambda tables: kernels.ngrams(ids, reach, tables, needed, EPS), [tables], change)


def test_wrong_numbers_are_refused():
    _, ids, reach, tables, needed = ngrams_operands()
    for wrong in (
        (ids.int(), reach, tables, needed),
        (ids, reach.int(), tables, needed),
        (ids[:1], reach, tables, needed),
        (ids[:, 2:], reach, tables, needed),
        (ids[0], reach, tables, needed),
        (ids, reach, tables[:2], needed),
        (ids, reach, tables[::-1], needed),
        (ids, reach, tables, needed[1:]),
    ):
        with pytest.raises((RuntimeError, ValueError), match="expected"):
            kernels.ngrams(*wrong, EPS)


def test_a_copy_of_a_step_is_the_same_to_the_bit():
    spec = SPECS[0]
    torch.manual_seed(0)
    tables = [table.requires_grad_() for table in init_cores(spec, 1.0)[:-1]]
    gates = [torch.ones(rank) for rank in spec.inner_ranks]
    ids = NGramIds.of(torch.randint(300, (4, 64)), 6)
    grads = []
    for each in (tables, copy.deepcopy(tables)):
        ngram_features(ids, spec, each, gates).square().sum().backward()
        grads.append([table.grad for table in each])
    assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))
