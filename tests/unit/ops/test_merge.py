"""Batched merges of tensor trains against each train merged by the dense formula."""

from math import prod

import pytest
import torch
from torch import Tensor

from comera.ops.low_rank import LowRankFactors
from comera.ops.merge import merge
from comera.tt.dense import absorb
from comera.tt.dense import merge as product
from comera.tt.shapes import tt_spec
from comera.tt.spec import TTSpec

SPECS = [
    TTSpec(in_modes=(2, 3), out_modes=(4,), ranks=(1, 2, 3, 1), in_features=6, out_features=4),
    TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=(1, 2, 1, 2, 1), in_features=5, out_features=6),
    TTSpec(in_modes=(4,), out_modes=(5,), ranks=(1, 3, 1), in_features=3, out_features=4),
    TTSpec(in_modes=(2, 2), out_modes=(3, 2), ranks=(1, 2, 0, 2, 1), in_features=4, out_features=6),
    tt_spec(24, 30, order=6, rank=4),
]
THRESHOLD = 0.5


def trains_of(spec: TTSpec, count: int = 3, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    torch.manual_seed(0)
    cores = [[torch.randn(shape, dtype=dtype) for shape in spec.core_shapes] for _ in range(count)]
    # some gates at or below the threshold, negative ones too
    gates = [[torch.rand(rank, dtype=dtype) * 2 - 0.3 for rank in spec.inner_ranks] for _ in range(count)]
    return [[t.requires_grad_() for t in (*c, *d)] for c, d in zip(cores, gates, strict=True)]


def oracle(spec: TTSpec, train: list[Tensor], dtype: torch.dtype) -> LowRankFactors:
    cores, gates = train[: spec.order], train[spec.order :]
    wide = torch.promote_types(train[0].dtype, torch.float32)
    absorbed = [g.to(wide) for g in absorb(cores, [torch.where(d > THRESHOLD, d, torch.zeros_like(d)) for d in gates])]
    rank = spec.ranks[spec.split]
    a = product(absorbed[: spec.split]).reshape(prod(spec.in_modes), rank)
    b = product(absorbed[spec.split :]).reshape(rank, prod(spec.out_modes))
    return LowRankFactors(a[: spec.in_features].t().to(dtype), b[:, : spec.out_features].to(dtype))


def summed(factors: list[LowRankFactors]) -> Tensor:
    """A number that depends on every element differently."""
    flat = torch.cat([factor.flatten() for pair in factors for factor in pair])
    return (flat * torch.linspace(-1, 2, flat.numel(), dtype=flat.dtype)).sum()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_factors_and_gradients_are_those_of_the_dense_formula(spec: TTSpec) -> None:
    given = trains_of(spec)
    leaves = [tensor for train in given for tensor in train]
    merged = merge([spec] * len(given), given, THRESHOLD, torch.float64)
    exact = [oracle(spec, train, torch.float64) for train in given]
    torch.testing.assert_close(merged, exact, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(summed(merged), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(summed(exact), leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "ranks", [[(1, 2, 3, 2, 1), (1, 1, 4, 1, 1)], [(1, 2, 0, 2, 1), (1, 2, 5, 0, 1), (1, 2, 2, 2, 1)]]
)
def test_trains_of_other_ranks_are_filled_up(ranks: list[tuple[int, ...]]) -> None:
    specs = [TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=r, in_features=5, out_features=6) for r in ranks]
    given = [trains_of(spec, count=1)[0] for spec in specs]
    leaves = [tensor for train in given for tensor in train]
    merged = merge(specs, given, THRESHOLD, torch.float64)
    exact = [oracle(spec, train, torch.float64) for spec, train in zip(specs, given, strict=True)]
    torch.testing.assert_close(merged, exact, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(summed(merged), leaves)
    torch.testing.assert_close(found, torch.autograd.grad(summed(exact), leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_bias_is_the_first_row_of_its_b(dtype: torch.dtype) -> None:
    ranks = [(1, 2, 3, 2, 1), (1, 1, 4, 1, 1), (1, 2, 0, 2, 1)]
    specs = [TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=r, in_features=5, out_features=6) for r in ranks]
    given = [trains_of(spec, count=1, dtype=dtype)[0] for spec in specs]
    biases = [torch.randn(6, dtype=dtype, requires_grad=True), None, torch.randn(6, dtype=dtype, requires_grad=True)]
    merged = merge(specs, given, THRESHOLD, torch.float64, biases)
    exact = []
    for spec, train, bias in zip(specs, given, biases, strict=True):
        a, b = oracle(spec, train, torch.float64)
        exact.append((a, b if bias is None else torch.cat([bias.double().unsqueeze(0), b])))
    torch.testing.assert_close(merged, exact)
    leaves = [tensor for train in given for tensor in train] + [bias for bias in biases if bias is not None]
    found = torch.autograd.grad(summed(merged), leaves, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(summed(exact), leaves))
    (dbias,) = torch.autograd.grad(summed(merged[:1]), biases[:1])
    assert dbias.untyped_storage().nbytes() == dbias.nbytes  # not a view that keeps the gradient of B


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_derivatives_are_right_twice(spec: TTSpec) -> None:
    given = trains_of(spec, count=2)
    with torch.no_grad():  # away from the threshold, where the mask jumps
        for train in given:
            for d in train[spec.order :]:
                d[(d - THRESHOLD).abs() < 1e-2] = 1.0
    leaves = [tensor for train in given for tensor in train]

    bias = torch.randn(spec.out_features, dtype=torch.float64, requires_grad=True)

    def factors(bias: Tensor, *flat: Tensor) -> tuple[Tensor, ...]:
        width = len(flat) // 2
        made = merge([spec, spec], [flat[:width], flat[width:]], THRESHOLD, torch.float64, [None, bias])
        return tuple(factor for pair in made for factor in pair)

    assert torch.autograd.gradcheck(factors, (bias, *leaves))
    assert torch.autograd.gradgradcheck(factors, (bias, *leaves))


def test_trains_that_nothing_asked_for_get_no_gradient() -> None:
    spec = SPECS[1]
    first, second, third = given = trains_of(spec)
    (a, _), _, (_, b) = merge([spec] * len(given), given, THRESHOLD, torch.float64)
    (a.square().sum() + b.sum()).backward()
    assert all(tensor.grad is not None for tensor in (*first, *third))
    assert all(tensor.grad is None for tensor in second)
    exact = [oracle(spec, train, torch.float64) for train in (first, third)]
    wanted = torch.autograd.grad(exact[0][0].square().sum() + exact[1][1].sum(), [*first, *third], allow_unused=True)
    for tensor, grad in zip((*first, *third), wanted, strict=True):
        torch.testing.assert_close(tensor.grad, torch.zeros_like(tensor) if grad is None else grad)


def test_each_of_several_losses_may_go_back_by_itself() -> None:
    spec = SPECS[4]
    given = trains_of(spec, count=2)
    factors = merge([spec] * len(given), given, THRESHOLD, torch.float64)
    for pair in factors:
        summed([pair]).backward()
    exact = [oracle(spec, train, torch.float64) for train in given]
    for train, pair in zip(given, exact, strict=True):
        wanted = torch.autograd.grad(summed([pair]), train)
        torch.testing.assert_close([tensor.grad for tensor in train], list(wanted))


def test_what_is_frozen_gets_no_gradient() -> None:
    spec = SPECS[1]
    given = trains_of(spec, count=2)
    for d in given[0][spec.order :]:
        d.requires_grad_(False)
    summed(merge([spec] * len(given), given, THRESHOLD, torch.float64)).backward()
    assert [tensor.grad is not None for tensor in given[0]] == [True] * spec.order + [False] * (spec.order - 1)
    assert all(tensor.grad is not None for tensor in given[1])


@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_trains_made_in_inference_mode_are_merged(spec: TTSpec) -> None:
    with torch.inference_mode():
        given = trains_of(spec)
        merged = merge([spec] * len(given), given, THRESHOLD, torch.float64)
    with torch.no_grad():
        again = merge([spec] * len(given), given, THRESHOLD, torch.float64)
        exact = [oracle(spec, train, torch.float64) for train in given]
    torch.testing.assert_close(merged, exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, exact, rtol=1e-12, atol=1e-12)


def test_writes_are_noticed_beside_tensors_that_do_not_count_them() -> None:
    spec = SPECS[1]
    (train,) = trains_of(spec, count=1)
    with torch.inference_mode():
        (other,) = trains_of(spec, count=1)
    merged = merge([spec], [[other[0], *train[1:]]], THRESHOLD, torch.float64)
    with torch.no_grad():
        train[1].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* is at version 1; expected version 0"):
        summed(merged).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_merged_in_float32(dtype: torch.dtype) -> None:
    spec = SPECS[4]
    given = trains_of(spec, dtype=dtype)
    leaves = [tensor for train in given for tensor in train]
    merged = merge([spec] * len(given), given, THRESHOLD, dtype)
    exact = [oracle(spec, train, dtype) for train in given]
    torch.testing.assert_close(merged, exact)
    found = torch.autograd.grad(summed(merged), leaves)
    assert all(grad.dtype == dtype for grad in found)
    torch.testing.assert_close(found, torch.autograd.grad(summed(exact), leaves), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("backward_in_autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_does_not_reach_the_merge(dtype: torch.dtype, backward_in_autocast: bool) -> None:
    spec = tt_spec(24, 30, order=6, rank=4)
    given = trains_of(spec, dtype=torch.float32)
    leaves = [tensor for train in given for tensor in train]
    plain = merge([spec] * len(given), given, THRESHOLD, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        merged = merge([spec] * len(given), given, THRESHOLD, dtype)
    assert all(
        torch.equal(one, two) for pair in zip(merged, plain, strict=True) for one, two in zip(*pair, strict=True)
    )
    loss = summed(merged)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward_in_autocast):
        found = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(*pair) for pair in zip(found, torch.autograd.grad(summed(plain), leaves), strict=True))


def test_a_tensor_that_was_modified_since_is_refused_and_named() -> None:
    spec = SPECS[1]
    given = trains_of(spec, count=2)
    loss = summed(merge([spec] * 2, given, THRESHOLD, torch.float64))
    with torch.no_grad():
        given[1][2].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* expected version 0"):
        loss.backward()
