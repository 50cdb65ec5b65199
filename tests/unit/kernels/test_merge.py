"""Tensor trains merged by the kernel against the same in float64 by torch, which is tested against dense weights."""

import pytest
import torch

from comera.kernels.cpp import compiler
from comera.ops import merge as room
from comera.ops.merge import merge
from comera.tt.shapes import tt_spec
from comera.tt.spec import TTSpec

from ...helpers.near import assert_within

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

SPECS = [
    TTSpec(in_modes=(2, 3), out_modes=(4,), ranks=(1, 2, 3, 1), in_features=6, out_features=4),
    TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=(1, 2, 1, 2, 1), in_features=5, out_features=6),
    TTSpec(in_modes=(4,), out_modes=(5,), ranks=(1, 3, 1), in_features=3, out_features=4),
    TTSpec(in_modes=(2, 2), out_modes=(3, 2), ranks=(1, 2, 0, 2, 1), in_features=4, out_features=6),
    TTSpec(in_modes=(3,), out_modes=(5, 7, 2), ranks=(1, 3, 4, 2, 1), in_features=3, out_features=69),
    TTSpec(in_modes=(4, 16, 8), out_modes=(8, 16, 4), ranks=(1, 4, 10, 6, 9, 4, 1), in_features=512, out_features=512),
    TTSpec(in_modes=(16, 13, 12), out_modes=(12, 13), ranks=(1, 9, 3, 10, 5, 1), in_features=2400, out_features=151),
    tt_spec(24, 30, order=6, rank=4),
    tt_spec(96, 200, order=8, rank=11),
]
THRESHOLD = 0.3
STACKED = room._Stacked


def trains_of(spec, count, dtype=torch.float32):
    """Cores, gates of which some are at or below the threshold, and biases of some."""
    torch.manual_seed(1)
    tensors = [
        [
            *(torch.randn(shape) / shape[0] ** 0.5 for shape in spec.core_shapes),
            *(torch.rand(r) for r in spec.inner_ranks),
        ]
        for _ in range(count)
    ]
    biases = [torch.randn(spec.out_features) if k != 1 else None for k in range(count)]
    tensors = [[t.to(dtype).requires_grad_() for t in train] for train in tensors]
    return tensors, [None if bias is None else bias.to(dtype).requires_grad_() for bias in biases]


def run(specs, given, biases, dtype, reached=lambda k: True):
    """Factors, and the gradients of all tensors and biases from random ones of the factors that are `reached`."""
    factors = [factor for pair in merge(specs, given, THRESHOLD, dtype, biases) for factor in pair]
    generator = torch.Generator().manual_seed(2)
    came = [torch.randn(factor.shape, generator=generator).to(dtype) for factor in factors]
    leaves = [t for train in given for t in train] + [bias for bias in biases if bias is not None]
    some = [k for k in range(len(factors)) if reached(k)]
    grads = torch.autograd.grad([factors[k] for k in some], leaves, [came[k] for k in some], allow_unused=True)
    return [factor.detach() for factor in factors], grads


def assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_within(one, other, 3e-6)


@pytest.fixture(autouse=True)
def by_the_kernel(monkeypatch):
    """A float32 merge that goes another way fails."""
    monkeypatch.setenv("COMERA_KERNELS", "merge")

    def only_float64(specs, flat, threshold):
        assert flat[0].dtype == torch.float64
        return STACKED(specs, flat, threshold)

    monkeypatch.setattr(room, "_Stacked", only_float64)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_factors_and_gradients(spec):
    results = [run([spec] * 3, *trains_of(spec, 3, dtype), dtype) for dtype in (torch.float32, torch.float64)]
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)


@pytest.mark.parametrize("missing", [0, 1, 2, 5], ids=lambda k: f"half {k}")
def test_factors_whose_gradient_never_came(missing):
    spec = SPECS[-2]
    results = [
        run([spec] * 3, *trains_of(spec, 3, dtype), dtype, lambda k: k != missing)
        for dtype in (torch.float32, torch.float64)
    ]
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)


def test_a_chain_without_any_gradient_has_none():
    spec = SPECS[-2]
    _, grads = run([spec] * 3, *trains_of(spec, 3), torch.float32, lambda k: k not in (2, 3))
    width = 2 * spec.order - 1
    assert [grad is None for grad in grads] == [False] * width + [True] * width + [False] * (width + 2)


def test_trains_of_other_ranks():
    specs = [
        TTSpec(in_modes=(2, 3), out_modes=(3, 2), ranks=ranks, in_features=5, out_features=6)
        for ranks in [(1, 2, 0, 2, 1), (1, 2, 5, 0, 1), (1, 2, 2, 2, 1)]
    ]
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors = [trains_of(spec, 1, dtype)[0][0] for spec in specs]
        results.append(run(specs, tensors, [None] * 3, dtype))
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)


def test_the_same_to_the_bit_for_any_number_of_threads():
    spec = SPECS[-1]
    made = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        factors, grads = run([spec] * 3, *trains_of(spec, 3), torch.float32)
        made.append([*factors, *grads])
    assert all(torch.equal(one, other) for again in made[1:] for one, other in zip(made[0], again, strict=True))


def test_a_bias_need_not_stand_in_a_row():
    spec = SPECS[-1]
    results = []
    for dtype in (torch.float32, torch.float64):
        tensors, _ = trains_of(spec, 2, dtype)
        columns = torch.linspace(-1, 1, 2 * spec.out_features, dtype=dtype).view(-1, 2)
        results.append(run([spec] * 2, tensors, [column.requires_grad_() for column in columns.unbind(1)], dtype))
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)


def test_derivatives_of_derivatives_are_torchs(monkeypatch):
    monkeypatch.setattr(room, "_Stacked", STACKED)
    spec = SPECS[1]
    tensors, _ = trains_of(spec, 2)

    def second(dtype):
        given = [[t.detach().to(dtype).requires_grad_() for t in train] for train in tensors]
        factors = [factor for pair in merge([spec] * 2, given, THRESHOLD, dtype, [None] * 2) for factor in pair]
        flat = [t for train in given for t in train]
        first = torch.autograd.grad(sum(factor.square().sum() for factor in factors), flat, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), flat)

    found, expected = second(torch.float32), second(torch.float64)
    assert len(found) == sum(map(len, tensors))
    assert_near(found, expected)
