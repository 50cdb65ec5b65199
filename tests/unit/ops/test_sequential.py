"""Groups of cores absorbed one after the other: every partition against the float64 dense oracle, all gradients."""

import itertools

import pytest
import torch

from comera.ops.dtypes import product, widens
from comera.ops.linear import tt_linear
from comera.ops.planner.cost import CPU
from comera.ops.planner.groups import Group
from comera.ops.planner.plan import plan_linear
from comera.ops.planner.search import GroupSearch
from comera.ops.sequential import contract_groups
from comera.tt.spec import TTSpec

from ...helpers.oracle import operands, oracle, second_derivatives, signal_to_noise, values_and_gradients
from ...helpers.specs import tt

SPECS = [
    tt((4,), (5,), 3),
    tt((3,), (2, 3, 2), 4),
    tt((2, 3, 2, 3), (4,), 3, pad_in=5),
    tt((3, 4, 2), (2, 4), 1, pad_in=1, pad_out=3),
    tt((2, 3), (3, 2, 2), 5, pad_out=2),
    tt((3, 4), (5, 2), 0),
    TTSpec(12, 10, (3, 4), (5, 2), (1, 0, 2, 2, 1)),
    TTSpec(12, 10, (3, 4), (5, 2), (1, 2, 2, 0, 1)),
    TTSpec(12, 10, (3, 4), (5, 2), (1, 2, 0, 2, 1)),
]


def all_groups(spec):
    """Every partition, its groups merged in the cheapest order."""
    search = GroupSearch(spec, 8, 4, CPU)
    for cuts in itertools.product([False, True], repeat=spec.order - 1):
        ends = (*(k + 1 for k, cut in enumerate(cuts) if cut), spec.order)
        yield search.price(ends)[0]


CASES = [(spec, groups) for spec in SPECS for groups in all_groups(spec)]


def group(tree):
    """A group from nested pairs: ((0, 1), 2) merges cores 0 and 1, then core 2."""
    return Group.of(*map(group, tree)) if isinstance(tree, tuple) else Group.of(tree)


def by(spec, groups):
    return lambda x, bias, *cores: contract_groups(x, spec, cores, groups, bias)


def by_trees(spec, trees):
    return by(spec, [group(tree) for tree in trees])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("batch", [0, 1, 7])
@pytest.mark.parametrize(("spec", "groups"), CASES, ids=str)
def test_every_partition_agrees_with_the_dense_oracle(spec, groups, batch, bias):
    tensors = operands(spec, (batch,), bias=bias)
    found = values_and_gradients(by(spec, groups), tensors)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    assert found[0].is_contiguous()


@pytest.mark.parametrize(("spec", "groups"), CASES, ids=str)
def test_second_derivatives_are_those_of_the_oracle(spec, groups):
    tensors = operands(spec, (2,))
    found = second_derivatives(by(spec, groups), tensors)
    exact = second_derivatives(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    spec, groups = CASES[-1]
    assert torch.autograd.gradcheck(by(spec, groups), operands(spec, (2,)), fast_mode=True)
    assert torch.autograd.gradgradcheck(by(spec, groups), operands(spec, (2,)), fast_mode=True)


@pytest.mark.parametrize("trees", [((0, (1, 2)), ((3, 4), 5)), (((0, 1), (2, 3)), (4, 5)), (0, ((1, 2), 3), 4, 5)])
def test_any_order_of_merging_gives_the_same(trees):
    spec = tt((2, 3, 2), (3, 2, 2), 4)
    tensors = operands(spec, (5,))
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(values_and_gradients(by_trees(spec, trees), tensors), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ends", [(2, 4), (1, 3, 4), (4,), (3, 4), (1, 4)])
def test_tt_linear_runs_the_groups_of_a_plan(ends):
    spec = tt((3, 4), (5, 2), 3, pad_in=2)
    x, bias, *cores = operands(spec, (8,))
    plan = plan_linear(spec, 8).using(ends)
    y = tt_linear(x.view(2, 4, 10), spec, cores, bias, plan=plan)
    torch.testing.assert_close(y, oracle(spec, x, bias, *cores).view(2, 4, 10), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
@pytest.mark.parametrize("trees", [(0, 1, 2, 3), ((0, 1), 2, 3), (0, (1, 2), 3), (((0, 1), (2, 3)),)], ids=str)
def test_non_contiguous_input(trees, layout):
    spec = tt((3, 4), (5, 2), 3)
    x, bias, *cores = operands(spec, (6,))
    x = x.detach()
    view = {
        "transposed": x.t().contiguous().t(),
        "strided": torch.cat([x, x], dim=1)[:, : spec.in_features],
        "expanded": x[:1].expand(6, -1),
    }[layout].requires_grad_()
    tensors = [view, bias, *cores]
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(values_and_gradients(by_trees(spec, trees), tensors), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("units", [True, False], ids=["half-units", "no-half-units"])
@pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 45), (torch.float16, 63)])
@pytest.mark.parametrize("trees", [(0, 1, 2, 3), ((0, 1), (2, 3)), (0, (1, 2), 3), (((0, 1), (2, 3)),)], ids=str)
def test_half_precision_keeps_the_signal(trees, dtype, decibels, units, monkeypatch):
    monkeypatch.setattr("comera.ops.dtypes._half_units", lambda dtype: units)
    spec = tt((8, 12), (16, 6), 12, pad_in=2, pad_out=2)
    low = operands(spec, (64,), dtype=dtype)
    double = [t.detach().double().requires_grad_() for t in low]
    found = values_and_gradients(by_trees(spec, trees), low, rounded=dtype)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), double, rounded=dtype)
    assert widens(low[0]) != units
    assert [t.dtype for t in found] == [dtype] * len(found)
    assert min(signal_to_noise(a, b) for a, b in zip(found, exact, strict=True)) > decibels


def test_widened_product_rounds_once_and_keeps_half_precision_operands(monkeypatch):
    monkeypatch.setattr("comera.ops.dtypes._half_units", lambda dtype: False)
    a, b = (torch.randn(s, dtype=torch.float64).bfloat16().requires_grad_() for s in ((9, 40), (40, 7)))
    bias = torch.randn(7).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = product(a, b, bias)
    assert torch.equal(y, (a.float() @ b.float() + bias.float()).bfloat16())
    assert {t.dtype for t in kept} == {torch.bfloat16}
    assert sum(t.numel() for t in kept) == a.numel() + b.numel()


def test_widened_product_gives_only_the_wanted_gradients(monkeypatch):
    monkeypatch.setattr("comera.ops.dtypes._half_units", lambda dtype: False)
    a, b, bias = (torch.randn(s).bfloat16() for s in ((3, 4), (4, 5), (5,)))
    for wanted in (a, b, bias):
        wanted.requires_grad_()
        product(a, b, bias).sum().backward()
        assert [t.grad is not None for t in (a, b, bias)] == [t is wanted for t in (a, b, bias)]
        wanted.requires_grad_(False).grad = None


def test_single_and_double_precision_are_never_widened():
    assert not widens(torch.zeros(1))
    assert not widens(torch.zeros(1, dtype=torch.float64))
    assert not widens(torch.zeros(1, dtype=torch.bfloat16, device="meta"))
