"""Gradients from forward passes: their mean and variance against theory, directions that come again, and no traces.

A square's two-point difference is exact, so that nothing but the variance stands between estimate and gradient.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import comera
from comera.errors import ConfigError
from comera.optim import ZerothOrder, adaptive_queries
from comera.rank.prune import prune_

SIZES = ((3, 5), (4,), (2, 2, 3))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def squares(scales: tuple[float, ...] = (1.0, 1.0, 1.0)) -> tuple[list[Tensor], Callable[[], Tensor], list[Tensor]]:
    """Parameters, a quadratic loss of all of them, and its gradient."""
    params = [drawn(*shape, seed=k).mul_(scale) for k, (shape, scale) in enumerate(zip(SIZES, scales, strict=True))]
    params = [p.requires_grad_() for p in params]

    def loss() -> Tensor:
        return torch.stack([p.square().sum() for p in params]).sum()

    return params, loss, [2 * p.detach() for p in params]


def compressed(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 2))
    comera.tensorize_(model, comera.TensorizeConfig(comera.TT(order=4, rank=3), overrides={"3": None}))
    return model


def errors(estimator: ZerothOrder, loss: Callable[[], Tensor], exact: list[Tensor], count: int) -> Tensor:
    """Estimate minus gradient, (count, elements)."""
    rows = []
    for _ in range(count):
        estimator.estimate(loss)
        rows.append(torch.cat([(p.grad - g).flatten() for p, g in zip(estimator.parameters, exact, strict=True)]))  # type: ignore[operator]
    return torch.stack(rows)


def variance(gradients: list[Tensor], queries: int, layout: str) -> float:
    """E‖g − ∇L‖² by the module's formula."""
    blocks = gradients if layout == "tensors" else [torch.cat([g.flatten() for g in gradients])]
    return sum((g.numel() - 1) * float(g.square().sum()) for g in blocks) / queries


@pytest.mark.parametrize("layout", ["whole", "tensors"])
@pytest.mark.parametrize("queries", [1, 4])
def test_the_mean_is_the_gradient_and_the_variance_as_predicted(layout: str, queries: int) -> None:
    params, loss, exact = squares()
    count = 2000
    wrong = errors(ZerothOrder(params, queries=queries, layout=layout, eps=1e-2, seed=7), loss, exact, count)  # type: ignore[arg-type]
    of_the_mean = variance(exact, queries, layout) / count
    # ‖mean error‖² has about this expectation; five times it is far beyond its spread over 31 elements
    assert float(wrong.mean(0).square().sum()) < 5 * of_the_mean
    # a mean of 2000 draws whose standard deviation is at most a few times their mean
    assert float(wrong.square().sum(1).mean()) == pytest.approx(variance(exact, queries, layout), rel=0.15)


def test_one_tensor_at_a_time_has_less_variance_also_at_equal_passes() -> None:
    params, loss, exact = squares((0.05, 0.05, 1.0))  # of which one tensor has nearly all the gradient
    whole, tensors = ZerothOrder(params, queries=3), ZerothOrder(params, layout="tensors")
    assert whole.evaluations == tensors.evaluations == 6
    spread = {each.layout: float(errors(each, loss, exact, 500).square().sum(1).mean()) for each in (whole, tensors)}
    assert variance(exact, 1, "tensors") < 0.5 * variance(exact, 1, "whole")  # at equal queries
    assert spread["tensors"] < 1.2 * variance(exact, 1, "tensors")
    params, loss, exact = squares((0.05, 1.0, 0.05))  # the smallest
    whole, tensors = ZerothOrder(params, queries=3), ZerothOrder(params, layout="tensors")
    spread = {each.layout: float(errors(each, loss, exact, 500).square().sum(1).mean()) for each in (whole, tensors)}
    assert spread["tensors"] < 0.5 * spread["whole"]  # at equal passes


@pytest.mark.parametrize("layout", ["whole", "tensors"])
def test_cores_are_estimated_and_come_back_to_the_bit(layout: str) -> None:
    model = compressed()
    x = drawn(16, 12, seed=9).float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    estimator = ZerothOrder(model.parameters(), queries=2, layout=layout)  # type: ignore[arg-type]
    seen: list[bool] = []

    def loss() -> Tensor:
        seen.append(torch.is_grad_enabled())
        return model(x).square().mean()

    value = estimator.estimate(loss)
    assert seen == [False] * (4 if layout == "whole" else 4 * len(before))
    assert not value.requires_grad
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
        assert p.grad is not None
        assert p.grad.any()
    model(x).square().mean().backward()  # parameters are leaves as before, and the layer's caches are not stale
    torch.testing.assert_close(value, model(x).square().mean().detach(), rtol=1e-2, atol=0)


def test_a_difference_in_float64_meets_backward_along_its_direction() -> None:
    model = compressed().double()
    x = drawn(16, 12, seed=9)
    estimator = ZerothOrder(model.parameters(), eps=1e-4)
    estimator.estimate(lambda: model(x).square().mean())
    estimated = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(x).square().mean().backward()
    slope = estimated[0].flatten()[0].abs()
    along = sum(
        ((p.grad * g.sign()).sum() for p, g in zip(model.parameters(), estimated, strict=True)), start=x.new_zeros(())
    )  # type: ignore[operator]
    torch.testing.assert_close(along.abs(), slope, rtol=1e-5, atol=1e-9)
    assert all(torch.equal(g.abs(), slope.expand_as(g)) for g in estimated)  # signs times one slope


def test_estimates_depend_on_seed_and_step_alone_and_resume() -> None:
    def run(steps: int, estimator: ZerothOrder, params: list[Tensor]) -> None:
        for _ in range(steps):
            estimator.estimate(lambda: torch.stack([p.square().sum() for p in params]).sum())
            with torch.no_grad():
                for p in params:
                    p -= 1e-3 * p.grad  # type: ignore[operator]

    (one, *_), (two, *_), (three, *_) = squares(), squares(), squares()
    whole = ZerothOrder(one, seed=3)
    run(6, whole, one)
    first = ZerothOrder(two, seed=3)
    run(4, first, two)
    torch.rand(3)  # nothing else draws from it
    second = ZerothOrder(two, seed=0)
    second.load_state_dict(first.state_dict())
    run(2, second, two)
    assert all(map(torch.equal, one, two))
    assert second.state_dict() == whole.state_dict() == {"seed": 3, "step": 6}
    run(6, ZerothOrder(three, seed=4), three)
    assert not any(map(torch.equal, one, three))


def test_dropout_is_the_same_in_all_evaluations_and_goes_on_as_after_one() -> None:
    model = compressed(dropout=0.5).train()
    x = drawn(16, 12, seed=9).float()
    values: list[Tensor] = []

    def loss() -> Tensor:
        values.append(model(x).square().mean())
        return values[-1]

    torch.manual_seed(5)
    ZerothOrder(model.parameters(), eps=1e-6, queries=3).estimate(loss)
    after = torch.rand(4)
    torch.testing.assert_close(torch.stack(values), values[0].expand(6), rtol=1e-3, atol=0)
    torch.manual_seed(5)
    loss()
    assert torch.equal(torch.rand(4), after)


def test_the_surrogate_gives_backward_the_estimate() -> None:
    model = compressed()
    x = drawn(16, 12, seed=9).float()
    one, two = (ZerothOrder(model.parameters(), queries=2, seed=1) for _ in range(2))
    value = one.estimate(lambda: model(x).square().mean())
    estimated = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss = two.surrogate(lambda: model(x).square().mean())
    assert torch.equal(loss, value)
    (3 * loss).backward()
    for p, gradient in zip(model.parameters(), estimated, strict=True):
        torch.testing.assert_close(p.grad, 3 * gradient, rtol=1e-6, atol=0)  # type: ignore[operator]


def test_a_closure_that_fails_leaves_the_parameters() -> None:
    params, _, exact = squares()

    def fails() -> Tensor:
        raise RuntimeError("no light")

    with pytest.raises(RuntimeError, match="no light"):
        ZerothOrder(params).estimate(fails)
    assert all(torch.equal(2 * p, g) for p, g in zip(params, exact, strict=True))
    with pytest.raises(ConfigError, match=r"returns a scalar, got shape \(2,\)"):
        ZerothOrder(params).estimate(lambda: torch.zeros(2))


def test_frozen_parameters_stay_out_and_old_gradients_go() -> None:
    params, loss, _ = squares()
    params[1].requires_grad_(False)
    params[0].grad = torch.full_like(params[0], 1e9)
    estimator = ZerothOrder([*params, params[0]])
    estimator.estimate(loss)
    assert len(estimator.parameters) == 2
    assert params[1].grad is None
    assert params[0].grad.abs().max() < 1e6


def test_ranks_may_fall_between_estimates() -> None:
    model = compressed()
    estimator = ZerothOrder(model.parameters())
    with torch.no_grad():
        next(iter(model[0].tt.rank_params))[0] = 0.0  # type: ignore[union-attr]
    before = comera.model_size(model).total
    assert prune_(model).changed
    assert comera.model_size(model).total < before
    estimator.estimate(lambda: model(torch.ones(2, 12)).sum())
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_queries_grow_with_the_epochs_up_to_the_most() -> None:
    # min(max(⌊0.8 · e^0.6⌋, 1), 5), by hand: 0.8 · (0, 1, 1.52, …, 10^0.6 = 3.98, 20^0.6 = 6.03, 30^0.6 = 7.70)
    found = [adaptive_queries(epoch, alpha=0.8, beta=0.6, maximum=5) for epoch in (0, 1, 2, 10, 20, 30)]
    assert found == [1, 1, 1, 3, 4, 5]
    assert [adaptive_queries(epoch, alpha=3, beta=0, maximum=9) for epoch in (0, 5)] == [3, 3]
    for wrong in ({"epoch": -1}, {"alpha": 0}, {"beta": -0.1}, {"maximum": 0}):
        with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} must be"):
            adaptive_queries(**{"epoch": 1, "alpha": 1.0, "beta": 0.5, "maximum": 4, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"eps": 0.0}, {"queries": 0}, {"queries": 1.5}, {"layout": "cores"}])
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    params, loss, _ = squares()
    with pytest.raises(ConfigError, match=rf"{next(iter(wrong))} must be"):
        ZerothOrder(params, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="parameters that require gradients, got none"):
        ZerothOrder([torch.ones(2)])
    estimator = ZerothOrder(params)
    estimator.queries = 0
    with pytest.raises(ConfigError, match="queries must be an integer >= 1, got 0"):
        estimator.estimate(loss)
