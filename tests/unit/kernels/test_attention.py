"""The attention kernel: values and all gradients against float64, and where ops.attention uses it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from comera.kernels import select
from comera.kernels.cpp import attention as kernels
from comera.kernels.cpp.residual_norm import dropout as dropped
from comera.kernels.cpp.residual_norm import rounded
from comera.memory.recompute import recompute_
from comera.nn.linear import TTLinear
from comera.ops.attention import attention
from comera.tt.spec import TTSpec

pytestmark = pytest.mark.skipif(
    select.unavailable_reason() is not None, reason=f"no C++ kernels: {select.unavailable_reason()}"
)
SEED = torch.tensor(-(2**40) - 7)


def rows(batch, length, heads, width):
    """(batch, heads, length, width) as the layers before attention lay it out."""
    return torch.randn(batch, length, heads, width).transpose(1, 2)


def operands(batch, heads, groups, queries, keys, width, value_width=None):
    torch.manual_seed(batch + 3 * queries + keys + width)
    value_width = width if value_width is None else value_width
    shapes = (queries, heads, width), (keys, groups, width), (keys, groups, value_width), (queries, heads, value_width)
    return [rows(batch, *shape) for shape in shapes]


def factors(q, k, seed, p):
    """What dropout multiplies each probability with: of uniform ones, made visible by values one key each."""
    keys = k.shape[2]
    if seed is None:
        return torch.ones((), dtype=torch.float64)
    each = torch.eye(keys).expand(*k.shape[:2], keys, keys)
    seen, _ = kernels.attention(torch.zeros_like(q), torch.zeros_like(k), each, None, seed, p, 1.0, False)
    return (seen > 0).double() * rounded(p)[1]


def exact(q, k, v, do, mask, factors, scale, is_causal=False):
    q, k, v = (t.double().requires_grad_() for t in (q, k, v))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    if mask is not None:
        scores = scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    hidden = (scores == -torch.inf).all(-1, keepdim=True)
    p = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    o = (p * factors) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do.double())


def kernel_results(q, k, v, do, mask=None, seed=None, p=0.0, scale=None, is_causal=False):
    settings = (mask, seed, p, q.shape[-1] ** -0.5 if scale is None else scale, is_causal)
    o, norms = kernels.attention(q, k, v, *settings)
    return o, *kernels.attention_backward(do, o, norms, q, k, v, *settings)


def check(q, k, v, do, mask=None, p=0.0, scale=None, is_causal=False):
    seed = SEED if p else None
    found = kernel_results(q, k, v, do, mask, seed, p, scale, is_causal)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for one, other in zip(found, exact(q, k, v, do, mask, factors(q, k, seed, p), scale, is_causal), strict=True):
        assert one.shape == other.shape
        assert one.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(one.double(), other, rtol=2e-6, atol=4e-6)  # of values around 1


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 4, 4, 128, 128, 64),
        (1, 2, 2, 70, 33, 40, 24),
        (3, 2, 2, 1, 7, 5),
        (2, 3, 3, 9, 1, 64),
        (2, 1, 1, 65, 200, 1),
        (1, 1, 1, 257, 97, 5, 8),
        (2, 6, 2, 66, 100, 16),
        (0, 2, 2, 5, 6, 8),
        (2, 2, 2, 0, 6, 8),
        (2, 2, 2, 5, 0, 8),
    ],
    ids=str,
)
def test_values_and_gradients_agree_with_float64(sizes, p):
    check(*operands(*sizes), p=p)


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 130), (2, 1, 70, 130), (2, 4, 70, 130), (1, 4, 1, 130), (70, 130), (70, 1)]
)
def test_masks_are_broadcast(shape, p):
    q, k, v, do = operands(2, 4, 2, 70, 130, 16)
    check(q, k, v, do, torch.randn(shape), p)
    hidden = torch.zeros(shape).masked_fill_(torch.rand(shape) < 0.4, -torch.inf)
    hidden[0] = -torch.inf
    check(q, k, v, do, hidden, p)
    check(q, k, v, do, hidden.transpose(-1, -2).contiguous().transpose(-1, -2), p)


def test_queries_without_any_key_have_no_part():
    q, k, v, do = operands(2, 2, 2, 70, 130, 16)
    hidden = torch.zeros(2, 1, 70, 130)
    hidden[1, :, 3] = -torch.inf
    o, dq, dk, dv = kernel_results(q, k, v, do, hidden)
    assert not o[1, :, 3].any()
    assert not dq[1, :, 3].any()
    do[1, :, 3] = 7.0
    for one, other in zip(kernel_results(q, k, v, do, hidden)[2:], (dk, dv), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("queries", "keys"), [(200, 150), (150, 200), (64, 64), (3, 5)])
def test_a_query_does_not_see_later_keys(queries, keys):
    check(*operands(2, 4, 2, queries, keys, 24), p=0.2, is_causal=True)


def test_large_scores_and_masks_neither_overflow_nor_lose_digits():
    torch.manual_seed(0)
    q, k = (torch.randint(-9, 10, (2, 2, 150, 16)).float() * 64 for _ in range(2))  # whole: their products are exact
    v, do = torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    o, *gradients = kernel_results(q, k, v, do, scale=0.25)
    assert (q @ k.mT * 0.25).max() > 100_000
    expected, *slopes = exact(q, k, v, do, None, 1.0, 0.25)
    torch.testing.assert_close(o.double(), expected, rtol=1e-6, atol=1e-6)
    for found, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(found.double(), slope, rtol=1e-5, atol=1e-5 * q.max().item())
    least = torch.full((1, 1, 1, 150), torch.finfo(torch.float32).min)  # hides all keys alike
    check(*operands(2, 2, 2, 150, 150, 16), mask=least)


def test_nan_stays_where_it_was():
    q, k, v, do = operands(1, 2, 2, 70, 100, 16)
    q[0, 1, 66, 3] = torch.nan
    o, dq, dk, _ = kernel_results(q, k, v, do)
    for rows_of in (o, dq):
        assert rows_of[0, 1, 66].isnan().all()
        assert rows_of.isnan().sum() == 16
    assert dk[0, 1].isnan().all()
    assert not dk[0, 0].isnan().any()
    q[0, 1, 66, 3], k[0, 0, 99, 0] = 0.0, torch.inf
    seeing = 16 * int((q[0, 0, :, 0] > 0).sum())  # scores of +inf; of the others that key has no part
    assert kernel_results(q, k, v, do)[0][0].isnan().sum(dim=(1, 2)).tolist() == [seeing, 0]


def test_strides_are_free():
    q, k, v, do = operands(2, 4, 2, 70, 50, 16)
    wide = torch.randn(2, 70, 3, 4, 16)
    wide[:, :, 1] = q.transpose(1, 2)
    strided = (wide[:, :, 1].transpose(1, 2), k.mT.contiguous().mT, v.contiguous(), torch.stack([do, do], -1)[..., 0])
    for one, other in zip(kernel_results(*strided), kernel_results(q, k, v, do), strict=True):
        assert torch.equal(one, other)
    one_for_all = torch.ones(()).expand(do.shape)
    check(q, k, v, one_for_all)


def test_one_seed_is_one_mask_which_is_that_of_dropout():
    q, k, v, do = operands(2, 3, 3, 128, 70, 16)
    first, again = (kernel_results(q, k, v, do, None, SEED, 0.3) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], kernel_results(q, k, v, do, None, SEED + 1, 0.3)[0])
    mask = factors(q, k, SEED, 0.3)
    torch.testing.assert_close(mask.mT.float(), dropped(torch.ones(2, 3, 70, 128), SEED, 0.3))
    assert abs((mask > 0).double().mean().item() - 0.7) < 5 * (0.21 / mask.numel()) ** 0.5


@pytest.mark.parametrize("heads", [1, 6])
def test_the_number_of_threads_changes_no_bit(heads):
    given = operands(1, heads, 1, 100, 130, 20)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(kernel_results(*given, None, SEED, 0.2))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_flops_are_counted():
    q, k, v, do = operands(2, 4, 2, 70, 50, 16, 8)
    with FlopCounterMode(display=False) as counter:
        kernel_results(q, k, v, do)
    assert counter.get_total_flops() == 2 * 2 * 4 * 70 * 50 * (4 * 16 + 3 * 8)


def counted(monkeypatch):
    calls, whole = [], kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args: calls.append(args) or whole(*args))
    return calls


@pytest.mark.parametrize("kind", ["none", "bool", "expanded", "open", "added", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_the_layer_uses_it(kind, groups, p, monkeypatch):
    calls = counted(monkeypatch)
    q, k, v, do = operands(8, 4, groups, 40, 70, 16)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    mask = {
        "bool": torch.rand(8, 1, 40, 70) > 0.3,
        "expanded": (torch.rand(8, 1, 1, 70) > 0.3).expand(8, 4, 40, 70),
        "open": torch.ones(40, 70, dtype=torch.bool),
        "added": torch.randn(1, 4, 40, 70).double(),
    }.get(kind)
    torch.manual_seed(1)
    o = attention(q, k, v, mask, dropout=p, is_causal=kind == "causal", scale=0.3)
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    assert len(calls) == 1
    added = mask
    if mask is not None and mask.dtype == torch.bool:
        added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    monkeypatch.undo()
    given = tuple(t.detach() for t in (q, k, v))
    seed = calls[0][4]
    expected = exact(*given, do, added, factors(*given[:2], seed, p), 0.3, kind == "causal")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().double(), other, rtol=2e-6, atol=2e-6)


def test_without_it_torch_takes_over(monkeypatch):
    calls = counted(monkeypatch)
    q, k, v, do = (t.requires_grad_() for t in operands(2, 4, 4, 40, 70, 16))
    results = []
    for setting in ("all", "none"):
        monkeypatch.setenv("COMERA_KERNELS", setting)
        o = attention(q, k, v)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
        assert attention(q, k, v, dropout=0.1).shape == o.shape
    assert len(calls) == 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_what_it_does_not_support_is_torchs(monkeypatch):
    calls = counted(monkeypatch)
    q, k, v, _ = operands(2, 4, 4, 40, 70, 16)
    torch.testing.assert_close(attention(q, k, v), F.scaled_dot_product_attention(q, k, v), rtol=0, atol=0)
    q.requires_grad_()
    assert attention(q[:, :, :8], k, v).shape == (2, 4, 8, 16)  # few queries: torch's is as fast
    assert attention(q.double(), k.double(), v.double(), dropout=0.1).dtype == torch.float64
    assert attention(q, k[:1], v[:1]).shape == q.shape  # one sample's keys for all
    assert attention(q, k, v, is_causal=True).shape == q.shape  # few queries in all
    assert not calls
    many = operands(8, 4, 2, 40, 40, 16)[:3]
    expected = F.scaled_dot_product_attention(*many, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(attention(*many, is_causal=True), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1  # without gradients too


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_beside_is_causal_is_refused_on_every_path(dtype):
    q, k, v, _ = operands(2, 4, 4, 40, 40, 16)
    given = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    for dropout in (0.0, 0.1):
        with pytest.raises(ValueError, match=r"either a mask or is_causal, got both, the mask of shape \(40, 40\)"):
            attention(*given, torch.zeros(40, 40, dtype=dtype), dropout=dropout, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_without_arithmetic_is_computed_in_float32(is_causal, autocast, monkeypatch):
    monkeypatch.setattr("comera.ops.attention.kernel_dtype", lambda *_: torch.float32)
    calls = counted(monkeypatch)
    q, k, v, do = operands(8, 4, 2, 40, 40, 16)
    halves = [t.bfloat16() for t in (q, k, v)]
    given = [q, k, halves[2]] if autocast else halves  # as rotary embedding leaves q and k under autocast
    given = [t.clone().requires_grad_() for t in given]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        o = attention(*given, is_causal=is_causal)
    assert o.dtype == torch.bfloat16
    found = o, *torch.autograd.grad(o, given, do.bfloat16())
    assert len(calls) == 1
    assert [t.dtype for t in found[1:]] == [t.dtype for t in given]
    exactly = exact(*(t.detach() for t in given), do, None, 1.0, 0.25, is_causal)
    for one, other in zip(found, exactly, strict=True):
        noise = one.detach().double() - other
        assert 10 * torch.log10(other.square().sum() / noise.square().sum()) > 45


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        spec = TTSpec(16, 16, (4, 4), (4, 4), (1, 2, 2, 2, 1))
        self.first, self.last = TTLinear(spec), TTLinear(spec)

    def forward(self, x):
        heads = self.first(x).view(2, -1, 2, 8).transpose(1, 2)
        o = attention(heads, heads, heads, dropout=0.2)
        return self.last(o.transpose(1, 2).flatten(2))


def test_a_replay_does_not_make_it_again(monkeypatch):
    torch.manual_seed(0)
    model, x, results = nn.Sequential(Block(), Block()), torch.randn(2, 40, 16), []
    for enabled in (False, True):
        recompute_(model, enabled=enabled)
        calls = counted(monkeypatch)
        torch.manual_seed(1)
        model.zero_grad()
        model(x).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
        assert len(calls) == 2
        monkeypatch.undo()
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
