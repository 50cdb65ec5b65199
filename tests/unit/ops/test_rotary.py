"""Rotary embedding in one pass: values and gradients against transformers' own in float64, by kernel and by torch."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from comera.kernels import select
from comera.kernels.cpp import rotary as kernels
from comera.ops.rotary import rotary

needs_kernels = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)

# batch, heads of queries and keys, length, width, columns that turn
SIZES = [
    (2, 4, 2, 9, 64, 64),
    (1, 3, 3, 1, 10, 10),
    (3, 2, 1, 7, 34, 34),
    (2, 2, 2, 5, 40, 16),
    (2, 1, 1, 130, 6, 2),
    (1, 2, 2, 3, 8, 0),
    (0, 2, 1, 4, 8, 8),
    (2, 2, 1, 0, 8, 8),
]


def operands(batch, heads, groups, length, width, columns, samples=1, dtype=torch.float32):
    """q, k as the layers before lay them out, cos and sin, whose halves differ, and gradients of both results."""
    torch.manual_seed(length + width)
    each = (torch.randn(batch, length, n, width, dtype=dtype) for n in (heads, groups) * 2)
    q, k, dq, dk = (t.transpose(1, 2) for t in each)
    angles = 9 * torch.rand(samples, length, columns, dtype=dtype)
    return q.requires_grad_(), k.requires_grad_(), angles.cos(), angles.sin(), dq, dk


def results(function, q, k, cos, sin, dq, dk):
    turned = function(q, k, cos, sin)
    return *turned, *torch.autograd.grad(turned, (q, k), (dq, dk))


def exact(q, k, cos, sin, dq, dk):
    """By transformers, in float64; columns beyond those of cos stay."""

    def plain(q, k, cos, sin):
        columns = cos.shape[-1]
        turned = apply_rotary_pos_emb(q[..., :columns], k[..., :columns], cos, sin)
        return tuple(torch.cat((y, x[..., columns:]), -1) for y, x in zip(turned, (q, k), strict=True))

    doubles = [t.detach().double() for t in (q, k, cos, sin, dq, dk)]
    return results(plain, *(t.requires_grad_() for t in doubles[:2]), *doubles[2:])


@pytest.mark.parametrize("setting", [pytest.param("all", marks=needs_kernels), "none"])
@pytest.mark.parametrize("samples", [1, None], ids=["one table", "a table a sample"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_agree_with_transformers(sizes, samples, setting, monkeypatch):
    monkeypatch.setenv("COMERA_KERNELS", setting)
    calls, whole = [], kernels.rotary
    monkeypatch.setattr(kernels, "rotary", lambda *args: calls.append(args[-1]) or whole(*args))
    given = operands(*sizes, samples=samples or sizes[0])
    found = results(rotary, *given)
    assert calls == ([False, True] if setting == "all" else [])
    for one, other in zip(found, exact(*given), strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_any_layout_is_read_and_written_without_copies():
    q, k, cos, sin, dq, dk = operands(2, 4, 2, 9, 16, 16)
    expected = results(rotary, q, k, cos, sin, dq, dk)
    assert all(t.transpose(1, 2).is_contiguous() for t in expected)  # so that heads flatten into features
    wide = torch.stack([q.detach(), q.detach()], 3)[:, :, :, 1].requires_grad_()
    backward = dk.flip(2).contiguous().flip(2)
    found = results(rotary, wide, k.detach().contiguous().requires_grad_(), cos, sin, dq.contiguous(), backward)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@needs_kernels
def test_the_number_of_threads_changes_no_bit():
    given, found = operands(2, 4, 2, 70, 64, 64), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(results(rotary, *given))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_derivatives_of_any_order():
    q, k, cos, sin, *_ = operands(1, 2, 1, 3, 6, 4, dtype=torch.float64)
    assert gradcheck(rotary, (q, k, cos, sin))
    assert gradgradcheck(rotary, (q, k, cos, sin))


@needs_kernels
def test_second_derivatives_by_the_kernel():
    q, k, cos, sin, *_ = operands(2, 2, 1, 5, 8, 8)

    def twice(function):
        loss = sum(y.pow(3).sum() for y in function(q, k, cos, sin))
        first = torch.autograd.grad(loss, (q, k), create_graph=True)
        return *first, *torch.autograd.grad(sum(g.square().sum() for g in first), (q, k))

    for one, other in zip(twice(rotary), twice(apply_rotary_pos_emb), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_one_of_the_two_may_need_no_gradient():
    q, k, cos, sin, dq, dk = operands(2, 4, 2, 9, 16, 16)
    _, _, expected, _ = results(rotary, q, k, cos, sin, dq, dk)
    turned, still = rotary(q, k.detach(), cos, sin)
    (found,) = torch.autograd.grad(turned, q, dq)
    assert torch.equal(found, expected)
    assert still.shape == k.shape


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_half_precision_is_torchs(dtypes):
    q, k, cos, sin, *_ = operands(2, 4, 2, 9, 16, 16)
    given = [t.detach().to(d) for t, d in zip((q, k, cos, sin), [dtypes[0]] * 2 + [dtypes[1]] * 2, strict=True)]
    for one, other in zip(rotary(*given), apply_rotary_pos_emb(*given), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_learned_angles_get_their_gradient():
    q, k, cos, sin, dq, dk = operands(2, 4, 2, 9, 16, 16)
    cos.requires_grad_()
    found, exact = (torch.autograd.grad(f(q, k, cos, sin), cos, (dq, dk)) for f in (rotary, apply_rotary_pos_emb))
    torch.testing.assert_close(found, exact)


def test_shapes_that_do_not_fit_are_reported():
    q, k, cos, sin, *_ = operands(2, 4, 2, 9, 16, 16)
    for wrong in ((q, k, cos[:, :4], sin[:, :4]), (q, k[..., :8], cos, sin), (q, k, cos[..., :6], sin)):
        with pytest.raises(RuntimeError, match="must match"):
            rotary(*wrong)
