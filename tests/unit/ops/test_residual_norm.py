"""Norms after a residual sum: derivatives of any order by kernel and by torch, dtypes, what is kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from comera.kernels import select
from comera.ops.dropout import dropout
from comera.ops.residual_norm import residual_layer_norm, residual_rms_norm

from ...helpers.live import Live

AFFINE = [(True, True), (True, False), (False, True), (False, False)]


def plain_layer_norm(z, x, weight, bias, eps, factors=1.0):
    s = x if z is None else x + factors * z
    return s, F.layer_norm(s, s.shape[-1:], weight, bias, eps)


def seeded(run, *given):
    torch.manual_seed(7)
    return run(*given)


def plain(z, x, weight, eps, offset=0.0):
    s = x if z is None else x + z
    y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps)
    return s, y if weight is None else y * (offset + weight)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 5), (2, 1), (0, 4), (2, 2, 3)], ids=str)
def test_gradients_of_first_and_second_order(shape, offset):
    torch.manual_seed(0)
    z, x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, shape, shape[-1:]))
    for found, exact in zip(
        residual_rms_norm(z, x, weight, 1e-3, offset), plain(z, x, weight, 1e-3, offset), strict=True
    ):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *given: residual_rms_norm(*given, 1e-3, offset), (z, x, weight))
        assert check(lambda *given: residual_rms_norm(None, *given, 1e-3, offset)[1], (x, weight))
        assert check(lambda x: residual_rms_norm(None, x, None, 1e-3)[1], (x,))


def derivatives(outs, inputs, given):
    """First gradients, the same to be differentiated again, and gradients of the sum of their squares."""
    first = torch.autograd.grad(outs, inputs, given, retain_graph=True, allow_unused=True)
    once = torch.autograd.grad(outs, inputs, given, create_graph=True, allow_unused=True)
    penalty = sum(each.square().sum() for each in once if each is not None)
    return *first, *once, *torch.autograd.grad(penalty, [*inputs, *given], allow_unused=True)


def assert_all_close(results, expected):
    """Zeros are as good as no gradient."""
    for found, exact in zip(results, expected, strict=True):
        exact = torch.zeros_like(found) if exact is None and found is not None else exact
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize("summed", [True, False])
def test_derivatives_of_any_order_in_float32(setting, used, summed, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    torch.manual_seed(0)
    z, x, dy, ds = (torch.randn(9, 33, requires_grad=True) for _ in range(4))
    weight, results = torch.randn(33, requires_grad=True), []
    inputs = [x, weight] if not summed else [z, x, weight]
    keep = {"both": slice(0, 2), "norm": slice(1, 2), "sum": slice(0, 1)}[used]
    for run in (residual_rms_norm, plain):
        outs, given = run(z if summed else None, x, weight, 1e-3, 1.0)[keep], (ds, dy)[keep]
        results.append([*outs, *derivatives(outs, inputs, given)])
    assert_all_close(*results)


def test_a_norm_of_what_needs_no_gradient():
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    _, y = residual_rms_norm(None, x, weight, 1e-6)
    (dweight,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
    torch.testing.assert_close(dweight, plain(None, x, None, 1e-6)[1].sum(0))
    with torch.no_grad():
        assert residual_rms_norm(None, x, weight, 1e-6)[0].data_ptr() == x.data_ptr()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_half_precision_is_rounded_once(offset):
    torch.manual_seed(0)
    z, x = (torch.randn(40, 30).bfloat16() for _ in range(2))
    weight = (0.01 * torch.randn(30)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        s, y = residual_rms_norm(z, x, weight, 1e-6, offset)
    assert (s.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)
    _, exact = plain(None, s.double(), weight.double(), 1e-6, offset)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)


@pytest.mark.parametrize("kernels", ["", "none"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_half_precision_term_is_added_in_the_dtype_of_the_sum(norm, kernels, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    torch.manual_seed(0)
    half, x = torch.randn(40, 30).bfloat16().requires_grad_(), torch.randn(40, 30, requires_grad=True)
    weight, bias, dy = torch.randn(30), torch.randn(30), torch.randn(40, 30)
    wide = half.detach().float().requires_grad_()

    def run(z):
        if norm == "rms":
            s, y = residual_rms_norm(z, x, weight, 1e-6)
        else:
            s, y = residual_layer_norm(z, x, weight, bias, 1e-6)
        return s, y, *torch.autograd.grad([s, y], [z, x], [dy, dy])

    with torch.autocast("cpu", torch.bfloat16):
        found = run(half)
    expected = run(wide)
    assert [each.dtype for each in found] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    for one, other in zip(found, (*expected[:2], expected[2].bfloat16(), expected[3]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_autocast_changes_no_dtype_of_float32():
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6)
    with torch.autocast("cpu", torch.bfloat16):
        s, y = residual_rms_norm(x, x, weight, 1e-6)
    assert (s.dtype, y.dtype) == (torch.float32, torch.float32)


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_the_sum_and_a_number_a_row_are_kept():
    z, x = (torch.randn(40, 48, requires_grad=True) for _ in range(2))
    weight = torch.randn(48, requires_grad=True)
    with Live(nn.ParameterList([z, x, weight])) as live:
        outs = residual_rms_norm(z, x, weight, 1e-6)
        assert live.nbytes == 2 * outs[0].nbytes + 40 * 4
    with Live(nn.ParameterList([x, weight])) as live:
        y = residual_rms_norm(None, x, weight, 1e-6)[1]
        assert live.nbytes == y.nbytes + 40 * 4


def test_a_weight_of_another_size_is_an_error():
    for x in (torch.randn(4, 6), torch.randn(4, 6).double()):
        with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
            residual_rms_norm(None, x, torch.ones(5, dtype=x.dtype), 1e-6)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(3, 5), (2, 1), (0, 4), (2, 2, 3)], ids=str)
def test_gradients_of_a_layer_norm_of_first_and_second_order(shape, p):
    torch.manual_seed(0)
    sizes = shape, shape, shape[-1:], shape[-1:]
    z, x, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)
    factors = seeded(dropout, torch.ones(shape, dtype=torch.float64), p) if p else 1.0
    found = seeded(residual_layer_norm, z, x, weight, bias, 1e-3, p)
    exact = plain_layer_norm(z, x, weight, bias, 1e-3, factors)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *given: seeded(residual_layer_norm, *given, 1e-3, p), (z, x, weight, bias))
        assert check(lambda *given: residual_layer_norm(None, *given, 1e-3, p)[1], (x, weight, bias))
        assert check(lambda *given: seeded(residual_layer_norm, *given, None, None, 1e-3, p), (z, x))


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(("has_weight", "has_bias"), AFFINE)
@pytest.mark.parametrize("shape", [(5, 9, 768), (3, 767), (1, 33), (40, 64), (17,), (0, 8), (2, 3, 100)], ids=str)
def test_a_layer_norm_against_float64(shape, has_weight, has_bias, p, setting, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    torch.manual_seed(0)
    z, x, dy, ds = (torch.randn(shape) + 0.5 for _ in range(4))
    weight, bias = (torch.randn(shape[-1]) if wanted else None for wanted in (has_weight, has_bias))
    factors = seeded(dropout, torch.ones(shape), p).double() if p else 1.0
    results = []
    for wide in (False, True):
        given = [
            None if t is None else (t.double() if wide else t.clone()).requires_grad_() for t in (z, x, weight, bias)
        ]
        outs = plain_layer_norm(*given, 1e-5, factors) if wide else seeded(residual_layer_norm, *given, 1e-5, p)
        grads = torch.autograd.grad(outs, [t for t in given if t is not None], (ds.to(outs[0]), dy.to(outs[1])))
        results.append([*outs, *grads])
    names = ["s", "y", "dz", "dx"] + ["dweight"] * has_weight + ["dbias"] * has_bias
    for name, found, exact in zip(names, *results, strict=True):
        rows = max(1, x.numel() // shape[-1]) if name in ("dweight", "dbias") else 1
        atol = 5e-6 * rows**0.5
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
@pytest.mark.parametrize(("summed", "p"), [(True, 0.2), (True, 0.0), (False, 0.0)])
def test_derivatives_of_any_order_of_a_layer_norm_in_float32(setting, used, summed, p, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    torch.manual_seed(0)
    z, x, dy, ds = (torch.randn(9, 33, requires_grad=True) for _ in range(4))
    weight, bias = (torch.randn(33, requires_grad=True) for _ in range(2))
    factors, results = seeded(dropout, torch.ones(9, 33), p) if p else 1.0, []
    inputs = [x, weight, bias] if not summed else [z, x, weight, bias]
    keep = {"both": slice(0, 2), "norm": slice(1, 2), "sum": slice(0, 1)}[used]
    for run, last in ((residual_layer_norm, p), (plain_layer_norm, factors)):
        outs = seeded(run, z if summed else None, x, weight, bias, 1e-3, last)[keep]
        given = (ds, dy)[keep]
        results.append([*outs, *derivatives(outs, inputs, given)])
    assert_all_close(*results)


def test_dropout_of_a_layer_norm_keeps_the_mean_and_the_seed_fixes_it():
    x, z = torch.zeros(500, 40), torch.ones(500, 40)
    s, _ = seeded(residual_layer_norm, z, x, None, None, 1e-5, 0.25)
    assert s.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert s.mean().item() == pytest.approx(1.0, abs=5 * (0.25 / 0.75 / s.numel()) ** 0.5)
    assert torch.equal(seeded(residual_layer_norm, z, x, None, None, 1e-5, 0.25)[0], s)
    state = torch.get_rng_state()
    assert torch.equal(residual_layer_norm(None, x, None, None, 1e-5, 0.25)[0], x)  # nothing to drop
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.skipif(select.unavailable_reason() is not None, reason="no C++ kernels")
def test_the_sum_two_numbers_a_row_and_a_seed_are_kept_of_a_layer_norm():
    z, x = (torch.randn(40, 48, requires_grad=True) for _ in range(2))
    with Live(nn.ParameterList([z, x])) as live:
        outs = residual_layer_norm(z, x, None, None, 1e-6, 0.1)
        assert live.nbytes == 2 * outs[0].nbytes + 2 * 40 * 4 + 8


def test_half_precision_keeps_its_dtype_in_a_layer_norm():
    for dtype in (torch.float32, torch.bfloat16):
        z, x = (torch.randn(4, 6, dtype=dtype) for _ in range(2))
        s, y = residual_layer_norm(z, x, None, None, 1e-6, 0.5)
        assert (s.dtype, y.dtype) == (dtype, dtype)


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_rows_of_a_table_of_first_and_second_order(setting, p, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    torch.manual_seed(0)
    z, table, weight, bias, dy = (torch.randn(s, requires_grad=True) for s in ((3, 4, 9), (5, 9), 9, 9, (3, 4, 9)))
    rows, results = torch.randint(0, 4, (3, 4)), []  # the last row is not there
    for given in ((table, rows), (F.embedding(rows, table), None)):
        s, y = seeded(lambda x, rows: residual_layer_norm(z, x, weight, bias, 1e-3, p, rows=rows), *given)
        results.append([s, y, *derivatives([y], [z, table, weight, bias], [dy])])
    assert_all_close(*results)
    assert results[0][3][4].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_a_table_does_not_have_are_an_error(dtype):
    with pytest.raises((IndexError, ValueError)):
        residual_layer_norm(torch.randn(2, 3).to(dtype), torch.randn(4, 3).to(dtype), None, None, 1e-5,
                            rows=torch.tensor([0, 4]))  # fmt: skip
