"""RMSNorm after a residual sum: derivatives of any order by kernel and by torch, dtypes, what is kept."""

import pytest
import torch
from torch import nn

from comera.kernels import select
from comera.ops.residual_norm import residual_rms_norm

from ...helpers.live import Live


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
        first = torch.autograd.grad(outs, inputs, given, retain_graph=True, allow_unused=True)
        once = torch.autograd.grad(outs, inputs, given, create_graph=True, allow_unused=True)
        penalty = sum(each.square().sum() for each in once if each is not None)
        twice = torch.autograd.grad(penalty, [*inputs, *given], allow_unused=True)
        results.append([*outs, *first, *once, *twice])
    for found, exact in zip(*results, strict=True):
        exact = torch.zeros_like(found) if exact is None and found is not None else exact
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


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
