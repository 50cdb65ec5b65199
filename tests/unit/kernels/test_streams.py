"""Results that are written past the caches (streams.h) are those of a few rows, which are not, to the bit."""

import pytest
import torch

from comera.kernels.cpp import compiler
from comera.kernels.cpp.attention import attention, attention_backward
from comera.kernels.cpp.block_product import block_product, block_product_backward
from comera.kernels.cpp.low_rank import low_rank, low_rank_backward
from comera.tt.shapes import btt_spec

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

STREAMED = 2**19
FEW = 70
WIDTHS = (192, 200)  # features that are whole lines of the cache, and that are not


def assert_begins(all_rows, few):
    """Whether `few` rows are the first ones of all, of which there are enough."""
    assert all_rows.numel() >= STREAMED
    assert torch.equal(all_rows[: len(few)], few)


@pytest.mark.parametrize("features", WIDTHS)
def test_low_rank(features):
    torch.manual_seed(0)
    samples = 2800
    x, as_, bs = torch.randn(samples, features), [torch.randn(7, features)], [torch.randn(8, features)]
    dy = torch.randn(samples, features)
    (p, y), (few_p, few_y) = low_rank(x, as_, bs), low_rank(x[:FEW], as_, bs)
    assert_begins(y, few_y)
    (dx, da, db), (few_dx, *_) = (
        low_rank_backward(*each, as_, bs, True, True, True) for each in ((x, p, [dy]), (x[:FEW], few_p, [dy[:FEW]]))
    )
    assert_begins(dx, few_dx)
    exact_da, exact_db = (dy.double() @ bs[0][1:].double().t()).t() @ x.double(), p[:, 1:8].double().t() @ dy.double()
    for found, expected in ((da, exact_da), (db[1:], exact_db)):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("features", WIDTHS)
def test_block_product(features):
    torch.manual_seed(0)
    spec, samples = btt_spec(features, features, rank=2), 2800
    count = spec.ranks[1]
    weight = [torch.randn(spec.in_modes[1], count)], [torch.randn(count, spec.out_modes[1])], [None], [None]
    weight = (*weight, [torch.tensor(spec.rows_of_ranks)])
    x, dy = torch.randn(samples, features), torch.randn(samples, features)
    (y,), (few_y,) = (block_product(each, *weight, [features]) for each in (x, x[:FEW]))
    assert_begins(y, few_y)
    dx, few_dx = (block_product_backward(x[:end], [dy[:end]], *weight, True, False, False)[0] for end in (samples, FEW))
    assert_begins(dx, few_dx)


@pytest.mark.parametrize("width", [64, 72])
@pytest.mark.parametrize("groups", [1, 6])
def test_attention(width, groups):
    torch.manual_seed(0)
    batch, heads, length = 7, 6, 200
    q, k, v, do = (torch.randn(batch, length, count, width).transpose(1, 2) for count in (heads, groups, groups, heads))
    settings = None, torch.tensor(3), 0.1, width**-0.5, True
    (o, norms), (few_o, few_norms) = (attention(q[:n], k[:n], v[:n], *settings) for n in (batch, 1))
    assert_begins(o, few_o)
    found = attention_backward(do, o, norms, q, k, v, *settings)
    few = attention_backward(do[:1], few_o, few_norms, q[:1], k[:1], v[:1], *settings)
    assert found[0].numel() >= STREAMED
    assert (found[1].numel() >= STREAMED) == (groups == heads)
    for every, some in zip(found, few, strict=True):
        assert torch.equal(every[:1], some)
