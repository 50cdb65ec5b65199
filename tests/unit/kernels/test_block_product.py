"""The product with block tensor trains against the dense weight in float64, and where it is used."""

from functools import partial

import pytest
import torch

from comera.kernels import select
from comera.kernels.cpp import compiler
from comera.kernels.cpp.block_product import block_product, block_product_backward
from comera.tt.blocks import materialize_blocks
from comera.tt.shapes import btt_spec
from comera.tt.spec import BTTSpec

from ...helpers.near import assert_all_equal, assert_within
from ...helpers.specs import ragged

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

SPECS = [
    btt_spec(768, 768),
    btt_spec(100, 300, rank=2),
    btt_spec(50, 70, rank=3, blocks=(1, 1)),
    BTTSpec(1, 1, (1, 1), (1, 1), 1),
    BTTSpec(9, 11, (9, 1), (11, 1), 1),
    BTTSpec(35, 1, (5, 7), (1, 1), 1),
    BTTSpec(1, 39, (1, 1), (3, 13), 1),
    BTTSpec(30, 61, (5, 7), (9, 8), 2),  # the last blocks end within their features
    BTTSpec(8, 9, (5, 7), (9, 8), 2),  # and some begin beyond them
    BTTSpec(20, 30, (4, 5), (5, 6), 0),
    ragged(66, 133, (6, 11), (7, 19), 4),
    ragged(96, 64, (4, 24), (8, 8), 3),
    BTTSpec(24, 24, (3, 8), (3, 8), ((0, 2, 8), (0, 0, 0), (0, 5, 1))),  # an input and an output block without rank
]
BATCHES = (0, 1, 7, 65, 200)


def operands(spec, batch, bias=True, gates=False):
    """x, and R, L, bias, gates and ranks as the kernel takes them for one weight, each in a list, and dy."""
    torch.manual_seed(batch)
    (_, n), (_, m), count = spec.in_modes, spec.out_modes, spec.ranks[1]
    x, r_NK, l_KM = torch.randn(batch, spec.in_features), torch.randn(n, count), torch.randn(count, m)
    b = torch.randn(spec.out_features) if bias else None
    d = torch.linspace(-0.5, 1.5, count) if gates else None
    return [x, [r_NK], [l_KM], [b], [d], [torch.tensor(spec.rows_of_ranks)]], torch.randn(batch, spec.out_features)


def forward(given, *dys):
    return block_product(*given, [dy.shape[1] for dy in dys])


def backward(given, dys, wants=(True, True, True)):
    return block_product_backward(given[0], dys, *given[1:], *wants)


def run(given, dy):
    """y, then the gradients of x, R, L, bias and gates."""
    return [*forward(given, dy), *backward(given, [dy])]


def reference(spec, given, dy):
    leaves = [t.double().requires_grad_() for t in (given[0], *(t for (t,) in given[1:5])) if t is not None]
    x, r_NK, l_KM, *rest = leaves
    if given[4][0] is not None:
        r_NK = r_NK * rest[-1]
    y = x @ materialize_blocks(spec, [r_NK[None], l_KM[..., None]])
    y = y + rest[0] if given[3][0] is not None else y
    return [y, *torch.autograd.grad(y, leaves, dy.double())]


# of 10 where 200 products cancel out: sums of up to 768 float32 products
assert_near = partial(assert_within, share=2e-6, least=10.0)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_values_and_gradients(spec, batch):
    for bias, gates in ((True, False), (False, True), (True, True)):
        given, dy = operands(spec, batch, bias, gates)
        found, expected = run(given, dy), reference(spec, given, dy)
        assert len(found) == len(expected) == 4 + bias + gates
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)


def test_many_tiles():
    given, dy = operands(SPECS[10], 1000)
    for one, other in zip(run(given, dy), reference(SPECS[10], given, dy), strict=True):
        assert_near(one, other)


def test_only_what_is_asked_for():
    given, dy = operands(SPECS[1], 70)
    _, dx, dr, *rest = run(given, dy)
    for wants in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 1), (0, 0, 0)):
        found = backward(given, [dy], [*map(bool, wants)])
        assert_all_equal(found, [dx] * wants[0] + [dr] * wants[1] + rest * wants[2])


def test_operands_need_not_be_contiguous():
    given, dy = operands(SPECS[1], 70)
    strided = [given[0].t().contiguous().t(), *([t.t().contiguous().t()] for (t,) in given[1:3]), *given[3:]]
    assert not strided[0].is_contiguous()
    assert not strided[1][0].is_contiguous()
    assert_all_equal(run(strided, dy.t().contiguous().t()), run(given, dy))


def test_weights_that_share_x():
    specs = [SPECS[1], btt_spec(100, 40), btt_spec(100, 300, rank=2, blocks=(5, 12))]
    each = [operands(spec, 130, bias=k != 1, gates=k > 0) for k, spec in enumerate(specs)]
    x, dys = each[0][0][0], [dy for _, dy in each]
    given = [x, *([part for one, _ in each for part in one[k]] for k in range(1, 6))]
    ys, (dx, *grads) = forward(given, *dys), backward(given, dys)
    total = torch.zeros(())
    for y, (one, dy), spec in zip(ys, each, specs, strict=True):
        y_alone, dx_alone, *expected = reference(spec, [x, *one[1:]], dy)
        assert_near(y, y_alone)
        total = total + dx_alone
        for other in expected:
            assert_near(grads.pop(0), other)
    assert not grads
    assert_near(dx, total)


@pytest.mark.parametrize("batch", [1, 5, 25, 40, 97, 500])
def test_any_number_of_threads(batch):
    """y and dx to the bit, sums over the batch to rounding; twice with as many threads, all to the bit."""
    given, dy = operands(SPECS[10], batch, gates=True)
    expected = reference(SPECS[10], given, dy)
    for threads in (1, 2, 3, 5, 40):
        torch.set_num_threads(threads)
        made = run(given, dy)
        assert_all_equal(run(given, dy), made)
        if threads == 1:
            first = made
        assert_all_equal(made[:2], first[:2])
        for one, other in zip(made, expected, strict=True):
            assert_near(one, other)


def test_nan_and_inf_stay_in_their_row():
    given, dy = operands(SPECS[10], 70)
    given[0][3, 5], given[0][7, 0] = float("inf"), float("nan")
    (y,) = forward(given, dy)
    assert (~y.isfinite()).any(1).nonzero().flatten().tolist() == [3, 7]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[2, 1], [1, 1]], "whose sum"),
        ([[7, 0], [0, -1]], ">= 0"),
        ([[2**62, 2**62], [2**62, 2**62 + 6]], "whose sum"),  # whose sum is 6 in 64 bits
        ([2, 1, 1, 2], "expected contiguous ranks"),
        ([[2.0, 1.0], [1.0, 2.0]], "int64"),
        ([[6]], "at most"),
    ],
)
def test_ranks_that_do_not_fit_are_refused(ranks, message):
    given, dy = operands(BTTSpec(6, 8, (2, 3), (2, 4), ((2, 1), (1, 2))), 3)
    given[5] = [torch.tensor(ranks)]
    with pytest.raises(RuntimeError, match=message):
        forward(given, dy)
    with pytest.raises(RuntimeError, match=message):
        backward(given, [dy])


def test_used_for_float32_on_the_cpu(monkeypatch):
    given, _ = operands(SPECS[1], 1)
    flat = [given[0], *(t for (t,) in given[1:4]), None]
    assert select.block_product_backend(flat) == "cpp"
    assert select.block_product_backend([*flat[:3], None, torch.ones(flat[1].shape[1])]) == "cpp"
    assert select.block_product_backend([*flat[:4], torch.ones(flat[1].shape[1]).double()]) == "torch"
    assert select.block_product_backend([None if t is None else t.double() for t in flat]) == "torch"
    monkeypatch.setenv("COMERA_KERNELS", "low_rank")
    assert select.block_product_backend(flat) == "torch"
