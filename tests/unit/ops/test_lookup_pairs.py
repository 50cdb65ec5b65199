"""Rows of pairs that all differ, and gates apart from the cores: against the float64 dense oracle."""

import pytest
import torch
import torch.nn.functional as F

from comera.ops import chunking
from comera.ops.lookup import rows, ttm_bag, ttm_lookup
from comera.ops.lookup.rows import separate_rows
from comera.ops.planner.plan import plan_lookup
from comera.tt.dense import absorb, materialize

from ...helpers.specs import ttm

SPECS = [
    ttm((7,), (5,), 1),
    ttm((4, 5), (3, 2), 4, pad_rows=3, pad_cols=1),
    ttm((4, 5), (3, 2), 0),
    ttm((3, 4, 2), (2, 3, 2), 3, pad_rows=5),
    ttm((3, 2, 2, 3), (1, 2, 2, 1), 4),
]
CASES = [(spec, option) for spec in SPECS for option in plan_lookup(spec, 8).options]
each_option = pytest.mark.parametrize(
    ("spec", "option"), CASES, ids=[f"{spec}-{option.strategy}-{option.ends}" for spec, option in CASES]
)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def train_of(spec):
    """Cores and gates; one gate between each two cores is zero, as pruned ones are."""
    cores = [normal(*shape, seed=k) for k, shape in enumerate(spec.core_shapes)]
    gates = [normal(rank, seed=k) for k, rank in enumerate(spec.inner_ranks)]
    for gates_R in gates:
        gates_R.data[1:2] = 0
    return cores, gates


def some_ids(spec, *shape):
    return torch.randint(0, spec.num_embeddings, shape, generator=torch.Generator().manual_seed(1))


def with_gradients(y, leaves):
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [y, *torch.autograd.grad(y, leaves, dy)]


def assert_equal(found, exact, leaves):
    assert found.shape == exact.shape
    torch.testing.assert_close(with_gradients(found, leaves), with_gradients(exact, leaves), rtol=1e-10, atol=1e-10)


@each_option
@pytest.mark.parametrize("blocks_from", [0, 10**9])
def test_gates_may_stay_apart_from_the_cores(spec, option, blocks_from, monkeypatch):
    monkeypatch.setattr(rows, "BLOCKS_FROM", blocks_from)
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), some_ids(spec, 50)
    leaves = [*cores, *gates]
    exact = materialize(spec, absorb(cores, gates))[ids]
    assert_equal(ttm_lookup(ids, spec, cores, gates=gates, plan=plan), exact, leaves)
    offsets = torch.tensor([0, 0, 3, 40])
    found = ttm_bag(ids, offsets, spec, cores, mode="sum", gates=gates, plan=plan)
    exact = F.embedding_bag(ids, materialize(spec, absorb(cores, gates)), offsets, mode="sum")
    assert_equal(found, exact, leaves)


@each_option
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_bags_of_one_id(spec, option, mode, padding_idx, count):
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), some_ids(spec, count, 1)
    settings = {"mode": mode, "padding_idx": padding_idx}
    if count:
        ids[0] = spec.num_embeddings - 1
    weights = normal(count, 1, seed=7) if mode == "sum" else None
    leaves = [*cores, *gates, *([] if weights is None else [weights])]
    found = ttm_bag(ids, None, spec, cores, gates=gates, plan=plan, per_sample_weights=weights, **settings)
    table = materialize(spec, absorb(cores, gates))
    assert_equal(found, F.embedding_bag(ids, table, per_sample_weights=weights, **settings), leaves)


@pytest.mark.parametrize("kernels", ["all", "none"])
@pytest.mark.parametrize("spec", [*SPECS, ttm((3, 4, 2), (1, 3, 1), 3), ttm((3, 1, 2), (2, 3, 1), 1)], ids=str)
def test_gradients_have_the_strides_of_their_cores(spec, kernels, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    for option in plan_lookup(spec, 8).options:
        for count in (3, 60):
            cores = [torch.randn(shape, requires_grad=True) for shape in spec.core_shapes]
            rows = ttm_lookup(some_ids(spec, count), spec, cores, plan=plan_lookup(spec, 8).using(option.ends))
            rows.square().sum().backward()
            assert [core.grad.stride() for core in cores] == [core.stride() for core in cores]


@each_option
def test_first_and_second_derivatives_pass_gradcheck(spec, option):
    (cores, gates), plan, ids = train_of(spec), plan_lookup(spec, 8).using(option.ends), some_ids(spec, 6)

    def look_up(*leaves):
        return ttm_lookup(ids, spec, leaves[: spec.order], gates=leaves[spec.order :], padding_idx=0, plan=plan)

    assert torch.autograd.gradcheck(look_up, (*cores, *gates), fast_mode=True)
    assert torch.autograd.gradgradcheck(look_up, (*cores, *gates), fast_mode=True)


@pytest.mark.parametrize("small", [0, rows.SMALL])
@pytest.mark.parametrize("chunk", [1, chunking.CHUNK_CPU])
@pytest.mark.parametrize(("x", "y", "rank"), [(3, 2, 4), (1, 5, 1), (2, 3, 0)])
def test_rows_of_pairs_in_chunks_and_by_both_kinds_of_product(small, chunk, x, y, rank, monkeypatch):
    monkeypatch.setattr(rows, "SMALL", small)
    monkeypatch.setattr(chunking, "CHUNK_CPU", chunk)
    left, right = normal(6, x, rank), normal(rank, 4, y, seed=1)  # a table may be a view with its rank first
    i, k = torch.tensor([0, 2, 2, 5]), torch.tensor([3, 0, 1, 3])
    right_MYR = right.permute(1, 2, 0)
    exact = (left[i] @ right_MYR[k].mT).reshape(4, x * y)
    assert_equal(separate_rows(i, k, left, right_MYR), exact, [left, right])
    assert separate_rows(i[:0], k[:0], left, right_MYR).shape == (0, x * y)
    assert torch.autograd.gradgradcheck(lambda a, b: separate_rows(i, k, a, b.permute(1, 2, 0)), (left, right))
