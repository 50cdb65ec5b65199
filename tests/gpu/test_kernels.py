"""The Triton kernels on the device: against float64, in every dtype, and what the layers compute with them."""

import pytest
import torch

from comera.kernels import select
from comera.ops import low_rank as products
from comera.ops.block_product import block_product, btt_linear
from comera.ops.linear import tt_linear
from comera.ops.lookup import ttm_lookup
from comera.ops.lookup.kernel import triton_rows
from comera.ops.planner.plan import plan_linear, plan_lookup
from comera.tt.blocks import materialize_blocks
from comera.tt.dense import materialize
from comera.tt.format import clip_ranks
from comera.tt.shapes import btt_spec
from comera.tt.spec import TTMSpec, TTSpec

from ..helpers.oracle import signal_to_noise as decibels
from ..helpers.specs import ragged

pytestmark = pytest.mark.gpu

LOWEST = {torch.float32: 110, torch.bfloat16: 43, torch.float16: 61}  # decibels of signal to noise
SHAPES = [
    (1, 1, 1, 1),
    (5, 7, 11, 3),
    (1000, 768, 768, 30),
    (4097, 768, 3072, 30),
    (130, 3072, 768, 64),
    (63, 500, 65, 1),
]
TABLES = [(1, 1, 1, 1, 1, 1), (320, 16, 32, 100, 48, 5000), (50, 8, 30, 9, 8, 4097), (3, 5, 1, 2, 1, 11)]


def draw(*shape, dtype, device, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
    return numbers.to(device, dtype).requires_grad_()


def worst(found_function, exact_function, tensors, dtype):
    """Lowest decibels over the value and all gradients."""
    double = [t.detach().double().requires_grad_() for t in tensors]
    found, exact = found_function(*tensors), exact_function(*double)
    assert found.dtype == dtype
    dy = draw(*exact.shape, dtype=dtype, device=exact.device, seed=7).detach()
    pairs = [(found, exact)]
    pairs += zip(torch.autograd.grad(found, tensors, dy), torch.autograd.grad(exact, double, dy.double()), strict=True)
    return min(decibels(a, b) for a, b in pairs)


def oracle(x, a, b, bias):
    return (x @ a.t()) @ b + bias


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_low_rank(shape, dtype, device, monkeypatch):
    monkeypatch.setattr(select, "low_rank_backend", lambda *_: "triton")
    batch, features, out_features, rank = shape
    bias = draw(out_features, dtype=dtype, device=device, seed=3)
    tensors = [
        draw(batch, features, dtype=dtype, device=device),
        draw(rank, features, dtype=dtype, device=device, scale=features**-0.5, seed=1),
        draw(rank, out_features, dtype=dtype, device=device, scale=rank**-0.5, seed=2),
        bias,
    ]

    def found(x, a, b, bias):
        return products.low_rank(x, products.LowRankFactors(a, b).with_bias(bias))[0]

    lowest = worst(found, oracle, tensors, dtype)
    assert lowest > (LOWEST[dtype] if batch > 5 or dtype != torch.bfloat16 else 38)  # few numbers, uneven noise


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("spec", [btt_spec(768, 3072, rank=2), ragged(66, 133, (6, 11), (7, 19), 4)], ids=str)
def test_block_product(spec, dtype, device, monkeypatch):
    monkeypatch.setattr(select, "block_product_backend", lambda *_: "triton")
    (n, m), count = spec.sizes, spec.ranks[1]
    tensors = [
        draw(1000, spec.in_features, dtype=dtype, device=device),
        draw(n, count, dtype=dtype, device=device, scale=n**-0.5, seed=1),
        draw(count, m, dtype=dtype, device=device, seed=2),
        draw(spec.out_features, dtype=dtype, device=device, seed=3),
    ]

    def found(x, r_NK, l_KM, bias):
        return block_product(x, r_NK, l_KM, spec, bias)

    def exact(x, r_NK, l_KM, bias):
        return x @ materialize_blocks(spec, [r_NK[None], l_KM[..., None]]) + bias

    assert worst(found, exact, tensors, dtype) > LOWEST[dtype] - 4  # h and dh are rounded as well


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_lookup_rows(table, dtype, device):
    rows_l, cols_l, rank, rows_r, cols_r, count = table
    ids = torch.randint(0, rows_l * rows_r, (count,), generator=torch.Generator().manual_seed(4)).to(device)
    left = draw(rows_l, cols_l, rank, dtype=dtype, device=device)
    right = draw(rows_r, rank, cols_r, dtype=dtype, device=device, scale=rank**-0.5, seed=1)
    lowest = worst(
        lambda *t: triton_rows(ids, *t),
        lambda left, right: (left[ids // rows_r] @ right[ids % rows_r]).flatten(1),
        [left, right],
        dtype,
    )
    assert lowest > (LOWEST[dtype] if count > 11 or dtype != torch.bfloat16 else 38)


def test_layers_take_them_when_asked(device, monkeypatch):
    linear = TTSpec(768, 768, (12, 8, 8), (8, 8, 12), clip_ranks(30, (12, 8, 8, 8, 8, 12)))
    blocks = btt_spec(768, 768)
    table = TTMSpec(30522, 768, (16, 20, 10, 10), (4, 4, 8, 6), clip_ranks(30, (64, 80, 80, 60)))
    cores, rows_cores = (
        [draw(*s, dtype=torch.float32, device=device, scale=s[0] ** -0.5) for s in spec.core_shapes]
        for spec in (linear, table)
    )
    blocks_cores = [draw(*s, dtype=torch.float32, device=device) for s in blocks.core_shapes]
    x = draw(512, 768, dtype=torch.float32, device=device)
    ids = torch.arange(0, 30000, 7, device=device)
    from comera.kernels import triton, triton_blocks  # where it is installed

    calls = []
    of_blocks = ((triton_blocks, name) for name in ("to_components", "to_features"))
    launchers = (triton, "low_rank"), *of_blocks, (triton, "lookup_rows")
    for room, name in launchers:
        kernel = getattr(room, name)
        monkeypatch.setattr(room, name, lambda *t, name=name, kernel=kernel: calls.append(name) or kernel(*t))
    for setting, expected in (("all", [name for _, name in launchers]), ("none", [])):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        calls.clear()
        y = tt_linear(x, linear, cores, plan=plan_linear(linear, 512).using("low_rank"))
        z = btt_linear(x, blocks, blocks_cores)
        rows = ttm_lookup(ids, table, rows_cores, plan=plan_lookup(table, 4096).using((2, 4)))
        assert calls == expected
        assert decibels(y, x.double() @ materialize(linear, [c.double() for c in cores])) > 110
        assert decibels(z, x.double() @ materialize_blocks(blocks, [c.double() for c in blocks_cores])) > 110
        assert decibels(rows, materialize(table, [c.double() for c in rows_cores])[ids]) > 110
