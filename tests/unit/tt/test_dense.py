import pytest
import torch

from comera.tt.dense import absorb, frobenius_norm, materialize
from comera.tt.spec import BTTSpec, TTMSpec, TTSpec


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
