"""The rule of rank adaptation within a step of the AdamW kernel, against float64."""

import pytest
import torch
from torch import nn

from comera.kernels.cpp import adamw as kernel
from comera.kernels.cpp import compiler

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

# nothing, less than a vector, vectors with and without a rest, and several tiles
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (5, 13), (8, 16), (3, 11, 2), (41_003,)] + [(4, 7)] * 30


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(params, k):
    generator = torch.Generator().manual_seed(k)
    for number, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator).mul_(10.0 ** (number % 7 - 3))


def test_what_is_added_to_gradients_and_the_means_of_squares():
    """g ← c g + a + 2β x as it is read, and s ← s + w ((x g)² - s) after the step, of any lengths."""
    torch.manual_seed(0)
    params, wide = parameters(), parameters(torch.float64)
    numbers = range(len(params))
    added = {k: torch.randn(params[k].shape) for k in numbers if k % 3 == 0}
    means = {k: (torch.rand(params[k].shape), (1.0, 0.05)[k % 2]) for k in numbers if k % 2 == 0 or k % 5 == 0}
    pulled = [params[k] for k in numbers if k not in added and k not in means]
    assert {len(added) > 5, 8 in added or 8 in means, len(pulled) > 5} == {True}
    optimizer = torch.optim.AdamW(wide, lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    states = [t for p in params for t in (torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0))]
    expected = {k: mean.double() for k, (mean, _) in means.items()}
    for step in range(3):
        torch.set_num_threads(1 + step)
        give_gradients(params, step)
        for k, (p, w) in enumerate(zip(params, wide, strict=True)):
            w.grad = 0.7 * p.grad.double() + added.get(k, torch.zeros(())).double()
            w.grad += 2 * 0.3 * w.detach() if any(p is each for each in pulled) else 0
        optimizer.step()
        grads = [p.grad for p in params]
        group = kernel.Held(params, states).group(grads, [0.1] * len(params), [0.2] * len(params))
        triples = [(params[k], mean, weight) for k, (mean, weight) in means.items()]
        pairs = [(params[k], each) for k, each in added.items()]
        terms = kernel.Terms.fitting(0.7, [*pairs, (torch.ones(2), torch.ones(2))], pulled, 0.6, triples)
        with torch.no_grad():
            kernel.step([group], betas=(0.8, 0.9), eps=1e-8, terms=terms)
        for k, (_, weight) in means.items():
            expected[k] = expected[k].lerp((wide[k].detach() * wide[k].grad).square(), weight)
    for one, other in zip(params, wide, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm()
    for k, (mean, _) in means.items():
        assert (mean - expected[k]).norm() <= 1e-5 * expected[k].norm()
