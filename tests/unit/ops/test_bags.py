"""ttm_bag against F.embedding_bag over the float64 dense oracle: options, gradients, weights, padding, wrong bags."""

import pytest
import torch
import torch.nn.functional as F

from comera.errors import DataError, IdError, SpecError
from comera.ops import chunking
from comera.ops.lookup import ttm_bag
from comera.ops.planner.plan import plan_lookup
from comera.tt.dense import materialize

from ...helpers.lookups import SPECS, cores_of, each_option, some_ids
from ...helpers.specs import ttm

TABLES = [*SPECS, ttm((3, 2, 2, 3), (1, 2, 2, 1), 4, pad_rows=2)]


def some_weights(*shape):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def force(spec, option):
    return plan_lookup(spec, 8).using(option.ends)


def with_gradients(sums, leaves):
    dsums = torch.randn(sums.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return [sums, *torch.autograd.grad(sums, leaves, dsums.to(sums.dtype))]


def assert_as_dense(spec, ids, offsets, plan=None, *, mode="sum", weights=None, padding_idx=None, last=False):
    """Values and all gradients are those of F.embedding_bag over the materialised table."""
    cores = cores_of(spec)
    leaves = cores if weights is None else [*cores, weights]
    settings = {"mode": mode, "per_sample_weights": weights, "padding_idx": padding_idx, "include_last_offset": last}
    found = ttm_bag(ids, offsets, spec, cores, plan=plan, **settings)
    exact = F.embedding_bag(ids, materialize(spec, cores), offsets, **settings)
    assert found.shape == exact.shape
    torch.testing.assert_close(with_gradients(found, leaves), with_gradients(exact, leaves), rtol=1e-10, atol=1e-10)


@each_option(TABLES)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
def test_agrees_with_the_dense_table(spec, option, mode, padding_idx):
    ids, offsets = some_ids(spec, 40), torch.tensor([0, 0, 3, 4, 4, 30, 40])  # empty bags in front, within, at the end
    assert_as_dense(spec, ids, offsets, force(spec, option), mode=mode, padding_idx=padding_idx)
    assert_as_dense(spec, ids, offsets, force(spec, option), mode=mode, padding_idx=padding_idx, last=True)
    assert_as_dense(spec, some_ids(spec, 4, 3), None, force(spec, option), mode=mode, padding_idx=padding_idx)


@each_option(TABLES)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_weights_and_their_gradients(spec, option, padding_idx):
    offsets = torch.tensor([0, 2, 2, 7])
    plan = force(spec, option)
    assert_as_dense(spec, some_ids(spec, 20), offsets, plan, weights=some_weights(20), padding_idx=padding_idx)
    assert_as_dense(spec, some_ids(spec, 5, 2), None, plan, weights=some_weights(5, 2), padding_idx=padding_idx)


@each_option(TABLES)
def test_no_ids_give_zeros(spec, option):
    none, plan = torch.empty(0, dtype=torch.int64), force(spec, option)
    assert_as_dense(spec, none, torch.tensor([0, 0]), plan, weights=some_weights(0))
    assert_as_dense(spec, none, none, plan)
    assert_as_dense(spec, none, torch.tensor([0]), plan, last=True)
    assert_as_dense(spec, none.view(0, 3), None, plan, mode="mean")
    found = ttm_bag(none.view(3, 0), None, spec, cores_of(spec), mode="mean", plan=plan)
    assert torch.equal(found, torch.zeros(3, spec.embedding_dim, dtype=torch.float64))


@each_option(TABLES)
def test_only_padding_gives_zeros_and_no_gradient(spec, option):
    cores, ids = cores_of(spec), torch.full((2, 3), 2)
    sums = ttm_bag(ids, None, spec, cores, mode="mean", padding_idx=2, plan=force(spec, option))
    assert torch.count_nonzero(sums) == 0
    assert all(torch.count_nonzero(grad) == 0 for grad in torch.autograd.grad(sums.sum(), cores))


@each_option(TABLES, dense=False)
def test_first_and_second_derivatives_pass_gradcheck(spec, option):
    ids, offsets, plan = some_ids(spec, 6), torch.tensor([0, 2, 2]), force(spec, option)

    def bags(weights, *cores):
        return ttm_bag(ids, offsets, spec, cores, mode="sum", per_sample_weights=weights, padding_idx=0, plan=plan)

    operands = some_weights(6), *cores_of(spec)
    assert torch.autograd.gradcheck(bags, operands, fast_mode=True)
    assert torch.autograd.gradgradcheck(bags, operands, fast_mode=True)


@each_option(TABLES, dense=False)
def test_chunks_of_one_block_give_the_same(spec, option, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_CPU", 1)
    offsets = torch.tensor([0, 9, 30])
    assert_as_dense(spec, some_ids(spec, 60), offsets, force(spec, option), weights=some_weights(60))


def test_int32_ids_and_offsets_in_any_layout():
    spec = SPECS[2]
    assert_as_dense(spec, some_ids(spec, 3, 6).int().t(), None)
    assert_as_dense(spec, some_ids(spec, 20).int()[::2], torch.tensor([0, 9, 4, 9], dtype=torch.int32)[::2])


def test_weights_may_have_any_dtype():
    spec = SPECS[1]
    cores, ids = cores_of(spec, torch.float32), some_ids(spec, 5, 2)
    weights = some_weights(5, 2)
    for strategy in ("two_parts", "dense"):
        plan = plan_lookup(spec, 8).using(strategy)
        found = ttm_bag(ids, None, spec, cores, mode="sum", per_sample_weights=weights, plan=plan)
        exact = F.embedding_bag(ids, materialize(spec, cores), mode="sum", per_sample_weights=weights.float())
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_float32_and_rounds_once(dtype):
    spec = ttm((5, 4, 10, 10), (4, 2, 3, 4), 32, pad_rows=7)
    low, ids = cores_of(spec, dtype), some_ids(spec, 20, 50)
    found = ttm_bag(ids, None, spec, low, mode="sum")
    exact = F.embedding_bag(ids, materialize(spec, [core.double() for core in low]), mode="sum")
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_autocast_leaves_the_sums_alone():
    spec = SPECS[2]
    ids, cores = some_ids(spec, 8, 5), cores_of(spec, torch.float32)
    for option in plan_lookup(spec, 8).options:
        outside = ttm_bag(ids, None, spec, cores, mode="sum", plan=force(spec, option))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = ttm_bag(ids, None, spec, cores, mode="sum", plan=force(spec, option))
        assert inside.dtype == torch.float32
        assert torch.equal(inside, outside)
        gradients = torch.autograd.grad(inside.sum(), cores)
        torch.testing.assert_close(gradients, torch.autograd.grad(outside.sum(), cores), rtol=0, atol=0)


def test_other_devices_sum_without_synchronizing():
    spec = SPECS[2]
    cores = [core.to("meta") for core in cores_of(spec)]
    ids, offsets = (torch.empty(size, dtype=torch.int64, device="meta") for size in (15, 4))
    weights = torch.empty(15, device="meta")
    for option in plan_lookup(spec, 8).options:
        sums = ttm_bag(
            ids, offsets, spec, cores, mode="sum", per_sample_weights=weights, padding_idx=1, plan=force(spec, option)
        )
        assert sums.shape == (4, spec.embedding_dim)


@pytest.mark.parametrize(
    ("ids", "offsets", "settings", "kind", "message"),
    [
        ([1, 2], [1], {}, DataError, r"begin with 0, never decrease and reach at most 2, the number of ids; got \[1\]"),
        ([1, 2], [0, 2, 1], {}, DataError, r"never decrease .* got \[0, 2, 1\]"),
        ([1, 2], [0, 3], {}, DataError, r"reach at most 2"),
        ([1, 2], [0, 1], {"include_last_offset": True}, DataError, r"end with 2, the number of ids; got \[0, 1\]"),
        ([1, 2], [], {"include_last_offset": True}, DataError, r"offsets of shape \(bags \+ 1,\), got \[0\]"),
        ([1, 2], [1, *range(9)], {}, DataError, r"got \[1, 0, 1, 2, 3, 4\] ... \[7, 8\]"),
        ([1, 2], None, {}, DataError, r"ids of shape \[2\] and no offsets"),
        ([[1, 2]], [0], {}, DataError, r"ids of shape \[1, 2\] and offsets of shape \[1\]"),
        ([1, 2], [[0]], {}, DataError, r"offsets of shape \(bags,\), got \[1, 1\]"),
        ([1, 2], [0.0], {}, TypeError, r"offsets of dtype int32 or int64, got torch.float32"),
        ([1, 17], [0], {}, IdError, r"got 17 at position \[1\]"),
        ([1, 2], [0], {"per_sample_weights": torch.ones(3)}, DataError, r"of the ids' shape \[2\], got \[3\]"),
        ([1, 2], [0], {"mode": "mean", "per_sample_weights": torch.ones(2)}, ValueError, r"for mode 'sum', got mode"),
        ([1, 2], [0], {"mode": "max"}, ValueError, r"expected mode 'sum' or 'mean', got 'max'"),
        ([1, 2], [0], {"padding_idx": 17}, SpecError, r"padding_idx in -17 ... 16 for 17 rows, got 17"),
    ],
)
def test_wrong_bags_are_named(ids, offsets, settings, kind, message):
    spec = SPECS[1]  # 17 rows
    offsets = None if offsets is None else torch.tensor(offsets, dtype=None if offsets else torch.int64)
    with pytest.raises(kind, match=message):
        ttm_bag(torch.tensor(ids), offsets, spec, cores_of(spec), **{"mode": "sum", **settings})


def test_rows_are_never_held(monkeypatch):
    spec = ttm((16, 16), (8, 8), 8)
    cores, ids, largest = cores_of(spec), some_ids(spec, 8, 2048), 0
    monkeypatch.setattr(chunking, "CHUNK_CPU", 2**14)
    bmm = torch.bmm

    def watched(*operands, **out):
        nonlocal largest
        product = bmm(*operands, **out)
        largest = max(largest, product.numel())
        return product

    monkeypatch.setattr(torch, "bmm", watched)
    plan = plan_lookup(spec, ids.numel()).using("two_parts")
    ttm_bag(ids, None, spec, cores, mode="sum", plan=plan).sum().backward()
    assert 0 < largest < 256 * 64  # the rows of the table
