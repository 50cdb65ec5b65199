"""ttm_linear, the output head over a tensor-train matrix, against the float64 dense oracle."""

import pytest
import torch
import torch.nn.functional as F

from comera.errors import SpecError
from comera.kernels import select
from comera.kernels.select import low_rank_backend
from comera.ops import chunking
from comera.ops.planner.plan import plan_projection
from comera.ops.projection import ttm_linear
from comera.tt.dense import materialize, zero_row

from ...helpers.lookups import each_option
from ...helpers.oracle import operands, oracle, second_derivatives, signal_to_noise, values_and_gradients
from ...helpers.specs import force, ttm

SPECS = [
    ttm((7,), (5,), 1),
    ttm((4, 5), (3, 2), 4),
    ttm((3, 4, 2), (2, 3, 2), 3, pad_rows=5, pad_cols=1),
    ttm((4, 5), (3, 2), 0),
    ttm((2, 3, 2, 2), (2, 1, 2, 3), 1, pad_rows=1),
    ttm((2, 2, 2, 2, 2, 2), (1, 2, 1, 2, 1, 2), 4),
    ttm((7, 1), (1, 6), 4),  # plain low rank
    ttm((4, 2, 1), (1, 1, 6), 3, pad_rows=1, pad_cols=1),  # low rank, of three cores
    ttm((3, 2, 1), (2, 1, 3), 2, pad_rows=1),
]
every_option = each_option(SPECS, plan_projection)


@every_option
@pytest.mark.parametrize("lead", [(), (1,), (7,), (0,), (2, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_agrees_with_the_dense_oracle(spec, option, lead, bias):
    tensors = operands(spec, lead, bias=bias)
    found = values_and_gradients(force(spec, option.ends), tensors)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    assert found[0].is_contiguous()


@every_option
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_the_padding_row_has_the_bias_alone(spec, option, bias):
    tensors = operands(spec, (3,), bias=bias)
    plan = plan_projection(spec, 3).using(option.ends)

    def padded_oracle(x, bias, *cores):
        return F.linear(x, zero_row(materialize(spec, cores), 1), bias)

    def padded(x, bias, *cores):
        return ttm_linear(x, spec, cores, bias, padding_idx=1, plan=plan)

    found, exact = values_and_gradients(padded, tensors), values_and_gradients(padded_oracle, tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@every_option
def test_second_derivatives_are_those_of_the_oracle(spec, option):
    tensors = operands(spec, (3,))
    found = second_derivatives(force(spec, option.ends), tensors)
    exact = second_derivatives(lambda *t: oracle(spec, *t), tensors)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    spec = SPECS[1]
    ends = plan_projection(spec, 3).options[0].ends
    assert torch.autograd.gradcheck(force(spec, ends), operands(spec, (3,)), fast_mode=True)


@every_option
def test_pieces_of_one_row_give_the_same(spec, option, monkeypatch):
    tensors = operands(spec, (5,))
    whole = values_and_gradients(force(spec, option.ends), tensors)
    monkeypatch.setattr(chunking, "CHUNK_CPU", 1)
    torch.testing.assert_close(values_and_gradients(force(spec, option.ends), tensors), whole, rtol=1e-12, atol=1e-12)


def test_pieces_cover_the_batch_within_their_limit(monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_CPU", 100)
    cpu = torch.device("cpu")
    assert chunking.chunks(10, 30, cpu) == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]
    assert chunking.chunks(8, 20, cpu) == [slice(0, 4), slice(4, 8)]  # up to five, and no remainder of three
    assert chunking.chunks(2, 1000, cpu) == [slice(0, 1), slice(1, 2)]
    assert chunking.chunks(5, 0, cpu) == [slice(0, 5)]
    assert chunking.chunks(0, 30, cpu) == []


def test_keeps_no_wide_tensor_for_the_backward():
    spec = ttm((8, 8, 8), (4, 4, 4), 8)
    x, bias, *cores = operands(spec, (64,))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        ttm_linear(x, spec, cores, bias, plan=plan_projection(spec, 64).using((2, 3)))
    left_half = (8 * 8) * (4 * 4) * 8
    assert max(kept) == left_half < spec.num_embeddings * spec.embedding_dim < 64 * (4 * 4) * 8 * 8


@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_non_contiguous_input_and_gradient(layout):
    spec = SPECS[2]
    x, bias, *cores = operands(spec, (6,))
    x = x.detach()
    view = (x.t().contiguous().t() if layout == "transposed" else x[:1].expand(6, -1)).requires_grad_()
    dy = torch.ones(1, 1, dtype=torch.float64).expand(6, spec.num_embeddings)
    for option in plan_projection(spec, 8).options:
        found = values_and_gradients(force(spec, option.ends), [view, bias, *cores], dy)
        exact = values_and_gradients(lambda *t: oracle(spec, *t), [view, bias, *cores], dy)
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("dtype", "decibels"), [(torch.bfloat16, 46), (torch.float16, 64)])
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "pure"])
def test_low_precision_keeps_the_signal(dtype, decibels, autocast, monkeypatch):
    monkeypatch.setattr(chunking, "CHUNK_CPU", 2**14)  # several pieces: their sums must not be rounded one by one
    spec = ttm((5, 4, 10, 10), (4, 2, 3, 4), 32, pad_rows=7)
    low = operands(spec, (64,), dtype=torch.float32 if autocast else dtype)
    double = [t.detach().double().requires_grad_() for t in low]
    dy = torch.randn(64, spec.num_embeddings, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), double, dy.double())
    for option in plan_projection(spec, 64).options:
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            y = force(spec, option.ends)(*low)
        found = [y, *torch.autograd.grad(y, low, dy)]
        assert y.dtype == dtype
        assert all(g.dtype == t.dtype for g, t in zip(found[1:], low, strict=True))
        assert min(signal_to_noise(a, b) for a, b in zip(found, exact, strict=True)) > decibels


def test_a_low_rank_goes_through_the_low_rank_product(monkeypatch):
    spec = ttm((70, 1), (1, 12), 8)
    tensors = operands(spec, (5,), dtype=torch.float32)
    chosen = []

    def backend(x_BI, factors):
        chosen.append([tuple(factor.shape) for factor in factors])
        return low_rank_backend(x_BI, factors)

    monkeypatch.setattr(select, "low_rank_backend", backend)
    found = values_and_gradients(force(spec, (1, 2)), tensors)
    exact = values_and_gradients(lambda *t: oracle(spec, *t), [t.detach().double().requires_grad_() for t in tensors])
    assert chosen == [[(8, 12), (1 + 8, 70)]]
    torch.testing.assert_close([each.double() for each in found], exact, rtol=1e-4, atol=1e-5)


def test_wrong_last_dimension_names_both():
    spec = SPECS[1]
    _, bias, *cores = operands(spec, ())
    with pytest.raises(SpecError, match=r"last dimension is 6 for TTM .* got shape \(2, 20\)"):
        ttm_linear(torch.randn(2, 20).double(), spec, cores, bias)
    with pytest.raises(SpecError, match=r"bias of shape \(20,\) .* got \(6,\)"):
        ttm_linear(torch.randn(2, 6).double(), spec, cores, bias[:6])
