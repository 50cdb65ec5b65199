"""Equation, network and derivatives of the recipe pinn, each against autograd in float64 or polynomials by hand."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comera.convert import tensorize_
from comera.recipes.pinn.equation import HJB, Derivatives, drawn_nodes, sparse_grid, stein_derivatives
from comera.recipes.pinn.model import PINN, Activation, CompressConfig, ModelConfig


def points(equation: HJB, count: int = 7) -> Tensor:
    return equation.points(count, torch.Generator().manual_seed(0)).double()


def by_autograd(function: Callable[[Tensor], Tensor], points_BI: Tensor) -> Derivatives:
    """Value, gradient and Laplacian in space, one second derivative after the other."""
    x_BI = points_BI.clone().requires_grad_()
    value_B = function(x_BI)
    (gradient_BI,) = torch.autograd.grad(value_B.sum(), x_BI, create_graph=True)
    second = [_derivative(gradient_BI[:, i].sum(), x_BI)[:, i] for i in range(x_BI.shape[1] - 1)]
    return Derivatives(value_B.detach(), gradient_BI.detach(), torch.stack(second).sum(0))


def _derivative(value: Tensor, x: Tensor) -> Tensor:
    if not value.requires_grad:  # of a linear function's gradient
        return torch.zeros_like(x)
    (found,) = torch.autograd.grad(value, x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if found is None else found


@pytest.mark.parametrize("dimension", [1, 3, 20])
def test_the_known_solution_solves_the_equation(dimension: int) -> None:
    equation = HJB(dimension)
    x_BI = points(equation)
    residual = equation.residual(by_autograd(equation.exact, x_BI))
    torch.testing.assert_close(residual, torch.zeros_like(residual), rtol=0, atol=1e-14)
    end_BI = x_BI.clone()
    end_BI[:, -1] = 1
    torch.testing.assert_close(equation.exact(end_BI), end_BI[:, :-1].sum(1), rtol=0, atol=1e-14)
    if dimension == 20:  # the source's coefficient
        u = by_autograd(lambda x: x[:, :-1].square().sum(1), x_BI)
        by_hand = 2 * 20 - 0.05 * 4 * x_BI[:, :-1].square().sum(1) + 2
        torch.testing.assert_close(equation.residual(u), by_hand, rtol=1e-12, atol=0)


def test_the_condition_at_the_end_holds_for_any_network_and_its_derivatives_are_those_of_autograd() -> None:
    equation = HJB(4)
    x_BI = points(equation)

    def f(x: Tensor) -> Tensor:
        return (x.sum(1) * x[:, 0]).sin()

    u = equation.derivatives(x_BI, by_autograd(f, x_BI))
    for found, expected in zip(u, by_autograd(lambda x: equation.solution(x, f(x)), x_BI), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    end_BI = x_BI.clone()
    end_BI[:, -1] = 1
    assert torch.equal(equation.solution(end_BI, f(end_BI)), equation.exact(end_BI))


@pytest.mark.parametrize("activation", ["sin", "tanh"])
@pytest.mark.parametrize("compressed", [False, True])
def test_derivatives_carried_forward_are_those_of_autograd(activation: Activation, compressed: bool) -> None:
    torch.manual_seed(0)
    equation = HJB(3)
    dense = PINN(ModelConfig(hidden=16, layers=3, activation=activation), equation).double()
    model = dense
    if compressed:
        tensorize_(model, CompressConfig(order=2, rank=2).tensorize())
        weights = {
            name: layer.weight.detach() for name, layer in enumerate(model.layers)
        }  # for a network of plain torch
        dense = PINN(ModelConfig(hidden=16, layers=3, activation=activation), equation).double()
        dense.load_state_dict(
            {**model.state_dict(), **{f"layers.{k}.weight": w for k, w in weights.items()}}, strict=False
        )
    x_BI = points(equation)
    found, expected = model.derivatives(x_BI), by_autograd(dense.network, x_BI)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    equation.residual(equation.derivatives(x_BI, found)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("dimension", "count"), [(2, 13), (21, 925), (1, 3), (4, 41)])
def test_the_sparse_grid_has_the_published_number_of_nodes(dimension: int, count: int) -> None:
    nodes, weights = sparse_grid(dimension)
    assert nodes.shape == (count - 1, dimension)  # the origin is left out
    assert len({tuple(node) for node in nodes.tolist()}) == count - 1
    assert nodes.any(1).all()
    assert weights.shape == (count - 1,)


@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_the_sparse_grid_integrates_polynomials_up_to_degree_five(dimension: int) -> None:
    nodes, weights = sparse_grid(dimension)

    def mean(*powers: int) -> float:
        values = torch.ones(len(nodes), dtype=torch.float64)
        for axis, power in enumerate(powers):
            values = values * nodes[:, axis] ** power
        return float(weights @ values)

    moments = {1: 0.0, 2: 1.0, 3: 0.0, 4: 3.0, 5: 0.0}
    for power, expected in moments.items():
        assert mean(power) == pytest.approx(expected, abs=1e-9)
    if dimension > 1:
        assert mean(2, 2) == pytest.approx(1.0, abs=1e-9)
        assert mean(1, 1) == mean(3, 2) == pytest.approx(0.0, abs=1e-9)


def test_stein_on_the_grid_is_exact_for_cubics_but_for_the_smoothing() -> None:
    sigma, x_BI = 0.3, points(HJB(4))
    nodes, weights = sparse_grid(5)

    def cubic(x: Tensor) -> Tensor:
        return x[:, 0] ** 3 + x[:, 1] * x[:, 2] * x[:, 4] + x[:, 3] ** 2 + 5 * x[:, 4] - 7

    found, exact = stein_derivatives(cubic, x_BI, nodes, weights, sigma), by_autograd(cubic, x_BI)
    smoothing_BI = torch.zeros_like(x_BI)
    smoothing_BI[:, 0] = 3 * sigma**2  # ∂₀ E (x₀ + σδ)³ = 3 x₀² + 3 σ²
    torch.testing.assert_close(found.value, exact.value, rtol=0, atol=0)
    torch.testing.assert_close(found.gradient, exact.gradient + smoothing_BI, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.laplacian, exact.laplacian, rtol=1e-8, atol=1e-8)


def test_stein_on_drawn_nodes_comes_near_as_far_as_its_variance_says() -> None:
    count, x_BI = 20_000, points(HJB(2), 3)
    slope = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    def function(x: Tensor) -> Tensor:
        return x @ slope + x[:, :-1].square().sum(1)

    nodes, weights = drawn_nodes(3, count, torch.Generator().manual_seed(1))
    assert torch.equal(nodes[: count // 2], -nodes[count // 2 :])
    found, exact = stein_derivatives(function, x_BI, nodes.double(), weights.double(), 0.5), by_autograd(function, x_BI)
    # of a linear function g, a draw δ δᵀg has variances up to 2‖g‖²; of ‖δ‖² (‖δ‖² − 2) in two dimensions, 64
    tolerance = 5 * math.sqrt(2 * float(exact.gradient.square().sum(1).max()) / (count / 2))
    torch.testing.assert_close(found.gradient, exact.gradient, rtol=0, atol=tolerance)
    torch.testing.assert_close(found.laplacian, exact.laplacian, rtol=0, atol=5 * math.sqrt(64 / (count / 2)))


def test_in_float32_derivatives_are_off_by_no_more_than_rounding() -> None:
    torch.manual_seed(0)
    sigma, equation = 0.1, HJB(20)
    model = PINN(ModelConfig(hidden=32, layers=2), equation)
    nodes, weights = sparse_grid(equation.inputs)
    x_BI = points(equation)
    with torch.no_grad():
        single = stein_derivatives(model.network, x_BI.float(), nodes.float(), weights.float(), sigma)
        double = stein_derivatives(model.double().network, x_BI.float().double(), nodes, weights, sigma)
        exact = model.derivatives(x_BI.float().double())
    rounding = 4 * torch.finfo(torch.float32).eps * float(double.value.abs().max())  # of a value of a small network
    factors = weights * (nodes[:, :-1].square().sum(1) - 20)
    spread = rounding * float(factors.norm()) / sigma**2  # of roundings that do not know of each other
    torch.testing.assert_close(single.laplacian.double(), double.laplacian, rtol=0, atol=5 * spread)
    torch.testing.assert_close(double.laplacian, exact.laplacian, rtol=0, atol=sigma**2)
    torch.testing.assert_close(double.gradient, exact.gradient, rtol=0, atol=sigma**2)
