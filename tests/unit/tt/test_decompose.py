import pytest
import torch

from comera.errors import SpecError
from comera.tt.decompose import round_cores, singular_values, tt_svd
from comera.tt.dense import materialize
from comera.tt.init import init_cores
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

from ...helpers.oracle import padded_weight, unfoldings
from ...helpers.specs import btt

EXACT = [
    tt_spec(96, 128, order=6, rank=5),
    tt_spec(96, 60, order=5, rank=(1, 4, 3, 6, 5, 1)),
    tt_spec(48, 64, order=2, rank=7),
    ttm_spec(192, 24, order=3, rank=6),
    btt_spec(96, 64, rank=3),
    btt((3, 8), (4, 6), [2, 0, 6, 1] * 3),
]
PADDED = [
    tt_spec(97, 61, order=4, rank=6),
    ttm_spec(199, 24, order=3, rank=6),
    btt_spec(97, 61, rank=3),
    btt((3, 8), (4, 6), [2, 1, 6, 1] * 3, pad_in=3, pad_out=2),
]


def train(spec, dtype=torch.float64):
    return init_cores(spec, 1.0, generator=torch.Generator().manual_seed(0), dtype=dtype)


def noise(spec, dtype=torch.float64):
    return torch.randn(spec.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def relative(weight, found):
    weight = weight.double()
    return float((weight - materialize(found.spec, [core.double() for core in found.cores])).norm() / weight.norm())


@pytest.mark.parametrize("spec", EXACT)
def test_a_low_rank_weight_is_recovered_with_its_ranks(spec):
    weight = materialize(spec, train(spec))
    found = tt_svd(weight, spec.with_ranks(10**6), rel_error=0.0)
    assert found.spec == spec
    assert found.error < 1e-11
    torch.testing.assert_close(materialize(found.spec, found.cores), weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize("spec", EXACT + PADDED)
def test_any_weight_is_exact_when_the_ranks_allow(spec):
    found = tt_svd(noise(spec), spec.with_ranks(10**6))
    assert found.error < 1e-13
    assert found.error == pytest.approx(relative(noise(spec), found), abs=1e-16)


@pytest.mark.parametrize("spec", EXACT + PADDED)
def test_the_error_is_the_measured_one_and_an_allowed_one_is_kept(spec):
    weight = noise(spec)
    capped = tt_svd(weight, spec)
    assert capped.spec == spec
    assert capped.error == pytest.approx(relative(weight, capped), rel=1e-12)
    loose = tt_svd(weight, spec.with_ranks(10**6), rel_error=0.3)
    assert loose.error == pytest.approx(relative(weight, loose), rel=1e-12)
    assert 0 < loose.error <= 0.3
    assert loose.spec.numel < spec.with_ranks(10**6).numel


def test_the_measured_error_includes_the_cast_to_the_dtype_of_the_weight():
    spec = tt_spec(96, 128, order=4, rank=10**6)
    found = tt_svd(noise(spec, torch.bfloat16), spec)
    assert {core.dtype for core in found.cores} == {torch.bfloat16}
    assert 1e-4 < found.error < 1e-2
    assert found.error == pytest.approx(relative(noise(spec, torch.bfloat16), found), rel=1e-3)


def test_order_2_is_the_truncated_svd():
    spec = tt_spec(40, 30, order=2, rank=5)
    singular = torch.linalg.svdvals(noise(spec))
    best = float(singular[5:].norm() / singular.norm())
    assert tt_svd(noise(spec), spec).error == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("spec", EXACT + PADDED)
def test_cores_come_back_balanced_and_in_shape(spec):
    for found in (tt_svd(noise(spec), spec), round_cores(spec, train(spec), ranks=2)):
        norms = [float(core.norm()) for core in found.cores]
        assert norms == pytest.approx([norms[0]] * spec.order, rel=1e-10)
        assert tuple(tuple(core.shape) for core in found.cores) == found.spec.core_shapes


@pytest.mark.parametrize("spec", EXACT + PADDED)
def test_a_weight_of_zeros_keeps_its_caps_or_has_rank_0(spec):
    weight = torch.zeros(spec.shape)
    kept, empty = tt_svd(weight, spec), tt_svd(weight, spec, rel_error=0.1)
    assert kept.spec == spec
    assert empty.spec == spec.with_ranks(0)
    for found in (kept, empty, round_cores(kept.spec, kept.cores), round_cores(kept.spec, kept.cores, rel_error=0.1)):
        assert found.error == 0
        assert torch.equal(materialize(found.spec, found.cores), weight)


@pytest.mark.parametrize("zeros", [slice(None), slice(12)], ids=["all", "half"])  # of inputs
@pytest.mark.parametrize("spec", [btt((4, 6), (6, 4), 3), tt_spec(24, 24, order=2, rank=3)], ids=str)
def test_what_begins_at_zero_can_be_trained(spec, zeros):
    torch.manual_seed(0)
    weight = torch.randn(spec.shape, dtype=torch.float64)
    weight[zeros] = 0
    for found in (tt_svd(weight, spec), round_cores(spec, tt_svd(weight, spec).cores)):
        cores = [core.requires_grad_() for core in found.cores]
        made = materialize(found.spec, cores)
        assert made[zeros].abs().max() < 1e-14
        grads = torch.autograd.grad(made[zeros].sum(), cores)
        assert any(grad.any() for grad in grads)


@pytest.mark.parametrize("ranks", [(1, 0, 3, 3, 1), (1, 3, 0, 3, 1), (1, 3, 3, 0, 1)])
def test_one_rank_of_zero_makes_all_ranks_zero(ranks):
    spec = tt_spec(24, 24, order=4, rank=3)
    cut = spec.with_ranks(ranks)
    for found in (
        tt_svd(noise(spec), cut),
        round_cores(spec, train(spec), ranks=ranks),
        round_cores(cut, [torch.ones(shape) for shape in cut.core_shapes]),
    ):
        assert found.spec == spec.with_ranks(0)
        assert torch.equal(materialize(found.spec, found.cores).double(), torch.zeros(24, 24, dtype=torch.float64))
    assert tt_svd(noise(spec), cut).error == 1
    assert round_cores(spec, train(spec), ranks=ranks).error == pytest.approx(1)


@pytest.mark.parametrize("spec", [spec for spec in EXACT if not isinstance(spec, BTTSpec)])
def test_rounding_finds_the_ranks_that_padding_with_zeros_hid(spec):
    cores = train(spec)
    wide = spec.with_ranks(tuple(min(2 * r, limit) for r, limit in zip(spec.ranks, spec.rank_limits, strict=True)))
    hidden = [torch.zeros(shape, dtype=torch.float64) for shape in wide.core_shapes]
    for big, small in zip(hidden, cores, strict=True):
        big[tuple(slice(n) for n in small.shape)] = small
    found = round_cores(wide, hidden, rel_error=0.0)
    assert found.spec == spec
    torch.testing.assert_close(materialize(found.spec, found.cores), materialize(spec, cores), rtol=0, atol=1e-11)


@pytest.mark.parametrize("ranks", [3, 1, (1, 2, 5, 1, 4, 2, 1)])
def test_rounding_to_caps_returns_the_measured_error(ranks):
    spec = tt_spec(96, 128, order=6, rank=8)
    weight = materialize(spec, train(spec))
    found = round_cores(spec, train(spec), ranks=ranks)
    assert found.spec == spec.with_ranks(ranks)
    assert found.error == pytest.approx(relative(weight, found), rel=1e-9)


def test_rounding_never_forms_the_dense_weight():
    spec = TTSpec(2**40, 2**40, (2**10,) * 4, (2**10,) * 4, (1, *[4] * 7, 1))  # 1e24 elements
    assert round_cores(spec, train(spec, torch.float32), ranks=2).spec == spec.with_ranks(2)


def test_rounding_leaves_its_input_alone():
    spec = tt_spec(96, 128, order=4, rank=8)
    cores = train(spec)
    before = [core.clone() for core in cores]
    round_cores(spec, cores, ranks=3)
    assert all(torch.equal(a, b) for a, b in zip(cores, before, strict=True))


def test_results_carry_no_graph():
    spec = tt_spec(24, 24, order=4, rank=3)
    weight = noise(spec).requires_grad_()
    cores = [core.requires_grad_() for core in train(spec)]
    for found in (tt_svd(weight, spec), round_cores(spec, cores)):
        assert not any(core.requires_grad for core in found.cores)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad):
    spec = tt_spec(24, 24, order=4, rank=3)
    weight, cores = noise(spec), train(spec)
    weight[3, 5] = cores[2][0, 0, 0] = bad
    with pytest.raises(SpecError, match="the weight holds NaN or infinity in 1 of 576 entries"):
        tt_svd(weight, spec)
    with pytest.raises(SpecError, match="core 2 holds NaN or infinity in 1 of"):
        round_cores(spec, cores)


@pytest.mark.parametrize("weight", [torch.zeros(24, 24, dtype=torch.int64), torch.zeros(24, 24, device="meta")])
def test_a_weight_without_floating_point_data_is_refused(weight):
    with pytest.raises(SpecError, match="must be a floating-point tensor with data"):
        tt_svd(weight, tt_spec(24, 24, order=2, rank=3))


def test_shapes_ranks_and_errors_out_of_place_are_refused():
    spec = tt_spec(24, 36, order=4, rank=3)
    with pytest.raises(SpecError, match=r"expected a weight of shape \(24, 36\).*got \(36, 24\)"):
        tt_svd(torch.zeros(36, 24), spec)
    with pytest.raises(SpecError, match="expected 4 cores of shapes"):
        round_cores(spec, train(spec)[:-1])
    with pytest.raises(SpecError, match="is above"):
        round_cores(spec, train(spec), ranks=(1, 3, 999, 3, 1))
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(SpecError, match=r"must lie in \[0, 1\)"):
            tt_svd(noise(spec), spec, rel_error=wrong)


def test_a_table_of_order_1_is_the_table():
    spec = TTMSpec(5, 3, (5,), (3,), (1, 1))
    found = tt_svd(noise(spec), spec, rel_error=0.5)
    assert found.error < 1e-15
    assert round_cores(spec, found.cores, rel_error=0.5).error == 0


@pytest.mark.parametrize("spec", [*EXACT, *PADDED, tt_spec(24, 24, order=4, rank=1)])
def test_the_singular_values_of_the_cores_are_those_of_the_unfoldings(spec):
    cores = train(spec)
    matrices = unfoldings(spec, padded_weight(spec, cores))
    values = singular_values(spec, cores)
    assert len(values) == spec.order - 1
    for matrix, sigma, rank in zip(matrices, values, spec.inner_ranks, strict=True):
        dense = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(sigma, dense[:rank], rtol=1e-10, atol=1e-10 * float(dense[0]))


@pytest.mark.parametrize("k", range(5))
def test_dropping_one_singular_value_makes_an_error_of_it(k):
    spec = tt_spec(96, 128, order=6, rank=5)
    cores = train(spec)
    sigma = singular_values(spec, cores)[k]
    ranks = [rank - (j == k + 1) for j, rank in enumerate(spec.ranks)]
    found = round_cores(spec, cores, ranks=ranks)
    assert found.error * float(sigma.norm()) == pytest.approx(float(sigma[-1]), rel=1e-9)


def test_ranks_that_the_neighbours_cannot_use_have_no_singular_value():
    spec = TTSpec(8, 8, (2, 4), (4, 2), (1, 1, 6, 2, 1))
    assert [len(sigma) for sigma in singular_values(spec, train(spec, torch.float32))] == [1, 4, 2]
    assert {sigma.dtype for sigma in singular_values(spec, train(spec, torch.float32))} == {torch.float64}


def test_singular_values_of_empty_and_short_trains_and_bad_values():
    spec = tt_spec(24, 24, order=4, rank=(1, 2, 0, 2, 1))
    values = singular_values(spec, [torch.ones(shape) for shape in spec.core_shapes])
    assert all((sigma == 0).all() for sigma in values)
    assert singular_values(TTMSpec(5, 3, (5,), (3,), (1, 1)), [torch.ones(1, 5, 3, 1)]) == []
    with pytest.raises(SpecError, match="core 0 holds NaN or infinity"):
        singular_values(spec, [torch.full(shape, torch.nan) for shape in spec.core_shapes])


def test_rounding_finds_the_ranks_of_blocks_that_equal_components_hid():
    spec, wide = btt((2, 4), (2, 5), [1, 2, 0, 1]), btt((2, 4), (2, 5), [2, 4, 0, 2])
    cores, twice = train(spec), [0, 0, 1, 2, 1, 2, 3, 3]
    found = round_cores(wide, [cores[0][..., twice] / 2, cores[1][twice]], rel_error=0.0)
    assert found.spec == spec
    torch.testing.assert_close(materialize(found.spec, found.cores), materialize(spec, cores), rtol=0, atol=1e-11)


def test_blocks_share_an_allowed_error_where_it_costs_least():
    weight = noise(PADDED[-1])
    found = tt_svd(weight, PADDED[-1].with_ranks(99), rel_error=0.5)
    values = torch.linalg.svdvals(unfoldings(PADDED[-1], weight)[0])
    count = found.spec.ranks[1]
    assert values[count:].norm() <= 0.5 * values.norm() < values[count - 1 :].norm()
    assert not isinstance(found.spec.block_ranks, int)


def test_devices_of_a_context_do_not_reach_into_blocks():
    spec, weight = PADDED[-1], noise(PADDED[-1])
    with torch.device("meta"):
        found = tt_svd(weight, spec)
        assert round_cores(spec, found.cores, ranks=1).spec == spec.with_ranks(1)
        assert len(singular_values(spec, found.cores)[0]) == spec.ranks[1]
