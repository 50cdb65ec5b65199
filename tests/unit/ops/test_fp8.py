"""FP8 products: the rounding is that of torch's own casts, the formulas those of a reference from plain operations."""

import math

import pytest
import torch

from comera.kernels import select
from comera.ops.dtypes import without_autocast
from comera.ops.fp8 import _LEAST, E4M3, E5M2, fp8_low_rank, quantize
from comera.ops.linear import tt_linear
from comera.ops.low_rank import LowRankFactors
from comera.ops.merge import merge
from comera.tt.dense import materialize

from ...helpers.oracle import operands, signal_to_noise, values_and_gradients
from ...helpers.specs import tt

FORMATS = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
SCALINGS = pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "hybrid"])
SHAPES = [
    (64, 96, 80, 32),
    (512, 768, 3072, 30),
    (1, 256, 512, 48),
    (200, 64, 64, 1),
    (7, 33, 65, 9),
    (300, 48, 16, 64),
]


def plain_scale(x, dtype):
    """The largest power of two that keeps the largest magnitude in range, by Python's own numbers."""
    largest, amax = torch.finfo(dtype).max, max(x.abs().max().item(), _LEAST)
    _, exponent = math.frexp(largest / amax)
    return 2.0 ** (exponent - 1)


def plain(x, dtype, scaling):
    """What a matrix is after quantization, from torch's cast alone; and what it was divided by, (1, 1) or (M, 1)."""
    rows = x.split(1) if scaling == "rowwise" else [x]
    scale = torch.tensor([[plain_scale(row, dtype)] for row in rows])
    return (x * scale).to(dtype).float() / scale, scale.reciprocal()


def draw(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def layer(shape, seed=0):
    """x, A, [bias; B], with gradients, and dy."""
    batch, features, outputs, rank = shape
    x, a = draw(batch, features, seed=seed), draw(rank, features, seed=1, scale=features**-0.5)
    b = torch.cat([draw(1, outputs, seed=2), draw(rank, outputs, seed=3, scale=max(1, rank) ** -0.5)])
    return [each.requires_grad_() for each in (x, a, b)], draw(batch, outputs, seed=4)


def found(tensors, dy, scaling):
    return values_and_gradients(lambda x, a, b: fp8_low_rank(x, LowRankFactors(a, b), scaling), tensors, dy)


def oracle(tensors, dy):
    double = [each.detach().double().requires_grad_() for each in tensors]
    return values_and_gradients(lambda x, a, b: (x @ a.t()) @ b[1:] + b[0], double, dy.double())


def reference(x, a, b, dy, scaling):
    """Value and gradients from torch's casts and plain products of what they give."""
    qx, sx = plain(x, E4M3, scaling)
    qa, sa = plain(a, E4M3, scaling)
    qb, sb = plain(b[1:].t(), E4M3, scaling)
    qp, sp = plain(qx @ qa.t(), E4M3, scaling)
    y = qp @ qb.t() + b[0]
    gradients = E5M2 if scaling == "hybrid" else E4M3
    # weighed by the scale of what it meets where that varies along the contraction
    u = (plain(dy * sb.t(), gradients, scaling)[0] / sb.t()) @ qb
    dx = (plain(u * sa.t(), gradients, scaling)[0] / sa.t()) @ qa
    da = (plain((u * sx).t(), gradients, scaling)[0] / sx.t()) @ qx
    db = ((plain((dy * sp).t(), gradients, scaling)[0] / sp.t()) @ qp).t()
    return [y, dx, da, torch.cat([dy.sum(0, keepdim=True), db])]


# --- quantization, element by element --------------------------------------------------------------------------------


@SCALINGS
@FORMATS
def test_quantized_elements_are_those_of_torchs_cast(dtype, scaling):
    x = torch.cat([draw(40, 50, scale=10.0**power, seed=power + 50) for power in range(-12, 12, 3)])
    made = quantize(x, dtype, scaling)
    expected, scale = plain(x, dtype, scaling)
    assert made.values.dtype == dtype
    assert torch.equal(made.dequantized(), expected)
    assert torch.equal(made.scale, scale)


@SCALINGS
@FORMATS
@pytest.mark.parametrize("given", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_and_layouts(given, dtype, scaling):
    x = draw(30, 20).to(given).t()
    made = quantize(x, dtype, scaling)
    assert torch.equal(made.dequantized(), plain(x.float().contiguous(), dtype, scaling)[0])


@FORMATS
def test_the_largest_magnitude_never_overflows_and_uses_the_range(dtype):
    largest = torch.finfo(dtype).max
    edges = [largest * 2.0**k for k in range(-40, 100, 7)]
    amax = torch.tensor([*edges, 3e38, 1.0, 0.7, 448 / 3, torch.finfo(torch.float32).max])
    around = torch.cat([amax.nextafter(torch.tensor(0.0)), amax, amax.nextafter(torch.tensor(math.inf))])
    x = around[around.isfinite()][:, None] * torch.tensor([1.0, -1.0, 0.5])
    made = quantize(x, dtype, "rowwise")
    assert made.values.float().isfinite().all()
    assert (made.values.float().abs().amax(1) >= largest / 2).all()
    assert (made.values.float().abs().amax(1) <= largest).all()
    kept = made.values.double() * made.scale.double()  # float32's largest number is rounded up, to 2^128
    assert ((kept - x).abs() <= x.abs() * 2.0 ** -(4 if dtype == E4M3 else 3)).all()


@SCALINGS
@FORMATS
def test_zeros_stay_zero_and_tiny_values_are_rounded_not_lost(dtype, scaling):
    assert torch.equal(quantize(torch.zeros(3, 4), dtype, scaling).dequantized(), torch.zeros(3, 4))
    tiny = torch.tensor([[1e-18, -3e-18, 1e-17, 0.0]])
    kept = quantize(tiny, dtype, scaling).dequantized()
    torch.testing.assert_close(kept, tiny, rtol=2.0**-3, atol=0)
    vanishing = torch.full((2, 2), 1e-44)
    assert quantize(vanishing, dtype, scaling).dequantized().eq(0).all()
    # within a tensor what is far below the largest goes to zero, as in torch's cast
    wide = torch.tensor([[1.0, 2.0**-9, 2.0**-40]])
    assert torch.equal(quantize(wide, dtype, scaling).dequantized(), torch.tensor([[1.0, 2.0**-9, 0.0]]))


@FORMATS
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows(bad, dtype):
    x = torch.ones(3, 4)
    x[1, 2] = bad
    assert quantize(x, dtype, "tensorwise").dequantized().isnan().all()
    by_row = quantize(x, dtype, "rowwise").dequantized()
    assert by_row[1].isnan().all()
    assert torch.equal(by_row[[0, 2]], torch.ones(2, 4))


@SCALINGS
@FORMATS
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_tensors(shape, dtype, scaling):
    made = quantize(torch.zeros(shape), dtype, scaling)
    assert made.values.shape == shape
    assert made.scale.shape == (shape[0] if scaling == "rowwise" else 1, 1)
    assert made.scale.isfinite().all()


@SCALINGS
@FORMATS
def test_scaling_by_powers_of_two_is_exact(dtype, scaling):
    x = draw(20, 30)
    once = quantize(x, dtype, scaling)
    assert torch.equal(quantize(once.dequantized(), dtype, scaling).dequantized(), once.dequantized())
    assert torch.equal(quantize(x * 2.0**-7, dtype, scaling).values.float(), once.values.float())


# --- products --------------------------------------------------------------------------------------------------------


@SCALINGS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_emulation_is_torchs_casts_and_plain_products_to_the_bit(shape, scaling):
    tensors, dy = layer(shape)
    expected = reference(*(each.detach() for each in tensors), dy, scaling)
    for value, exact in zip(found(tensors, dy, scaling), expected, strict=True):
        assert torch.equal(value, exact)


@SCALINGS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_signal_to_noise(shape, scaling):
    tensors, dy = layer(shape)
    pairs = zip(found(tensors, dy, scaling), oracle(tensors, dy), strict=True)
    assert min(signal_to_noise(value, exact) for value, exact in pairs) >= 20


@SCALINGS
@pytest.mark.parametrize("shape", [(0, 32, 48, 4), (5, 32, 48, 0), (0, 32, 48, 0), (1, 16, 16, 1)], ids=str)
def test_empty_batches_and_ranks(shape, scaling):
    tensors, dy = layer(shape)
    batch, _, outputs, rank = shape
    y, dx, da, db = found(tensors, dy, scaling)
    assert y.shape == (batch, outputs)
    for gradient, tensor in zip((dx, da, db), tensors, strict=True):
        assert gradient.shape == tensor.shape
        assert gradient.isfinite().all()
    assert torch.equal(db[0], dy.sum(0))
    if rank == 0:
        assert torch.equal(y, tensors[2][0].expand(batch, outputs))
        assert dx.eq(0).all()


@SCALINGS
def test_without_bias_and_only_some_gradients(scaling):
    tensors, dy = layer((20, 32, 48, 8))
    x, a, b = tensors
    _, dx, da, db = found(tensors, dy, scaling)
    y = fp8_low_rank(x.detach(), LowRankFactors(a, b[1:]), scaling)
    alone = torch.autograd.grad(y, [a, b], dy)
    assert torch.equal(alone[0], da)
    assert torch.equal(alone[1][1:], db[1:])
    y = fp8_low_rank(x, LowRankFactors(a.detach(), b.detach()), scaling)
    assert torch.equal(torch.autograd.grad(y, [x], dy)[0], dx)


def test_a_row_of_large_elements_costs_others_nothing_with_scales_by_row():
    tensors, dy = layer((64, 96, 80, 32))
    with torch.no_grad():
        tensors[0][5] *= 1e5
        dy[9] *= 1e5
    exact, noise = oracle(tensors, dy), {}
    others = torch.tensor([row for row in range(64) if row not in (5, 9)])
    for scaling in ("tensorwise", "rowwise"):
        y, dx, da, db = found(tensors, dy, scaling)
        noise[scaling] = [
            signal_to_noise(y[others], exact[0][others]),
            signal_to_noise(dx[others], exact[1][others]),
            signal_to_noise(da, exact[2]),
            signal_to_noise(db, exact[3]),
        ]
    by_tensor, by_row = noise["tensorwise"], noise["rowwise"]
    assert min(by_row) >= 20
    assert by_tensor[0] < 10
    assert all(row >= tensor for row, tensor in zip(by_row[:2], by_tensor[:2], strict=True))
    assert all(row >= tensor - 1 for row, tensor in zip(by_row[2:], by_tensor[2:], strict=True))  # one row decides both


def test_a_column_of_zeros_in_the_weight_still_learns():
    """Its scale is the least there is; ∂B must not be lost with it."""
    tensors, dy = layer((64, 96, 80, 32))
    with torch.no_grad():
        tensors[2][:, 7] = 0
    _, _, _, db = found(tensors, dy, "rowwise")
    assert signal_to_noise(db[:, 7], oracle(tensors, dy)[3][:, 7]) >= 20


@SCALINGS
@pytest.mark.parametrize("shape", [*SHAPES[:1], *SHAPES[2:], (0, 32, 48, 4), (5, 32, 48, 0)], ids=str)
def test_torchs_scaled_product_gives_what_the_emulation_gives(shape, scaling, monkeypatch):
    """On a CPU torch has it, too; row-wise scaled it rounds to bfloat16."""
    tensors, dy = layer(shape)
    emulated = found(tensors, dy, scaling)
    monkeypatch.setattr(select, "scaled_product_backend", lambda device: "scaled_mm")
    for value, expected in zip(found(tensors, dy, scaling), emulated, strict=True):
        if scaling != "rowwise":
            assert value.numel() == 0 or expected.eq(0).all() or signal_to_noise(value, expected) > 45
        else:
            assert value.numel() == 0 or expected.eq(0).all() or signal_to_noise(value, expected) > 30


def test_the_backward_cannot_be_differentiated():
    tensors, dy = layer((20, 32, 48, 8))
    y = fp8_low_rank(tensors[0], LowRankFactors(*tensors[1:]), "tensorwise")
    with pytest.raises(RuntimeError, match=r"create_graph=True\): take FP8 back with comera.fp8_\(model, None\)"):
        torch.autograd.grad(y, tensors, dy, create_graph=True)


def test_the_backward_keeps_a_byte_per_element_of_the_input():
    tensors, _ = layer((64, 96, 80, 32))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fp8_low_rank(tensors[0], LowRankFactors(*tensors[1:]), "tensorwise")
    largest = max(saved, key=torch.Tensor.numel)
    assert (largest.shape, largest.dtype) == ((64, 96), E4M3)
    assert all(each.dtype == E4M3 or each.numel() == 1 for each in saved)


# --- through the layer's operation -----------------------------------------------------------------------------------

SPECS = [tt((4, 4, 3), (4, 4, 5), 8), tt((8, 8), (8, 12), 1), tt((16, 16), (16, 32), 40)]


def gates_of(spec):
    return [(1 + 0.1 * draw(rank, seed=k)).requires_grad_() for k, rank in enumerate(spec.inner_ranks)]


@SCALINGS
@pytest.mark.parametrize("lead", [(50,), (4, 9), (1,)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradients_pass_from_the_factors_to_cores_gates_and_bias(spec, lead, scaling):
    x, bias, *cores = operands(spec, lead, dtype=torch.float32)
    tensors, dy = [x, bias, *cores, *gates_of(spec)], draw(*lead, spec.out_features, seed=8)

    def function(x, bias, *train):
        own, gates = train[: spec.order], train[spec.order :]
        return tt_linear(x, spec, own, bias, gates=gates, fp8=scaling)

    y, dx, dbias, *dtrain = values_and_gradients(function, tensors, dy)
    assert y.shape == (*lead, spec.out_features)
    (factors,) = merge([spec], [tensors[2:]], 0.0, torch.float32, [bias])
    leaves = [x, *(each.detach().requires_grad_() for each in factors)]
    exact = values_and_gradients(
        lambda x, a, b: fp8_low_rank(x.reshape(-1, spec.in_features), LowRankFactors(a, b), scaling),
        leaves,
        dy.reshape(-1, spec.out_features),
    )
    assert torch.equal(y.reshape(exact[0].shape), exact[0])
    assert torch.equal(dx, exact[1])
    expected = torch.autograd.grad(list(factors), [bias, *tensors[2:]], exact[2:])
    for gradient, truth in zip([dbias, *dtrain], expected, strict=True):
        assert torch.equal(gradient, truth)


@SCALINGS
@pytest.mark.parametrize("lead", [(50,), (4, 9), (1,)], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_signal_to_noise_of_a_layer(spec, lead, scaling):
    if lead == (1,) and spec.ranks[spec.split] == 1:
        lead = (24,)  # the product of one row with rank 1 is a single number, of as few bits as e5m2 has
    x, bias, *cores = operands(spec, lead, dtype=torch.float32)
    tensors, dy = [x, bias, *cores], draw(*lead, spec.out_features, seed=8)
    double = [each.detach().double().requires_grad_() for each in tensors]
    values = values_and_gradients(lambda x, b, *own: tt_linear(x, spec, own, b, fp8=scaling), tensors, dy)
    truths = values_and_gradients(lambda x, b, *own: x @ materialize(spec, own) + b, double, dy)
    assert min(signal_to_noise(value, truth) for value, truth in zip(values[:3], truths, strict=False)) >= 20
    # of cores together: the gradient of a small one is a sum that may cancel
    values, truths = (torch.cat([each.double().flatten() for each in grads[3:]]) for grads in (values, truths))
    assert signal_to_noise(values, truths) >= 20


@SCALINGS
def test_input_that_is_not_contiguous(scaling):
    spec = SPECS[0]
    _, bias, *cores = operands(spec, (1,), dtype=torch.float32)
    x = draw(48, 20)
    strided = tt_linear(x.t(), spec, cores, bias, fp8=scaling)
    assert torch.equal(strided, tt_linear(x.t().contiguous(), spec, cores, bias, fp8=scaling))
    x = draw(6, 5, 48)
    strided = tt_linear(x.transpose(0, 1), spec, cores, bias, fp8=scaling)
    assert torch.equal(strided, tt_linear(x.transpose(0, 1).contiguous(), spec, cores, bias, fp8=scaling))


@SCALINGS
def test_under_autocast(scaling):
    spec = SPECS[0]
    tensors = operands(spec, (50,), dtype=torch.float32)

    def function(x, bias, *cores):
        with torch.autocast("cpu", torch.bfloat16):
            return tt_linear(x, spec, cores, bias, fp8=scaling)

    double = [each.detach().double().requires_grad_() for each in tensors]
    values = values_and_gradients(function, tensors)
    truths = values_and_gradients(lambda x, bias, *cores: x @ materialize(spec, cores) + bias, double, None)
    assert values[0].dtype == torch.bfloat16
    assert [each.dtype for each in values[1:]] == [torch.float32] * len(tensors)
    assert min(signal_to_noise(value, truth) for value, truth in zip(values, truths, strict=True)) >= 20


def test_a_backward_inside_autocast_multiplies_in_float32():
    tensors, dy = layer((20, 32, 48, 8))
    outside = found(tensors, dy, "tensorwise")
    with torch.autocast("cpu", torch.bfloat16):
        with without_autocast(dy):
            y = fp8_low_rank(tensors[0], LowRankFactors(*tensors[1:]), "tensorwise")
        inside = [y, *torch.autograd.grad(y, tensors, dy)]
    assert all(torch.equal(value, expected) for value, expected in zip(inside, outside, strict=True))


@SCALINGS
def test_transforms_of_torch_func(scaling):
    tensors, dy = layer((20, 32, 48, 8))
    _, dx, da, db = found(tensors, dy, scaling)

    def inner(x, a, b):
        return (fp8_low_rank(x, LowRankFactors(a, b), scaling) * dy).sum()

    plain_tensors = [each.detach() for each in tensors]
    for gradient, expected in zip(torch.func.grad(inner, (0, 1, 2))(*plain_tensors), (dx, da, db), strict=True):
        assert torch.equal(gradient, expected)
    if torch.__version__ < "2.13":
        pytest.skip("torch 2.12 has no batching rule for a view of another dtype")
    xs = torch.stack([plain_tensors[0], 2 * plain_tensors[0]])
    mapped = torch.func.vmap(torch.func.grad(inner, 1), (0, None, None))(xs, *plain_tensors[1:])
    torch.testing.assert_close(mapped[0], da)


@SCALINGS
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_it_is_one_graph_with_the_same_values(scaling):
    spec = SPECS[0]
    tensors = operands(spec, (2, 7), dtype=torch.float32)

    def function(x, bias, *cores):
        return tt_linear(x, spec, cores, bias, fp8=scaling)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    pairs = zip(values_and_gradients(compiled, tensors), values_and_gradients(function, tensors), strict=True)
    assert min(signal_to_noise(value, eager) for value, eager in pairs) > 60
