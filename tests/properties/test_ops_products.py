"""Products and look-ups over random formats, orders, ranks and batches, against the float64 dense oracle."""

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from comera.ops.block_product import btt_linear
from comera.ops.linear import tt_linear
from comera.ops.lookup import ttm_lookup
from comera.ops.merge import left_products, right_products
from comera.ops.planner.plan import plan_linear, plan_lookup, plan_projection
from comera.ops.planner.problem import batch_bucket
from comera.ops.projection import merge_sides, ttm_linear
from comera.tt.dense import absorb, materialize

from ..helpers.strategies import btt_specs, random_cores, tt_specs, ttm_specs

LEADS = st.lists(st.integers(0, 4), max_size=3).map(tuple)


def inputs(shape, *, contiguous, seed):
    """A leaf of any layout: contiguous, or every second column of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] * 2, generator=generator, dtype=torch.float64)
    return (wide[..., : shape[-1]].contiguous() if contiguous else wide[..., ::2]).requires_grad_()


def assert_same(found, exact, leaves, seed):
    generator = torch.Generator().manual_seed(seed)
    dy = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (found, exact)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@given(
    spec=tt_specs(),
    lead=LEADS,
    strategy=st.sampled_from(["low_rank", "sequential", "dense", None]),
    cuts=st.none() | st.lists(st.booleans(), min_size=7, max_size=7),
    bias=st.booleans(),
    contiguous=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tt_linear_is_the_dense_product(spec, lead, strategy, cuts, bias, contiguous, seed):
    cores = [core.requires_grad_() for core in random_cores(spec, seed=seed)]
    x = inputs((*lead, spec.in_features), contiguous=contiguous, seed=seed + 1)
    b = inputs((spec.out_features,), contiguous=True, seed=seed + 2) if bias else None
    if cuts is not None:  # any groups of the cores
        strategy = (*(k for k, cut in enumerate(cuts[: spec.order - 1], start=1) if cut), spec.order)
    plan = plan_linear(spec, prod(lead)).using(strategy) if strategy else None
    exact = x @ materialize(spec, cores)
    leaves = [x, *cores, b] if bias else [x, *cores]
    assert_same(tt_linear(x, spec, cores, b, plan=plan), exact if b is None else exact + b, leaves, seed)


@given(
    spec=ttm_specs(),
    lead=LEADS,
    choice=st.integers(-1, 5),
    bias=st.booleans(),
    contiguous=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ttm_linear_is_the_dense_product(spec, lead, choice, bias, contiguous, seed):
    cores = [core.requires_grad_() for core in random_cores(spec, seed=seed)]
    x = inputs((*lead, spec.embedding_dim), contiguous=contiguous, seed=seed + 1)
    b = inputs((spec.num_embeddings,), contiguous=True, seed=seed + 2) if bias else None
    plan = plan_projection(spec, prod(lead))
    option = plan.options[choice % len(plan.options)]
    forced = None if choice < 0 else plan.using(option.ends)
    exact = x @ materialize(spec, cores).t()
    leaves = [x, *cores, b] if bias else [x, *cores]
    assert_same(ttm_linear(x, spec, cores, b, plan=forced), exact if b is None else exact + b, leaves, seed)


@given(spec=btt_specs(), lead=LEADS, bias=st.booleans(), contiguous=st.booleans(), seed=st.integers(0, 99))
def test_btt_linear_is_the_dense_product(spec, lead, bias, contiguous, seed):
    cores = [core.requires_grad_() for core in random_cores(spec, seed=seed)]
    x = inputs((*lead, spec.in_features), contiguous=contiguous, seed=seed + 1)
    b = inputs((spec.out_features,), contiguous=True, seed=seed + 2) if bias else None
    gates = [torch.randn(rank, dtype=torch.float64, requires_grad=True) for rank in spec.inner_ranks]
    exact = x @ materialize(spec, absorb(cores, [d.masked_fill(d <= 0.1, 0.0) for d in gates]))
    leaves = [x, *cores, *gates, b] if bias else [x, *cores, *gates]
    found = btt_linear(x, spec, cores, b, gates=gates, threshold=0.1)
    assert_same(found, exact if b is None else exact + b, leaves, seed)


@given(data=st.data(), spec=ttm_specs(), shape=LEADS, choice=st.integers(-1, 5), seed=st.integers(0, 99))
def test_lookup_is_the_rows_of_the_dense_table(data, spec, shape, choice, seed):
    rows = spec.num_embeddings
    cores = [core.requires_grad_() for core in random_cores(spec, seed=seed)]
    ids = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=prod(shape), max_size=prod(shape))))
    ids = ids.reshape(shape).to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    padding_idx = data.draw(st.none() | st.integers(-rows, rows - 1))
    plan = plan_lookup(spec, ids.numel())
    option = plan.options[choice % len(plan.options)]
    forced = None if choice < 0 else plan.using(option.ends)
    table = materialize(spec, cores)
    if padding_idx is not None:
        table = table * (torch.arange(rows) != padding_idx % rows)[:, None]
    exact = table[ids.long()]
    assert_same(ttm_lookup(ids, spec, cores, padding_idx=padding_idx, plan=forced), exact, cores, seed)


@given(spec=tt_specs(), seed=st.integers(0, 99))
def test_tt_halves_multiply_to_the_weight(spec, seed):
    cores = random_cores(spec, seed=seed)
    left, right = left_products(cores[: spec.split]), right_products(cores[spec.split :])
    assert (len(left), len(right)) == (spec.split, spec.order - spec.split)
    weight = (left[-1] @ right[-1])[: spec.in_features, : spec.out_features]
    torch.testing.assert_close(weight, materialize(spec, cores), rtol=1e-10, atol=1e-10)


@given(spec=ttm_specs(min_order=2), split=st.integers(1, 5), seed=st.integers(0, 99))
def test_merge_sides_multiply_to_the_table(spec, split, seed):
    cores = random_cores(spec, seed=seed)
    left_MNR, right_RMN = merge_sides(cores, 1 + split % (spec.order - 1))
    table = torch.einsum("anr,rbm->abnm", left_MNR, right_RMN).reshape(prod(spec.row_modes), prod(spec.col_modes))
    rows, cols = spec.shape
    torch.testing.assert_close(table[:rows, :cols], materialize(spec, cores), rtol=1e-10, atol=1e-10)


@given(spec=tt_specs(), batch=st.integers(0, 5000))
def test_the_plan_is_the_cheapest_and_costs_grow_with_the_batch(spec, batch):
    plan = plan_linear(spec, batch)
    assert plan.seconds == min(option.cost.seconds for option in plan.options)
    assert [option.strategy for option in plan.options[:3]] == ["low_rank", "dense", "sequential"]
    larger = plan_linear(spec, 2 * batch_bucket(batch) + 1)
    for strategy in ("low_rank", "dense", "sequential"):
        before, after = plan.using(strategy), larger.using(strategy)
        assert before.flops <= after.flops
        assert before.bytes <= after.bytes
