"""Activations, gated and not: derivatives of any order by kernel and by torch, dtypes, what is kept."""

import pytest
import torch
from torch import nn

from comera.kernels import select
from comera.ops.activations import ACTIVATIONS
from comera.ops.gated import activated, gated

from ...helpers.live import Live


def plain(g, u, activation):
    return ACTIVATIONS[activation][0](g) * u


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (2, 1, 3), ()], ids=str)
def test_gradients_of_first_and_second_order(activation, shape):
    torch.manual_seed(0)
    g, u = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda g, u: gated(g, u, activation), (g, u))
    assert torch.autograd.gradgradcheck(lambda g, u: gated(g, u, activation), (g, u))
    assert torch.autograd.gradcheck(lambda g: activated(g, activation), (g,))
    assert torch.autograd.gradgradcheck(lambda g: activated(g, activation), (g,))


@pytest.mark.parametrize("setting", ["all", "none"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_of_any_order_in_float32(activation, setting, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    torch.manual_seed(0)
    g, u, dh = (torch.randn(9, 33, requires_grad=True) for _ in range(3))
    results = []
    act = ACTIVATIONS[activation][0]
    for h, of in (
        (gated(g, u, activation), (g, u)),
        (plain(g, u, activation), (g, u)),
        (activated(g, activation), (g,)),
        (act(g), (g,)),
    ):
        first = torch.autograd.grad(h, of, dh, retain_graph=True)
        once = torch.autograd.grad(h, of, dh, create_graph=True)
        twice = torch.autograd.grad(sum(each.square().sum() for each in once), (*of, dh))
        results.append([h, *first, *once, *twice])
    for found, exact in zip([*results[0], *results[2]], [*results[1], *results[3]], strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_kernels_are_used_where_they_are_wanted(monkeypatch):
    if select.unavailable_reason() is not None:
        pytest.skip(f"no C++ kernels: {select.unavailable_reason()}")
    calls = []
    run = torch.ops.comera.gated.default
    monkeypatch.setattr("comera.ops.gated.cpp.gated", lambda *given: calls.append(given[0].dtype) or run(*given))
    g = torch.randn(3, 4)
    gated(g, g, "silu"), gated(g.double(), g.double(), "silu"), gated(g.bfloat16(), g.bfloat16(), "silu")
    monkeypatch.setenv("COMERA_KERNELS", "none")
    gated(g, g, "silu")
    assert calls == [torch.float32]
    calls.clear()
    for setting in ("none", "all"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        activated(g, "gelu"), activated(g.double(), "gelu"), activated(g.bfloat16(), "gelu")
    assert calls == [torch.float32]


def test_half_precision_is_as_exact_as_torch():
    torch.manual_seed(0)
    g, u = (torch.randn(40, 30).bfloat16().requires_grad_() for _ in range(2))
    h = gated(g, u, "silu")
    assert h.dtype == torch.bfloat16
    dh = torch.randn(40, 30).bfloat16()
    for found, same in zip(
        (h, *torch.autograd.grad(h, (g, u), dh)),
        (plain(g, u, "silu"), *torch.autograd.grad(plain(g, u, "silu"), (g, u), dh)),
        strict=True,
    ):
        torch.testing.assert_close(found, same)


def test_operands_that_differ_meet_as_in_torch():
    g, u = torch.randn(4, 5, requires_grad=True), torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gated(g, u, "gelu"), plain(g, u, "gelu"))


def test_gate_and_what_it_lets_through_are_all_that_is_kept():
    g, u = (torch.randn(40, 48, requires_grad=True) for _ in range(2))
    with Live(nn.ParameterList([g, u])) as live:
        h = gated(g, u, "gelu_tanh")
        assert live.nbytes == h.nbytes
    with Live(nn.ParameterList([g])) as live:
        h = activated(g, "gelu")
        assert live.nbytes == h.nbytes
    g.requires_grad_(False)
    (du,) = torch.autograd.grad(gated(g, u, "relu").sum(), u)
    torch.testing.assert_close(du, g.relu())


def test_an_unknown_activation_is_an_error():
    with pytest.raises(ValueError, match="expected an activation of gelu, gelu_tanh, relu, silu, got 'tanh'"):
        gated(torch.ones(2), torch.ones(2), "tanh")
    with pytest.raises(ValueError, match="expected an activation of gelu, gelu_tanh, relu, silu, got 'tanh'"):
        activated(torch.ones(2), "tanh")
