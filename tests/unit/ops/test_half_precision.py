"""Half precision by the kernels, which compute in float32: where they are chosen, and what they give."""

import platform

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comera
from comera.kernels.cpp import attention as attention_kernels
from comera.kernels.cpp import compiler
from comera.kernels.cpp import low_rank as low_rank_kernels
from comera.ops import dtypes
from comera.ops.attention import attention

from ...helpers.oracle import signal_to_noise

with_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


@pytest.fixture
def processor(monkeypatch):
    """Sets machine and flags that `dtypes` sees."""

    def be(machine="x86_64", flags="avx512f avx512_bf16", reason=None):
        monkeypatch.setattr(platform, "machine", lambda: machine)
        monkeypatch.setattr(compiler, "processor", lambda: f"flags : {flags}")
        monkeypatch.setattr(dtypes, "unavailable_reason", lambda: reason)
        dtypes._matrix_units.cache_clear()

    yield be
    monkeypatch.undo()
    dtypes._matrix_units.cache_clear()


def half(monkeypatch, units=True):
    monkeypatch.setattr(dtypes, "_half_units", lambda dtype: units)
    return torch.zeros(2, 2, dtype=torch.bfloat16)


def test_kernels_are_faster_without_matrix_units(processor, monkeypatch):
    processor()
    x = half(monkeypatch)
    for given in (x, x.half(), x.float()):
        assert dtypes.kernel_dtype(given, "low_rank") == torch.float32
    assert dtypes.working_dtype(x) == torch.bfloat16
    assert dtypes.kernel_dtype(x.double(), "low_rank") == torch.float64
    assert dtypes.kernel_dtype(x.to("meta"), "low_rank") == torch.bfloat16


@pytest.mark.parametrize(
    "other", [{"flags": "avx512f amx_bf16 amx_tile"}, {"machine": "aarch64"}, {"reason": "no compiler"}], ids=str
)
def test_they_are_not_with_them_or_where_nothing_was_measured(processor, monkeypatch, other):
    processor(**other)
    assert dtypes.kernel_dtype(half(monkeypatch), "low_rank") == torch.bfloat16


def test_kernels_that_are_switched_off_are_not_waited_for(processor, monkeypatch):
    processor()
    x = half(monkeypatch)
    monkeypatch.setenv("COMERA_KERNELS", "attention")
    assert dtypes.kernel_dtype(x, "attention") == torch.float32
    assert dtypes.kernel_dtype(x, "low_rank") == torch.bfloat16


def counted(monkeypatch, module, name):
    calls, kernel = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: calls.append(name) or kernel(*args))
    return calls


def gradients(y, tensors, dy):
    return [y.detach(), *torch.autograd.grad(y, tensors, dy)]


def assert_near(found, exact):
    assert [each.dtype for each in found] == [torch.bfloat16] * len(found)
    assert min(signal_to_noise(one, other) for one, other in zip(found, exact, strict=True)) > 45


@with_compiler
def test_attention_is_trained_by_the_kernel_and_evaluated_by_torch(processor, monkeypatch):
    processor()
    half(monkeypatch)
    calls = counted(monkeypatch, attention_kernels, "attention")
    torch.manual_seed(0)
    given = [torch.randn(8, 4, 40, 16).bfloat16().requires_grad_() for _ in range(3)]
    do = torch.randn(8, 4, 40, 16).bfloat16()
    run, kinds = F.scaled_dot_product_attention, []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: kinds.append(a[0].dtype) or run(*a, **k))
    with torch.no_grad():
        attention(*given)
    assert kinds == [torch.bfloat16]  # no copies of the operands
    monkeypatch.setattr(F, "scaled_dot_product_attention", run)
    found = gradients(attention(*given), given, do)
    assert calls == ["attention"]
    wide = [t.detach().double().requires_grad_() for t in given]
    exact = F.scaled_dot_product_attention(*wide)
    assert_near(found, gradients(exact, wide, do.double()))


@with_compiler
@pytest.mark.parametrize("most", [256, 7])
def test_a_layer_by_the_kernel_up_to_its_rank(processor, monkeypatch, most):
    processor()
    half(monkeypatch)
    monkeypatch.setattr(dtypes, "LOW_RANK_MOST_RANK", most)
    calls = counted(monkeypatch, low_rank_kernels, "low_rank")
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(48, 96))
    comera.tensorize_(layer, comera.TensorizeConfig(comera.TT(order=4, rank=8)))
    layer[0].contraction = "low_rank"
    x = torch.randn(40, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert calls == ["low_rank"] * (most >= 8)
    assert y.dtype == torch.bfloat16
    assert signal_to_noise(y, x.double() @ layer[0].weight.double().t() + layer[0].bias.double()) > 40


def test_factors_of_a_larger_rank_stay_in_half_precision(processor, monkeypatch):
    processor()
    x = half(monkeypatch)
    assert dtypes.kernel_dtype(x, "low_rank", dtypes.LOW_RANK_MOST_RANK) == torch.float32
    assert dtypes.kernel_dtype(x, "low_rank", dtypes.LOW_RANK_MOST_RANK + 1) == torch.bfloat16
