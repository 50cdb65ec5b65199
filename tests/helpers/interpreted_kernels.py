"""The Triton kernels under Triton's interpreter, against plain PyTorch in float64: test_triton.py runs this file.

TRITON_INTERPRET=1 must be set before triton is imported, which other tests of the same process may have done.
"""

import pytest
import torch

from comera.kernels import select, triton
from comera.ops import low_rank as products
from comera.ops.block_product import block_product
from comera.ops.lookup.kernel import triton_rows
from comera.tt.blocks import materialize_blocks
from comera.tt.shapes import btt_spec
from comera.tt.spec import BTTSpec

from .oracle import signal_to_noise as decibels
from .specs import ragged

# (batch, in, out, rank): single entries, odd ones, one more and one less than a block, several blocks
SHAPES = [(1, 1, 1, 1), (5, 7, 11, 3), (64, 32, 64, 16), (65, 33, 129, 30), (63, 100, 65, 1), (130, 48, 200, 64)]
# Decibels of signal to noise. The interpreter cuts bfloat16 off where a GPU rounds: that takes 6 of them.
LOWEST = {torch.float32: 120, torch.bfloat16: 38, torch.float16: 61}


def draw(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def operands(batch, features, out_features, rank, *, dtype=torch.float32, bias=True):
    return [
        draw(batch, features, dtype=dtype),
        draw(rank, features, dtype=dtype, scale=features**-0.5, seed=1),
        draw(rank, out_features, dtype=dtype, scale=rank**-0.5, seed=2),
        draw(out_features, dtype=dtype, seed=3) if bias else None,
    ]


def oracle(x, a, b, bias=None):
    return (x @ a.t()) @ b if bias is None else (x @ a.t()) @ b + bias


@pytest.fixture(autouse=True)
def on_the_cpu_too(monkeypatch):
    for name in ("low_rank", "block_product"):
        monkeypatch.setattr(select, f"{name}_backend", lambda *_: "triton")


def low_rank(x, a, b, bias=None):
    return products.low_rank(x, products.LowRankFactors(a, b).with_bias(bias))[0]


def values_and_gradients(function, tensors, dtype):
    y = function(*tensors)
    dy = draw(*y.shape, dtype=dtype, seed=7).detach().to(y.dtype)
    return [y, *torch.autograd.grad(y, [t for t in tensors if t is not None], dy)]


def doubles(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_low_rank_product_and_all_gradients(shape, dtype, bias):
    tensors = operands(*shape, dtype=dtype, bias=bias)
    found = values_and_gradients(low_rank, tensors, dtype)
    exact = values_and_gradients(oracle, doubles(tensors), dtype)
    assert [t.dtype for t in found] == [dtype] * len(found)
    assert min(decibels(a, b) for a, b in zip(found, exact, strict=True)) > LOWEST[dtype]


@pytest.mark.parametrize("processors", [1, 64])
def test_programs_that_share_a_tile_of_rows_give_the_same(processors, monkeypatch):
    tensors = operands(20, 40, 500, 12)
    monkeypatch.setattr(triton, "_processors", lambda device: processors)
    found = values_and_gradients(low_rank, tensors, torch.float32)
    exact = values_and_gradients(oracle, doubles(tensors), torch.float32)
    assert min(decibels(a, b) for a, b in zip(found, exact, strict=True)) > LOWEST[torch.float32]


def test_strided_input_and_expanded_gradient():
    x, a, b, bias = operands(10, 24, 18, 5)
    for view in (x.detach().t().contiguous().t(), torch.cat([x, x], 1).detach()[:, :24], x.detach()[:1].expand(10, 24)):
        found = torch.autograd.grad(low_rank(view, a, b, bias).sum(), [a, b, bias])
        exact = torch.autograd.grad(oracle(*(t.double() for t in (view, a, b, bias))).sum(), [a, b, bias])
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_empty_batch():
    tensors = operands(0, 6, 4, 3)
    found = values_and_gradients(low_rank, tensors, torch.float32)
    assert [tuple(t.shape) for t in found] == [(0, 4), (0, 6), (3, 6), (3, 4), (4,)]
    assert not any(t.any() for t in found)


@pytest.mark.parametrize("wanted", range(4))
def test_only_the_wanted_gradients_are_made(wanted):
    tensors = operands(6, 8, 10, 3)
    for k, tensor in enumerate(tensors):
        tensor.requires_grad_(k == wanted)
    low_rank(*tensors).sum().backward()
    double = doubles(tensors)
    oracle(*double).sum().backward()
    assert [t.grad is not None for t in tensors] == [k == wanted for k in range(4)]
    torch.testing.assert_close(tensors[wanted].grad.double(), double[wanted].grad, rtol=1e-5, atol=1e-5)


def test_second_derivatives_and_several_weights_at_once():
    x, a, b, bias = operands(9, 6, 5, 3)
    pair = [products.LowRankFactors(a, b), products.LowRankFactors(a, b).with_bias(bias)]

    def twice(way):
        (dx,) = torch.autograd.grad(way().square().sum(), [x], create_graph=True)
        return torch.autograd.grad(dx.square().sum(), [x, a, b])

    found = twice(lambda: torch.cat(products.low_rank(x, *pair), 1))
    exact = twice(lambda: torch.cat([oracle(x, a, b), oracle(x, a, b, bias)], 1))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


BLOCKS = [
    (btt_spec(12, 20, rank=2), 65),
    (btt_spec(40, 70, blocks=(1, 1), rank=33), 5),
    (BTTSpec(1, 1, (1, 1), (1, 1), 1), 1),
    (BTTSpec(8, 9, (5, 7), (9, 8), 2), 7),  # blocks beyond the features
    (ragged(66, 133, (6, 11), (7, 19), 4), 130),
    (BTTSpec(24, 24, (3, 8), (3, 8), ((0, 2, 8), (0, 0, 0), (0, 5, 1))), 70),
]


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize(("spec", "batch"), BLOCKS, ids=str)
def test_block_product_and_all_gradients(spec, batch, dtype):
    (n, m), count = spec.sizes, spec.ranks[1]
    x, bias = draw(batch, spec.in_features, dtype=dtype), draw(spec.out_features, dtype=dtype, seed=3)
    tensors = [x, draw(n, count, dtype=dtype, seed=1), draw(count, m, dtype=dtype, seed=2), bias]

    def exact_product(x, r_NK, l_KM, bias):
        return x @ materialize_blocks(spec, [r_NK[None], l_KM[..., None]]) + bias

    found = values_and_gradients(lambda x, r_NK, l_KM, b: block_product(x, r_NK, l_KM, spec, b), tensors, dtype)
    exact = values_and_gradients(exact_product, doubles(tensors), dtype)
    assert [t.dtype for t in found] == [dtype] * 5
    assert min(decibels(a, b) for a, b in zip(found, exact, strict=True)) > LOWEST[dtype] - 4


@pytest.mark.parametrize("wanted", range(4))
def test_only_the_wanted_gradients_of_blocks_are_made(wanted):
    spec, batch = BLOCKS[4]
    (n, m), count = spec.sizes, spec.ranks[1]
    tensors = [draw(batch, 66), draw(n, count), draw(count, m), draw(133)]
    expected = torch.autograd.grad(block_product(*tensors[:3], spec, tensors[3]).sum(), tensors)
    for k, tensor in enumerate(tensors):
        tensor.requires_grad_(k == wanted)
    block_product(*tensors[:3], spec, tensors[3]).sum().backward()
    assert [t.grad is not None for t in tensors] == [k == wanted for k in range(4)]
    assert torch.equal(tensors[wanted].grad, expected[wanted])


def test_blocks_of_an_empty_batch():
    spec, _ = BLOCKS[0]
    tensors = [draw(0, 12), draw(spec.sizes[0], spec.ranks[1]), draw(spec.ranks[1], spec.sizes[1])]
    found = values_and_gradients(lambda *t: block_product(*t, spec), tensors, torch.float32)
    assert found[0].shape == (0, 20)
    assert not any(t.any() for t in found)


# (rows of L, columns of L, rank, rows of R, columns of R, ids)
TABLES = [(1, 1, 1, 1, 1, 1), (5, 3, 7, 4, 6, 50), (20, 16, 30, 10, 48, 9), (6, 8, 32, 9, 8, 40), (3, 5, 1, 2, 1, 11)]


def factors(rows_l, cols_l, rank, rows_r, cols_r, count, dtype=torch.float32):
    ids = torch.randint(0, rows_l * rows_r, (count,), generator=torch.Generator().manual_seed(4))
    return (
        ids,
        draw(rows_l, cols_l, rank, dtype=dtype),
        draw(rows_r, rank, cols_r, dtype=dtype, scale=rank**-0.5, seed=1),
    )


def gathered(ids, left, right):
    return (left[ids // right.shape[0]] @ right[ids % right.shape[0]]).flatten(1)


@pytest.mark.parametrize("dtype", LOWEST, ids=str)
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_rows_and_gradients_with_repeated_ids(table, dtype):
    ids, left, right = factors(*table, dtype=dtype)
    of_ids = ids.to(torch.int32 if dtype == torch.float16 else torch.int64)
    found = values_and_gradients(lambda *t: triton_rows(of_ids, *t), [left, right], dtype)
    exact = values_and_gradients(lambda *t: gathered(ids, *t), doubles([left, right]), dtype)
    assert [t.dtype for t in found] == [dtype] * 3
    assert min(decibels(a, b) for a, b in zip(found, exact, strict=True)) > LOWEST[dtype]


def test_no_ids_and_rank_zero():
    ids, left, right = factors(4, 3, 2, 5, 2, 6)
    found = values_and_gradients(lambda *t: triton_rows(ids[:0], *t), [left, right], torch.float32)
    assert found[0].shape == (0, 6)
    assert not any(t.any() for t in found)
    empty = triton_rows(ids, left[:, :, :0], right[:, :0])
    assert torch.equal(empty, torch.zeros(6, 6))
