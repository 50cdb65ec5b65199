"""tt_linear against the float64 dense oracle: every strategy, all gradients, precisions, shapes and errors."""

import pytest
import torch

from comera.errors import SpecError
from comera.ops.block_product import btt_linear
from comera.ops.linear import tt_linear
from comera.ops.planner.plan import plan_linear
from comera.tt.dense import materialize
from comera.tt.spec import TTSpec

from ...helpers.oracle import operands, oracle, second_derivatives, signal_to_noise, values_and_gradients
from ...helpers.specs import btt, force, tt

STRATEGIES = ["low_rank", "sequential", "dense"]


SPECS = [
    tt((4,), (5,), 3),
    tt((3,), (2, 3, 2), 4),
    tt((2, 2, 2, 3, 2), (3, 2), 3, pad_in=5),
    tt((3, 4, 2), (2, 4, 3), 1, pad_in=1, pad_out=3),
    tt((2, 2, 2, 2), (2, 2, 2, 2), 5),
    tt((3, 4), (5, 2), 0),
    TTSpec(12, 10, (3, 4), (5, 2), (1, 0, 2, 2, 1)),
    TTSpec(12, 10, (3, 4), (5, 2), (1, 2, 2, 0, 1)),
]


BLOCKS = [
    btt((1, 4), (1, 5), 3),
    btt((3, 4), (5, 2), 2, pad_in=5, pad_out=3),
    btt((2, 3), (3, 4), [2, 0, 3, 1, 0, 0], pad_in=1),
    btt((3, 1), (1, 4), [0, 1, 1]),
    btt((2, 3), (3, 4), 0),
]
EVERY = [*((spec, strategy) for spec in SPECS for strategy in STRATEGIES), *((spec, "blocks") for spec in BLOCKS)]
# one of each for the tests of precisions
WAYS = [*((tt((6, 8, 4), (4, 8, 6), 20), strategy) for strategy in STRATEGIES)]
WAYS += [(btt((12, 16), (16, 12), 3), "blocks"), (btt((12, 16), (16, 12), [3, 1, 0, 4] * 48), "blocks")]


@pytest.mark.parametrize(("spec", "strategy"), EVERY, ids=str)
@pytest.mark.parametrize("lead", [(), (1,), (7,), (0,), (2, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_agrees_with_the_dense_oracle(spec, strategy, lead, bias):
    tensors = operands(spec, lead, bias=bias)
    found = values_and_gradients(force(spec, strategy), tensors)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("spec", "strategy"), EVERY, ids=str)
def test_second_derivatives_are_those_of_the_oracle(spec, strategy):
    tensors = operands(spec, (2,))
    found = second_derivatives(force(spec, strategy), tensors)
    exact = second_derivatives(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_full_gradcheck_of_the_halves():
    assert torch.autograd.gradcheck(force(SPECS[1], "low_rank"), operands(SPECS[1], (3,)))


@pytest.mark.parametrize(
    ("spec", "strategy"),
    [*((tt((12, 8, 8), (8, 8, 12), 30), strategy) for strategy in STRATEGIES), (btt((24, 32), (32, 24), 2), "blocks")],
    ids=str,
)
def test_float32_agrees_to_four_digits(spec, strategy):
    single = operands(spec, (64,), dtype=torch.float32)
    double = [t.detach().double().requires_grad_() for t in single]
    dy = torch.randn(64, 768, generator=torch.Generator().manual_seed(1))
    found = values_and_gradients(force(spec, strategy), single, dy)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), double, dy.double())
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * b.detach().abs().mean().item())


@pytest.mark.parametrize(("spec", "strategy"), WAYS, ids=str)
@pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 45), (torch.float16, 63)])
def test_low_precision_keeps_the_signal(spec, strategy, dtype, decibels):
    low = operands(spec, (64,), dtype=dtype)
    double = [t.detach().double().requires_grad_() for t in low]
    dy = torch.randn(64, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = values_and_gradients(force(spec, strategy), low, dy)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), double, dy.double())
    assert all(t.dtype == dtype for t in found)
    assert min(signal_to_noise(a, b) for a, b in zip(found, exact, strict=True)) > decibels


def test_merging_of_half_precision_cores_runs_in_float32():
    spec = tt((6, 8, 4), (4, 8, 6), 20)
    low = operands(spec, (64,), dtype=torch.bfloat16)
    exact = oracle(spec, *[t.detach().double() for t in low])
    merged_in_bfloat16 = low[0] @ materialize(spec, low[2:]) + low[1]
    found = force(spec, "dense")(*low)
    assert signal_to_noise(found, exact) > signal_to_noise(merged_in_bfloat16, exact) + 3


@pytest.mark.parametrize(("spec", "strategy"), WAYS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_touches_only_the_products_with_the_batch(spec, strategy, dtype):
    tensors = operands(spec, (2, 16), dtype=torch.float32)
    linear = torch.nn.Linear(192, 192)
    with torch.autocast("cpu", dtype=dtype):
        y = force(spec, strategy)(*tensors)
        assert y.dtype == linear(tensors[0]).dtype == dtype
    y.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in tensors)
    exact = oracle(spec, *[t.detach().double() for t in tensors])
    assert signal_to_noise(y, exact) > (43 if dtype == torch.bfloat16 else 61)


def test_autocast_merges_the_cores_in_their_own_dtype():
    spec = tt((4, 4), (4, 4), 4)
    x, bias, *cores = operands(spec, (8,), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tt_linear(x, spec, cores, bias, plan=plan_linear(spec, 8).using("dense"))
    weight = materialize(spec, cores).to(torch.bfloat16)  # rounded once
    assert torch.equal(found, torch.addmm(bias.to(torch.bfloat16), x.to(torch.bfloat16), weight))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_inside_autocast_keeps_precision(strategy):
    spec = tt((4, 4), (4, 4), 4)
    tensors = operands(spec, (8,), dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = values_and_gradients(force(spec, strategy), tensors)
    y = inside[0]
    assert y.dtype == torch.bfloat16
    assert [g.dtype for g in inside[1:]] == [torch.float32] * len(tensors)


def test_float64_is_left_alone_by_autocast():
    spec = SPECS[2]
    tensors = operands(spec, (4,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = force(spec, "low_rank")(*tensors)
    torch.testing.assert_close(y, oracle(spec, *tensors), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("spec", "strategy"), [(SPECS[3], strategy) for strategy in STRATEGIES] + [(spec, "blocks") for spec in BLOCKS[1:3]]
)
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_non_contiguous_input_and_gradient(spec, strategy, layout):
    x, bias, *cores = operands(spec, (6,))
    x = x.detach()
    view = {
        "transposed": x.t().contiguous().t(),
        "strided": torch.cat([x, x], dim=1)[:, : spec.in_features],
        "expanded": x[:1].expand(6, -1),
    }[layout].requires_grad_()
    dy = torch.ones(1, 1, dtype=torch.float64).expand(6, spec.out_features)
    found = values_and_gradients(force(spec, strategy), [view, bias, *cores], dy)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), [view, bias, *cores], dy)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("frozen", [0, 1, 2, 3, 4, 5])
def test_operands_without_gradient_get_none(frozen):
    spec = tt((3, 4), (5, 2), 3)
    tensors = operands(spec, (6,))
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    tensors[frozen].requires_grad_(False)
    force(spec, "low_rank")(*tensors).backward(torch.randn(6, 10, generator=torch.Generator().manual_seed(9)).double())
    assert [t.grad is None for t in tensors] == [k == frozen for k in range(6)]
    for k, (t, g) in enumerate(zip(tensors, exact[1:], strict=True)):
        if k != frozen:
            assert t.grad.shape == g.shape


def test_rank_zero_is_the_constant_bias():
    spec = tt((3, 4), (5, 2), 0)
    x, bias, *cores = operands(spec, (6,))
    assert torch.equal(tt_linear(x, spec, cores, bias), bias.expand(6, 10))
    assert torch.equal(tt_linear(x, spec, cores), torch.zeros(6, 10, dtype=torch.float64))


def test_nothing_is_written_and_nothing_shared():
    spec = SPECS[0]
    tensors = operands(spec, (4,))
    before = [t.detach().clone() for t in tensors]
    y = force(spec, "low_rank")(*tensors)
    y.detach().zero_()
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_plans_by_the_batch_when_none_is_given(monkeypatch):
    spec = tt((4, 4, 4, 4), (4, 4, 4, 4), 12)
    called = []

    def groups(x_BI, *rest):
        called.append(x_BI.shape[0])
        return x_BI

    monkeypatch.setattr("comera.ops.linear.contract_groups", groups)
    x, bias, *cores = operands(spec, (1024,))
    tt_linear(x[:1], spec, cores, bias)
    tt_linear(x, spec, cores, bias)
    assert called == [1]


def test_wrong_last_dimension_names_both():
    spec = tt((3, 4), (5, 2), 3)
    _, bias, *cores = operands(spec, ())
    with pytest.raises(SpecError, match=r"last dimension is 12 for TT 3·4 / 5·2 .* got shape \(2, 13\)"):
        tt_linear(torch.randn(2, 13).double(), spec, cores, bias)
    with pytest.raises(SpecError, match=r"last dimension is 12 .* got shape \(\)"):
        tt_linear(torch.tensor(1.0).double(), spec, cores, bias)


def test_wrong_cores_bias_and_dtype_are_named():
    spec = tt((3, 4), (5, 2), 3)
    x, bias, *cores = operands(spec, (2,))
    with pytest.raises(SpecError, match=r"expected 4 cores of shapes \(\(1, 3, 3\).* got \(\(1, 3, 3\), \(3, 4, 3\)\)"):
        tt_linear(x, spec, cores[:2], bias)
    with pytest.raises(SpecError, match=r"bias of shape \(10,\) .* got \(1,\)"):
        tt_linear(x, spec, cores, bias[:1])
    with pytest.raises(TypeError, match=r"dtype of the cores, torch.float64, got torch.float32"):
        tt_linear(x.float(), spec, cores, bias)


def test_wrong_operands_of_blocks_are_named():
    spec = BLOCKS[1]
    x, bias, *cores = operands(spec, (2,))
    with pytest.raises(SpecError, match=r"last dimension is 7 for BTT 3·4 / 5·2 rank 2, got shape \(2, 6\)"):
        btt_linear(x[:, :6], spec, cores, bias)
    with pytest.raises(SpecError, match=r"expected 2 cores of shapes \(\(1, 4, 30\), \(30, 2, 1\)\)"):
        btt_linear(x, spec, cores[:1], bias)
    with pytest.raises(SpecError, match=r"bias of shape \(7,\) .* got \(1,\)"):
        btt_linear(x, spec, cores, bias[:1])
    with pytest.raises(TypeError, match=r"dtype of the cores, torch.float64, got torch.float32"):
        btt_linear(x.float(), spec, cores, bias)
