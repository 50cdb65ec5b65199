"""The feed-forward kernel against float64: values, all gradients, odd shapes, ranks 0 and 1, with and without bias."""

import pytest
import torch

from comera.contract.activations import ACTIVATIONS
from comera.native import build
from comera.native.feed_forward import ACTIVATIONS as NATIVE_ACTIVATIONS
from comera.native.feed_forward import feed_forward, feed_forward_backward

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")

# samples, wide features, rank of A, ranks of B_k, bias
SHAPES = [
    (100, 200, 30, (30,), True),
    (65, 97, 5, (31, 7), True),
    (64, 48, 16, (8,), False),
    (128, 100, 33, (9, 9), False),
    (1, 7, 1, (1, 2), True),
    (3, 1, 1, (1,), True),
    (70, 50, 0, (4,), True),
    (70, 50, 4, (0,), True),
    (70, 50, 4, (0,), False),
    (0, 50, 4, (3,), True),
    (17, 3072, 130, (70,), True),
]


def operands(samples, wide, rank, ranks, bias):
    torch.manual_seed(samples + wide)
    ps = [torch.cat([torch.ones(int(bias), samples), torch.randn(r, samples)]) for r in ranks]
    bs = [torch.randn(int(bias) + r, wide) / (1 + r) ** 0.5 for r in ranks]
    return ps, bs, torch.randn(rank, wide), torch.randn(rank, samples)


def reference(ps, bs, a, u, ranks, activation):
    """Q, then ∂A, V_k and ∂B_k, in float64 by torch's autograd."""
    ps, bs = [p.double() for p in ps], [b.double().requires_grad_() for b in bs]
    a = a.double().requires_grad_()
    ys = [p.t() @ b for p, b in zip(ps, bs, strict=True)]
    h = ACTIVATIONS[activation][0](ys[0])
    for y in ys[1:]:
        h = h * y
    q = a @ h.t()
    da, *rest = torch.autograd.grad(q, [a, *bs, *ys], u.double())
    dbs, dys = rest[: len(bs)], rest[len(bs) :]
    vs = [b[b.shape[0] - r :].detach() @ dy.t() for b, dy, r in zip(bs, dys, ranks, strict=True)]
    return q.detach(), [da, *vs, *dbs]


def assert_near(found, expected):
    """To 4e-6 of the largest number: sums of up to 3,072 float32 products."""
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4e-6 * largest)


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, activation):
    ranks = shape[3]
    ps, bs, a, u = operands(*shape)
    q, grads = reference(ps, bs, a, u, ranks, activation)
    assert_near(feed_forward(ps, bs, a, activation), q)
    found = feed_forward_backward(ps, bs, a, u, ranks, activation)
    for each, expected in zip(found, grads, strict=True):
        assert_near(each, expected)


def test_operands_need_not_be_contiguous():
    ps, bs, a, u = operands(20, 30, 6, (5,), True)
    turned = [[t.t().contiguous().t() for t in ts] for ts in (ps, bs, [a], [u])]
    assert not turned[0][0].is_contiguous()
    torch.testing.assert_close(
        feed_forward(turned[0], turned[1], turned[2][0], "gelu"), feed_forward(ps, bs, a, "gelu"), rtol=0, atol=0
    )
    ours = feed_forward_backward(turned[0], turned[1], turned[2][0], turned[3][0], [5], "gelu")
    for each, expected in zip(ours, feed_forward_backward(ps, bs, a, u, [5], "gelu"), strict=True):
        torch.testing.assert_close(each, expected, rtol=0, atol=0)


def test_the_same_to_the_bit_each_time():
    ps, bs, a, u = operands(300, 500, 12, (11,), True)
    first = [feed_forward(ps, bs, a, "gelu"), *feed_forward_backward(ps, bs, a, u, [11], "gelu")]
    for _ in range(3):
        again = [feed_forward(ps, bs, a, "gelu"), *feed_forward_backward(ps, bs, a, u, [11], "gelu")]
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_activations_over_their_whole_range(activation):
    """act(y) and act'(y) themselves: one sample and rank 1, B = y, A = 1 for one feature after the other."""
    y = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -90.0, -20.0, 0.0, -0.0, 20.0, 90.0, 1e4])])
    one = torch.ones(1, y.numel())
    p, b = y.unsqueeze(0), torch.ones(1, 1)
    values = feed_forward([p], [b], torch.ones(1, 1), activation)[0]
    *_, slopes, _ = feed_forward_backward([p], [b], torch.ones(1, 1), one, [1], activation)
    wanted = y.double().requires_grad_()
    expected = ACTIVATIONS[activation][0](wanted)
    expected.sum().backward()
    torch.testing.assert_close(values.double(), expected.detach(), rtol=5e-7, atol=5e-7)
    torch.testing.assert_close(slopes[0].double(), wanted.grad, rtol=2e-6, atol=1e-6)


def test_gelu_keeps_its_digits_far_below_zero():
    y = torch.linspace(-9, -3, 200)
    values = feed_forward([y.unsqueeze(0)], [torch.ones(1, 1)], torch.ones(1, 1), "gelu")[0]
    expected = y.double() * torch.erfc(-y.double() / 2**0.5) / 2
    torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", NATIVE_ACTIVATIONS)
def test_what_is_no_number_stays_visible(activation):
    p = torch.tensor([[1.0, float("nan"), 2.0]])
    q = feed_forward([p], [torch.ones(1, 4)], torch.ones(2, 4), activation)
    assert q.isnan().tolist() == [[False, True, False]] * 2
