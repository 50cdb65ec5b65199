"""The narrow product against float64, and where it is taken."""

import pytest
import torch

from comera.contract import two_sided
from comera.native import build
from comera.native.narrow import LEAST_ROWS, MOST_RANK, narrow, takes_narrow

pytestmark = pytest.mark.skipif(build._compiler() is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("rows", "features", "rank"),
    [
        (1024, 768, 30),
        (100, 77, 7),
        (49, 16, 33),
        (47, 600, 16),
        (1, 5, 1),
        (7, 1, 2),
        (10, 8, 0),
        (0, 8, 3),
        (3, 0, 2),
    ],
)
def test_is_the_product(rows, features, rank):
    torch.manual_seed(0)
    a, x = torch.randn(rank, features), torch.randn(rows, features)
    exact = a.double() @ x.double().t()
    torch.testing.assert_close(narrow(a, x).double(), exact, rtol=0, atol=2e-7 * max(1, features))
    torch.testing.assert_close(narrow(a.t().contiguous().t(), x.t().contiguous().t()), narrow(a, x), rtol=0, atol=0)


def test_the_same_to_the_bit_for_any_number_of_threads():
    a, x, before = torch.randn(30, 300), torch.randn(500, 300), torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made.append(narrow(a, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(made[0], each) for each in made[1:])


def test_taken_where_it_is_faster_and_no_graph_goes_through():
    a, x = torch.randn(MOST_RANK, 8), torch.randn(LEAST_ROWS, 8)
    assert not takes_narrow(a, x)
    with torch.no_grad():
        assert takes_narrow(a, x)
        assert not takes_narrow(a, x[1:])
        assert not takes_narrow(torch.randn(MOST_RANK + 1, 8), x)
        assert not takes_narrow(a, torch.randn(8, LEAST_ROWS).t())
        assert not takes_narrow(a.double(), x.double())


def test_layers_use_it(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(LEAST_ROWS, 20, requires_grad=True)
    halves = [two_sided.Half(torch.randn(5, 20), torch.randn(6, 30)) for _ in range(2)]
    flat = [x, *(t.requires_grad_() for half in halves for t in half)]
    results, calls = [], []
    monkeypatch.setattr(two_sided, "native_narrow", lambda *args: calls.append(args) or narrow(*args))
    for setting in ("narrow", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        ys = two_sided.two_sided(x, *halves)
        results.append([y.detach() for y in ys] + list(torch.autograd.grad([y.square().sum() for y in ys], flat)))
    assert len(calls) == 3  # P of both, and U of each
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
