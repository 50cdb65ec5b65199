"""The MLP kernel against float64: values, all gradients, odd shapes, ranks 0 and 1, with and without bias."""

from functools import partial

import pytest
import torch

from comera.kernels.cpp import compiler
from comera.kernels.cpp.gated import ACTIVATIONS as KERNEL_ACTIVATIONS
from comera.kernels.cpp.low_rank import low_rank_output
from comera.kernels.cpp.mlp import mlp, mlp_backward
from comera.ops.activations import ACTIVATIONS

from ...helpers.near import assert_all_equal, assert_within

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

ONES = [torch.ones(1, 1)] * 2
# samples, features in, hidden and out, ranks of the weights of x, rank of that of h, bias
SHAPES = [
    (100, 70, 200, 80, (30,), 30, True),
    (65, 21, 97, 33, (31, 7), 5, True),
    (64, 32, 48, 16, (8,), 16, False),
    (128, 40, 100, 64, (9, 9), 33, False),
    (1, 3, 7, 1, (1, 2), 1, True),
    (3, 1, 1, 1, (1,), 1, True),
    (70, 20, 50, 30, (4,), 0, True),
    (70, 20, 50, 30, (0,), 4, True),
    (70, 20, 50, 30, (0,), 4, False),
    (0, 20, 50, 30, (3,), 4, True),
    (17, 50, 3072, 70, (70,), 130, True),
    (140, 768, 100, 65, (32, 16), 32, True),
]


def operands(samples, features, hidden, out, ranks, rank, bias):
    """x, all A, all B and dz; Y and h of size 1, so that no activation is out of its range."""
    torch.manual_seed(samples + hidden)
    sizes = [(r, features, hidden) for r in ranks] + [(rank, hidden, out)]
    as_ = [torch.randn(r, i) / i**0.5 for r, i, _ in sizes]
    bs = [torch.randn(int(bias) + r, o) / (1 + r) ** 0.5 for r, _, o in sizes]
    return torch.randn(samples, features), as_, bs, torch.randn(samples, out)


def reference(x, as_, bs, activation, dz):
    """z, dx, then all ∂A and ∂B in turn, in float64 by torch's autograd."""
    x, dz = x.double().requires_grad_(), dz.double()
    factors = [(a.double().requires_grad_(), b.double().requires_grad_()) for a, b in zip(as_, bs, strict=True)]

    def linear(x, a, b):
        y = x @ a.t() @ b[b.shape[0] - a.shape[0] :]
        return y if len(a) == len(b) else y + b[0]

    first, *others = (linear(x, *pair) for pair in factors[:-1])
    h = ACTIVATIONS[activation][0](first)
    for y in others:
        h = h * y
    z = linear(h, *factors[-1])
    grads = torch.autograd.grad(z, [x, *(t for pair in factors for t in pair)], dz, allow_unused=True)
    return [z.detach(), *grads]


def run(x, as_, bs, activation, dz):
    p, q, z = mlp(x, as_, bs, activation)
    return [z, *mlp_backward(x, p, q, dz, as_, bs, activation, True)]


assert_near = partial(assert_within, share=4e-6)  # sums of up to 3,072 float32 products


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, activation):
    x, as_, bs, dz = operands(*shape)
    for found, expected in zip(run(x, as_, bs, activation, dz), reference(x, as_, bs, activation, dz), strict=True):
        assert_near(found, expected)


def test_a_gradient_of_x_that_nobody_wants_is_not_made():
    x, as_, bs, dz = operands(*SHAPES[1])
    p, q, _ = mlp(x, as_, bs, "gelu")
    _, _, *grads = run(x, as_, bs, "gelu", dz)
    assert_all_equal(mlp_backward(x, p, q, dz, as_, bs, "gelu", False), grads)


def test_z_again_from_what_is_kept():
    x, as_, bs, _ = operands(*SHAPES[1])
    _, q, z = mlp(x, as_, bs, "gelu")
    assert_all_equal(low_rank_output(q, [as_[-1].shape[0]], bs[-1:]), [z])


def test_operands_need_not_be_contiguous():
    x, as_, bs, dz = operands(*SHAPES[1])
    transposed = [[t.t().contiguous().t() for t in ts] for ts in ([x], as_, bs, [dz])]
    assert not transposed[0][0].is_contiguous()
    assert_all_equal(
        run(transposed[0][0], transposed[1], transposed[2], "gelu", transposed[3][0]), run(x, as_, bs, "gelu", dz)
    )


def test_the_same_to_the_bit_each_time():
    x, as_, bs, dz = operands(300, 40, 500, 60, (11,), 12, True)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        first = run(x, as_, bs, "gelu", dz)
        for _ in range(3):
            assert_all_equal(run(x, as_, bs, "gelu", dz), first)


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_activations_over_their_whole_range(activation):
    """act(y) and act'(y) themselves, as z and dx: one feature and rank 1, all A and B = 1."""
    y = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -90.0, -20.0, 0.0, -0.0, 20.0, 90.0, 1e4])])
    values, slopes, *_ = run(y.unsqueeze(1), ONES, ONES, activation, torch.ones(y.numel(), 1))
    wanted = y.double().requires_grad_()
    expected = ACTIVATIONS[activation][0](wanted)
    expected.sum().backward()
    torch.testing.assert_close(values.flatten().double(), expected.detach(), rtol=5e-7, atol=5e-7)
    torch.testing.assert_close(slopes.flatten().double(), wanted.grad, rtol=2e-6, atol=1e-6)


def test_gelu_keeps_its_digits_far_below_zero():
    y = torch.linspace(-9, -3, 200)
    _, _, values = mlp(y.unsqueeze(1), ONES, ONES, "gelu")
    expected = y.double() * torch.erfc(-y.double() / 2**0.5) / 2
    torch.testing.assert_close(values.flatten().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("activation", KERNEL_ACTIVATIONS)
def test_nan_stays_visible(activation):
    x = torch.tensor([[1.0], [float("nan")], [2.0]])
    as_, bs = [torch.ones(1, 1), torch.ones(2, 4)], [torch.ones(1, 4), torch.ones(2, 2)]
    _, _, z = mlp(x, as_, bs, activation)
    assert z.isnan().tolist() == [[False] * 2, [True] * 2, [False] * 2]
