"""FP8 on the device: torch's scaled product beside its emulation, and the same layer with either."""

import pytest
import torch

import comera
from comera.kernels import select
from comera.kernels.scaled_mm import unavailable_reason
from comera.nn import TTLinear
from comera.ops.fp8 import E4M3, E5M2, fp8_low_rank, quantize, scaled_product
from comera.ops.low_rank import LowRankFactors
from comera.tt import tt_spec

from ..helpers.oracle import signal_to_noise

pytestmark = pytest.mark.gpu
SCALINGS = pytest.mark.parametrize("scaling", ["tensorwise", "rowwise", "hybrid"])
SHAPES = [
    (64, 96, 80, 32),
    (512, 768, 3072, 30),
    (1, 256, 512, 48),
    (200, 64, 64, 1),
    (7, 32, 64, 9),
    (4097, 768, 768, 64),
]
# beside the emulation: another order of the sum (float32), or a result in bfloat16 (scales by row)
LOWEST = {"tensorwise": 60, "rowwise": 45, "hybrid": 60}


@pytest.fixture(autouse=True)
def scaled_products(device):
    if (reason := unavailable_reason(torch.device("cuda", torch.cuda.current_device()))) is not None:
        pytest.skip(reason)


def draw(*shape, device, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale).to(device)


def emulated(monkeypatch, function, *operands):
    with monkeypatch.context() as patch:
        patch.setattr(select, "scaled_product_backend", lambda device: "emulated")
        return function(*operands)


@SCALINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("left_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(shape, left_dtype, dtype, scaling, device, monkeypatch):
    rows, contracted, columns, _ = shape
    left = quantize(draw(rows, contracted, device=device), left_dtype, scaling)
    right = quantize(draw(columns, contracted, device=device, seed=1), E4M3, scaling)
    found = scaled_product(left, right, dtype)
    expected = emulated(monkeypatch, scaled_product, left, right, torch.float32)
    assert (found.shape, found.dtype) == ((rows, columns), dtype)
    assert signal_to_noise(found, expected) > min(LOWEST[scaling], 60 if dtype == torch.float32 else 45)


@SCALINGS
@pytest.mark.parametrize("shape", [*SHAPES, (0, 32, 48, 4), (5, 32, 48, 0)], ids=str)
def test_low_rank(shape, scaling, device, monkeypatch):
    batch, features, outputs, rank = shape
    tensors = [
        draw(batch, features, device=device).requires_grad_(),
        draw(rank, features, device=device, seed=1, scale=features**-0.5).requires_grad_(),
        draw(1 + rank, outputs, device=device, seed=2).requires_grad_(),
    ]
    dy = draw(batch, outputs, device=device, seed=3)

    def value_and_gradients():
        y = fp8_low_rank(tensors[0], LowRankFactors(*tensors[1:]), scaling)
        return [y, *torch.autograd.grad(y, tensors, dy)]

    for found, expected in zip(value_and_gradients(), emulated(monkeypatch, value_and_gradients), strict=True):
        assert found.shape == expected.shape
        # P and U may be rounded to another float8 number where they lie between two
        assert not expected.count_nonzero() or signal_to_noise(found, expected) > 30


@SCALINGS
def test_quantized_as_on_the_cpu(scaling, device):
    x = draw(300, 200, device=device) * 10.0 ** torch.randint(-12, 12, (300, 1)).to(device)
    for dtype in (E4M3, E5M2):
        here, there = quantize(x, dtype, scaling), quantize(x.cpu(), dtype, scaling)
        assert torch.equal(here.scale.cpu(), there.scale)
        assert torch.equal(here.values.view(torch.uint8).cpu(), there.values.view(torch.uint8))


@SCALINGS
@pytest.mark.parametrize("autocast", [False, True])
def test_layer(autocast, scaling, device):
    torch.manual_seed(0)
    layer = TTLinear(tt_spec(256, 512, order=4, rank=30)).to(device)
    x = draw(4, 100, 256, device=device)
    exact = layer(x)
    assert comera.fp8_(layer, scaling).emulated is None
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert signal_to_noise(y, exact) > 20
    y.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@SCALINGS
def test_compiled(scaling, device):
    torch.manual_seed(0)
    layer = TTLinear(tt_spec(256, 512, order=4, rank=30)).to(device)
    comera.fp8_(layer, scaling)
    x = draw(100, 256, device=device)
    assert signal_to_noise(torch.compile(layer, fullgraph=True)(x), layer(x)) > 30
