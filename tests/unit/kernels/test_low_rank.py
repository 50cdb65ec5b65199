"""The low-rank products against float64, and where they are used."""

from functools import partial

import pytest
import torch

from comera.kernels.cpp import compiler
from comera.kernels.cpp.low_rank import low_rank, low_rank_backward, low_rank_output
from comera.kernels.select import LOW_RANK_LEAST_ROWS as LEAST_ROWS
from comera.kernels.select import LOW_RANK_MOST_RANK as MOST_RANK
from comera.kernels.select import low_rank_backend
from comera.memory.replay import contexts
from comera.ops import low_rank as ours

from ...helpers.near import assert_all_equal, assert_within

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

# samples, features in, out and rank of each weight, bias
SHAPES = [
    (128, 768, [(768, 30), (64, 30), (65, 32)], True),
    (100, 77, [(45, 7), (5, 33)], True),
    (200, 20, [(16, 5), (130, 16)], False),
    (133, 600, [(100, 90)], True),
    (49, 16, [(33, 33), (1, 0)], True),
    (10, 100, [(3, 0)], False),
    (1, 5, [(4, 1)], True),
    (7, 1, [(2, 1), (1, 9)], True),
    (0, 8, [(3, 3)], True),
    (3, 0, [(5, 2)], True),
]


def operands(samples, features, weights, bias):
    torch.manual_seed(samples + features)
    as_ = [torch.randn(rank, features) / max(1, features) ** 0.5 for _, rank in weights]
    bs = [torch.randn(int(bias) + rank, out) for out, rank in weights]
    return torch.randn(samples, features), as_, bs, [torch.randn(samples, out) for out, _ in weights]


def reference(x, as_, bs, dys):
    """All y, then dx, all ∂A and all ∂B, in float64 by torch's autograd."""
    x = x.double().requires_grad_()
    as_, bs = [a.double().requires_grad_() for a in as_], [b.double().requires_grad_() for b in bs]
    ys = [x @ a.t() @ b[len(b) - len(a) :] + b[: len(b) - len(a)].sum(0) for a, b in zip(as_, bs, strict=True)]
    return [y.detach() for y in ys], torch.autograd.grad(ys, [x, *as_, *bs], [dy.double() for dy in dys])


assert_near = partial(assert_within, share=2e-6)  # sums of up to 768 float32 products


def run(x, as_, bs, dys):
    p, *ys = low_rank(x, as_, bs)
    return [*ys, *low_rank_backward(x, p, dys, as_, bs, True, True, True)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape):
    x, as_, bs, dys = operands(*shape)
    ys, grads = reference(x, as_, bs, dys)
    found = run(x, as_, bs, dys)
    assert len(found) == len(ys) + len(grads)
    for each, expected in zip(found, (*ys, *grads), strict=True):
        assert_near(each, expected)
    p, *ys = low_rank(x, as_, bs)
    assert_all_equal(low_rank_output(p, [len(a) for a in as_], bs), ys)


def test_only_what_is_asked_for():
    x, as_, bs, dys = operands(*SHAPES[0])
    p, *_ = low_rank(x, as_, bs)
    dx, *factors = low_rank_backward(x, p, dys, as_, bs, True, True, True)
    for wants in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        found = low_rank_backward(x, p, dys, as_, bs, *wants)
        assert_all_equal(found, [dx] * wants[0] + factors[:3] * wants[1] + factors[3:] * wants[2])
    some = [dys[0], None, dys[2]]
    _, (dx, *_) = reference(x, as_, bs, [dys[0], torch.zeros_like(dys[1]), dys[2]])
    found = low_rank_backward(x, p, some, as_, bs, True, True, True)
    assert len(found) == 5
    assert_near(found[0], dx)
    assert_all_equal(found[1:], [factors[k] for k in (0, 2, 3, 5)])


def test_operands_need_not_be_contiguous():
    x, as_, bs, dys = operands(*SHAPES[1])
    transposed = [[t.t().contiguous().t() for t in ts] for ts in ([x], as_, bs, dys)]
    assert not transposed[0][0].is_contiguous()
    assert_all_equal(run(transposed[0][0], *transposed[1:]), run(x, as_, bs, dys))


def test_the_same_to_the_bit_for_any_number_of_threads():
    x, as_, bs, dys = operands(500, 300, [(200, 30), (65, 9)], True)
    made = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        made.append(run(x, as_, bs, dys))
    for each in made[1:]:
        assert_all_equal(each, made[0])


def test_nan_and_inf_stay_in_their_row():
    x, as_, bs, _ = operands(*SHAPES[0])
    x[3, 5], x[7, 0] = float("inf"), float("nan")
    _, *ys = low_rank(x, as_, bs)
    for y in ys:
        assert (~y.isfinite()).any(1).nonzero().flatten().tolist() == [3, 7]


def test_used_where_it_is_faster():
    a, b, x = torch.randn(MOST_RANK, 8), torch.randn(MOST_RANK, 5), torch.randn(LEAST_ROWS, 8)
    assert low_rank_backend(x, [a, b]) == "cpp"
    assert low_rank_backend(x[1:], [a, b]) == "torch"
    assert low_rank_backend(x, [torch.randn(MOST_RANK + 1, 8), b]) == "torch"
    assert low_rank_backend(x.double(), [a.double(), b.double()]) == "torch"


def layer():
    torch.manual_seed(0)
    x = torch.randn(LEAST_ROWS, 20, requires_grad=True)
    factors = [ours.LowRankFactors(torch.randn(5, 20), torch.randn(6, 30)) for _ in range(3)]
    return x, factors, [x, *(t.requires_grad_() for pair in factors for t in pair)]


def test_layers_use_it(monkeypatch):
    x, factors, flat = layer()
    results, calls = [], []
    for name in ("low_rank", "low_rank_backward"):
        kernel = getattr(ours.cpp, name)
        monkeypatch.setattr(ours.cpp, name, lambda *args, k=kernel, n=name: calls.append(n) or k(*args))
    for setting in ("low_rank", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        ys = ours.low_rank(x, *factors)
        losses = [y.square().sum() for y in (ys[0], ys[2])]
        grads = torch.autograd.grad(losses, flat, allow_unused=True)
        results.append([*(y.detach() for y in ys), *grads])
    assert calls == ["low_rank", "low_rank_backward"]
    for one, other in zip(*results, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def test_gradients_of_gradients_do_not():
    x, factors, flat = layer()
    (dx,) = torch.autograd.grad(ours.low_rank(x, *factors)[0].square().sum(), [x], create_graph=True)
    (found,) = torch.autograd.grad(dx.square().sum(), flat[1:2])
    assert found.abs().max() > 0


def test_a_replay_does_not_project_again(monkeypatch):
    x, factors, flat = layer()
    calls = []
    for name in ("low_rank", "low_rank_output"):
        kernel = getattr(ours.cpp, name)
        monkeypatch.setattr(ours.cpp, name, lambda *args, k=kernel, n=name: calls.append(n) or k(*args))

    def gradients(run):
        ys = run(x, *factors)
        return [*ys, *torch.autograd.grad([y.square().sum() for y in ys], flat)]

    plain = gradients(ours.low_rank)
    again = gradients(
        lambda *args: torch.utils.checkpoint.checkpoint(
            lambda *args: tuple(y * 1 for y in ours.low_rank(*args)), *args, use_reentrant=False, context_fn=contexts
        )
    )
    assert calls == ["low_rank", "low_rank", "low_rank_output"]
    assert_all_equal(again, plain)
