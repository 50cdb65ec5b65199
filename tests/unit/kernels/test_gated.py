"""The kernel of activations, gated and not, against float64: values, gradients, odd lengths, layouts, threads."""

import pytest
import torch
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp.gated import ACTIVATIONS as KERNEL_ACTIVATIONS
from comera.kernels.cpp.gated import gated, gated_backward
from comera.ops.activations import ACTIVATIONS

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)
SHAPES = [(5, 1), (5, 3), (1, 7), (4, 33), (3, 768), (40, 700), (2, 3, 5), (1,), (), (0, 8), (4, 0)]


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


def reference(dh: Tensor, g: Tensor, u: Tensor, activation: str) -> tuple[Tensor, ...]:
    """h, dg and du in float64 by torch's autograd."""
    wide = [t.double().requires_grad_() for t in (g, u)]
    h = ACTIVATIONS[activation][0](wide[0]) * wide[1]
    return h.detach(), *torch.autograd.grad(h, wide, dh.double())


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: tuple[int, ...], activation: str) -> None:
    torch.manual_seed(sum(shape))
    dh, g, u = torch.randn(shape), 3 * torch.randn(shape), torch.randn(shape)
    found = gated(g, u, activation), *gated_backward(dh, g, u, activation)
    for one, exact in zip(found, reference(dh, g, u, activation), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=2e-6)
    ones = torch.ones(shape)
    assert torch.equal(gated(g, None, activation), gated(g, ones, activation))
    assert torch.equal(gated_backward(dh, g, None, activation)[0], gated_backward(dh, g, ones, activation)[0])


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_gates_far_from_0_let_through_all_or_nothing(activation: str) -> None:
    g, ones = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4]), torch.ones(7)
    found = gated(g, ones, activation), *gated_backward(ones, g, ones, activation)
    for one, exact in zip(found, reference(ones, g, ones, activation), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_nan_stays_nan_and_its_gradients_are_torchs(activation: str) -> None:
    g, u, dh = torch.tensor([torch.nan, 1.0, -1.0, 0.0]), torch.tensor([2.0, torch.nan, 3.0, 4.0]), torch.ones(4)
    found = gated(g, u, activation), *gated_backward(dh, g, u, activation)
    for one, exact in zip(found, reference(dh, g, u, activation), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_other_layouts() -> None:
    dh, g, u = (torch.randn(40, 30, 20).transpose(0, 2) for _ in range(3))
    plain = [t.contiguous() for t in (dh, g, u)]
    assert torch.equal(gated(g, u, "silu"), gated(*plain[1:], "silu"))
    pairs = zip(gated_backward(dh, g, u, "silu"), gated_backward(*plain, "silu"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_threads_do_not_change_a_bit() -> None:
    dh, g, u = (torch.randn(70_001) for _ in range(3))
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append([gated(g, u, "gelu"), *gated_backward(dh, g, u, "gelu")])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
