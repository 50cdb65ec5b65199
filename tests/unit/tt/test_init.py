import warnings

import pytest
import torch

from comera.errors import SpecError
from comera.tt.dense import absorb, frobenius_norm, materialize
from comera.tt.init import init_cores
from comera.tt.shapes import btt_spec, tt_spec, ttm_spec
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec

from ...helpers.specs import btt


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def materialized(spec, std=1.0, seed=0, dtype=torch.float32):
    return materialize(spec, [core.double() for core in init_cores(spec, std, generator=seeded(seed), dtype=dtype)])


def spread(norms):
    return float(norms.std() / norms.mean())


@pytest.mark.parametrize("order", range(2, 9))
@pytest.mark.parametrize("shape", [(768, 3072), (8192, 768), (768, 768)])
def test_a_linear_weight_has_the_target_std(shape, order):
    for seed in range(3):
        assert float(materialized(tt_spec(*shape, order=order), 0.02, seed).std()) == pytest.approx(0.02, rel=1e-4)


@pytest.mark.parametrize(
    "spec", [btt_spec(768, 3072), btt_spec(97, 61, rank=3), btt((6, 8), (4, 12), [2, 0, 1, 5] * 6)]
)
def test_blocks_have_the_target_std_and_components_of_unit_variance(spec):
    first, _ = init_cores(spec, 0.02, generator=seeded(0))
    assert float(materialized(spec, 0.02).square().mean().sqrt()) == pytest.approx(0.02, rel=0.03)  # but for padding
    assert float(first.std()) == pytest.approx(spec.sizes[0] ** -0.5, rel=0.1)


def test_blocks_of_other_ranks_have_equal_norms():
    norms = torch.stack(materialized(btt((4, 64), (2, 64), [1, 4] * 4)).split(64, 1)).norm(dim=(1, 2))
    assert float(norms.max() / norms.min()) < 1.2


@pytest.mark.parametrize("order", range(1, 7))
def test_a_table_has_the_target_std_and_even_rows_in_spite_of_padding(order):
    table = materialized(ttm_spec(5003, 192, order=order), 1.0)
    assert float(table.std()) == pytest.approx(1.0, rel=0.01)
    assert spread(table.norm(dim=1)) < 0.06


def test_the_weight_is_well_conditioned_at_every_order():
    for order in range(2, 9):
        spec = tt_spec(768, 3072, order=order)
        weight = materialized(spec)
        singular = torch.linalg.eigvalsh(weight @ weight.t()).sqrt()[-spec.ranks[spec.split] :]
        assert singular[-1] / singular[0] < 1.4
        assert max(spread(weight.norm(dim=0)), spread(weight.norm(dim=1))) < 0.03


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_cores_come_in_the_dtype_asked_for(dtype):
    spec = tt_spec(768, 768)
    assert {core.dtype for core in init_cores(spec, 0.02, dtype=dtype)} == {dtype}
    assert float(materialized(spec, 0.02, dtype=dtype).std()) == pytest.approx(0.02, rel=0.01)


def test_every_core_gets_entries_of_the_same_size():
    sizes = [float(core.square().mean()) for core in init_cores(tt_spec(768, 3072), 0.02)]
    assert max(sizes) == pytest.approx(min(sizes), rel=1e-3)
    expected = (0.02**2 / (12 * 30**3 * 16)) ** (1 / 6)  # s² of docs/method.md §9
    assert sizes[0] == pytest.approx(expected, rel=0.1)


def test_the_generator_alone_decides_the_values():
    spec = ttm_spec(1000, 64, order=3)
    torch.manual_seed(1)
    first = init_cores(spec, 1.0, generator=seeded(7))
    torch.manual_seed(2)
    again, other = init_cores(spec, 1.0, generator=seeded(7)), init_cores(spec, 1.0, generator=seeded(8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_without_a_generator_the_global_seed_decides():
    spec = tt_spec(64, 64, order=4, rank=5)
    torch.manual_seed(3)
    first = init_cores(spec, 1.0)
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(first, init_cores(spec, 1.0), strict=True))


@pytest.mark.parametrize(
    "spec",
    [
        tt_spec(64, 64, rank=0),
        ttm_spec(100, 16, order=3, rank=0),
        btt_spec(9, 7, rank=0),
        tt_spec(8, 8, order=2),
        btt_spec(9, 7),
    ],
)
def test_rank_zero_and_std_zero_give_a_weight_of_zeros_without_a_warning(spec):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cores = init_cores(spec, 0.0 if all(spec.inner_ranks) else 1.0)
    assert [tuple(core.shape) for core in cores] == list(spec.core_shapes)
    assert torch.equal(materialize(spec, cores), torch.zeros(spec.shape))


def test_slices_of_a_rank_1_train_differ_in_more_than_their_sign():
    for core in init_cores(tt_spec(768, 768, rank=1), 0.02):
        assert core.flatten().abs().unique().numel() == core.numel()


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf")])
def test_an_impossible_std_is_refused(std):
    with pytest.raises(SpecError, match="finite and >= 0"):
        init_cores(tt_spec(8, 8, order=2), std)


# --- the dense weight -------------------------------------------------------------------------------------------------


def test_gates_multiply_between_cores():
    a, b = torch.randn(1, 3, 2, dtype=torch.float64), torch.randn(2, 4, 1, dtype=torch.float64)
    d = torch.tensor([2.0, -0.5], dtype=torch.float64)
    weight = materialize(TTSpec(3, 4, (3,), (4,), (1, 2, 1)), absorb([a, b], [d]))
    torch.testing.assert_close(weight, a[0] @ torch.diag(d) @ b[:, :, 0], rtol=1e-12, atol=0)


def test_rows_of_a_table_are_found_by_mixed_radix_digits():
    spec = TTMSpec(5, 4, (2, 3), (2, 2), (1, 4, 1))
    first, second = torch.randn(1, 2, 2, 4), torch.randn(4, 3, 2, 1)
    weight = materialize(spec, [first, second])
    assert weight.shape == (5, 4)
    row_4 = torch.einsum("ar,rb->ab", first[0, 1], second[:, 1, :, 0])  # 4 = 1·3 + 1
    torch.testing.assert_close(weight[4], row_4.flatten())


def test_components_of_a_block_train_belong_to_one_block():
    spec = BTTSpec(3, 4, (2, 2), (2, 2), ((0, 2), (1, 0)))
    right, left = torch.randn(1, 2, 3), torch.randn(3, 2, 1)
    d = torch.tensor([2.0, -0.5, 3.0])
    weight = torch.zeros(4, 4)
    weight[:2, 2:] = right[0, :, :2] @ torch.diag(d[:2]) @ left[:2, :, 0]
    weight[2:, :2] = 3 * right[0, :, 2:] @ left[2:, :, 0]
    torch.testing.assert_close(materialize(spec, absorb([right, left], [d])), weight[:3])


@pytest.mark.parametrize("ranks", [(1, 0, 1, 1), (1, 2, 0, 1), (1, 0, 0, 1)])
def test_a_rank_of_zero_gives_zeros(ranks):
    spec = TTSpec(6, 3, (2, 3), (3,), ranks)
    cores = [torch.ones(shape) for shape in spec.core_shapes]
    assert torch.equal(materialize(spec, cores), torch.zeros(6, 3))
    assert frobenius_norm(cores) == 0


def test_the_norm_of_a_long_train_neither_overflows_nor_underflows_float16():
    spec = TTSpec(256, 256, (4,) * 4, (4,) * 4, (1, *[4] * 7, 1))
    cores = [torch.full(shape, 1e-3, dtype=torch.float16) for shape in spec.core_shapes]
    entry = float(cores[0][0, 0, 0]) ** 8 * 4**7
    assert float(frobenius_norm(cores)) == pytest.approx(256 * entry, rel=1e-12)
