"""The MLP in chunks against the dense formula: values, all gradients, derivatives of derivatives."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from comera.errors import SpecError
from comera.ops.activations import ACTIVATIONS
from comera.ops.dtypes import kernel_dtype
from comera.ops.merge import merge
from comera.ops.mlp import mlp
from comera.tt.dense import materialize
from comera.tt.spec import TTSpec

UP = TTSpec(14, 45, (3, 5), (5, 3, 3), (1, 2, 3, 4, 2, 1))  # 15 input modes for 14 features
DOWN = TTSpec(45, 10, (5, 3, 3), (2, 5), (1, 3, 4, 2, 2, 1))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr("comera.ops.chunking.CHUNK_CPU", 2 * 45 * 4)  # chunks of four rows


class Weight(NamedTuple):
    spec: TTSpec
    cores: list[Tensor]
    bias: Tensor | None


def run(x, ups, activation, down):
    """The operation, on factors that are merged from cores."""

    def factors(w):
        gates = [w.cores[0].new_ones(rank) for rank in w.spec.inner_ranks]
        return merge([w.spec], [[*w.cores, *gates]], 0.0, kernel_dtype(x, "mlp"), [w.bias])[0]

    return mlp(x, [factors(up) for up in ups], activation, factors(down))


def weight(spec, seed, bias=True, dtype=torch.float64):
    torch.manual_seed(seed)
    cores = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in spec.core_shapes]
    return Weight(spec, cores, torch.randn(spec.out_features, dtype=dtype, requires_grad=True) if bias else None)


def tensors(weights):
    return [t for w in weights for t in (*w.cores, w.bias) if t is not None]


def dense(x, ups, activation, down):
    def linear(h, w):
        y = h @ materialize(w.spec, w.cores)
        return y if w.bias is None else y + w.bias

    first, *others = (linear(x, up) for up in ups)
    hidden = ACTIVATIONS[activation][0](first)
    return linear(hidden * others[0] if others else hidden, down)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("lead", [(11,), (3, 3), (1,), (0,)], ids=str)
def test_agrees_with_the_dense_formula(activation, gated, bias, lead):
    weights = [weight(UP, 0, bias), *([weight(UP, 1, bias)] if gated else []), weight(DOWN, 2, bias)]
    x = torch.randn(*lead, 14, dtype=torch.float64, requires_grad=True)
    *ups, down = weights
    found, exact = (way(x, ups, activation, down) for way in (run, dense))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    dz = torch.randn_like(exact)
    inputs = [x, *tensors(weights)]
    pair = (torch.autograd.grad(z, inputs, dz) for z in (found, exact))
    torch.testing.assert_close(*pair, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_first_and_second_derivatives_pass_gradcheck(gated):
    weights = [weight(UP, 0), *([weight(UP, 1)] if gated else []), weight(DOWN, 2)]
    x = torch.randn(9, 14, dtype=torch.float64, requires_grad=True)

    def function(x, *_):
        *ups, down = weights
        return run(x, ups, "gelu", down)

    inputs = (x, *tensors(weights))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_rank_zero_leaves_the_bias_and_its_gradient():
    up, down = weight(TTSpec(14, 45, (3, 5), (5, 3, 3), (1, 2, 0, 4, 2, 1)), 0), weight(DOWN, 2)
    x = torch.randn(9, 14, dtype=torch.float64, requires_grad=True)
    z, exact = run(x, [up], "gelu", down), dense(x, [up], "gelu", down)
    torch.testing.assert_close(z, exact)
    torch.testing.assert_close(torch.autograd.grad(z.sum(), up.bias), torch.autograd.grad(exact.sum(), up.bias))


def test_keeps_no_wide_tensor():
    weights, x = [weight(UP, 0), weight(DOWN, 2)], torch.randn(400, 14, dtype=torch.float64, requires_grad=True)
    kept = []

    def pack(t):
        kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x, weights[:1], "gelu", weights[1])
    assert max(kept) == x.numel()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense(x, weights[:1], "gelu", weights[1])
    assert max(kept) >= 400 * 45


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_keeps_the_signal(dtype):
    exact_weights = [weight(UP, 0), weight(DOWN, 2)]
    low = [Weight(w.spec, [c.detach().to(dtype) for c in w.cores], w.bias.detach().to(dtype)) for w in exact_weights]
    again = [Weight(w.spec, [c.double() for c in w.cores], w.bias.double()) for w in low]
    x = (torch.randn(64, 14) / 4).to(dtype)
    found = run(x, low[:1], "gelu", low[1])
    exact = dense(x.double(), again[:1], "gelu", again[1])
    assert found.dtype == dtype
    noise = (found.double() - exact).square().sum()
    assert 10 * math.log10(exact.square().sum() / noise) > (45 if dtype == torch.bfloat16 else 60)


def test_autocast_runs_in_its_dtype():
    single = [weight(UP, 0, dtype=torch.float32), weight(DOWN, 2, dtype=torch.float32)]
    x = torch.randn(16, 14)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x, single[:1], "gelu", single[1]).dtype == torch.bfloat16


def test_refuses_what_does_not_fit():
    up, down = weight(UP, 0), weight(DOWN, 2)
    x = torch.randn(9, 14, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"expected an activation of gelu, .* got 'elu'"):
        run(x, [up], "elu", down)
    with pytest.raises(SpecError, match="expected one or two weights 14 → 45 before the activation, got 45 → 10"):
        run(x, [down], "gelu", down)
    with pytest.raises(SpecError, match="expected one or two weights 13 → 45 before the activation, got 14 → 45"):
        run(x[:, :13], [up], "gelu", down)
