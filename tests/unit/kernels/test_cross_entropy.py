"""The C++ cross-entropy of rows (cross_entropy.cpp) and that of a head in chunks (ops/cross_entropy.py)."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels.cpp import compiler, cross_entropy
from comera.ops import chunking
from comera.ops.cross_entropy import head_cross_entropy

needs_kernels = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


def oracle(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the gradients of their sum, by torch in float64."""
    z = logits.double().requires_grad_()
    losses = F.cross_entropy(z, labels, reduction="none")
    (gradients,) = torch.autograd.grad(losses.sum(), z)
    return losses.detach(), gradients


@needs_kernels
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (5, 2), (7, 33), (3, 1000), (64, 20_001)])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_rows_against_float64(rows: int, classes: int, scale: float) -> None:
    torch.manual_seed(0)
    logits, labels = scale * torch.randn(rows, classes), torch.randint(0, classes, (rows,))
    labels[::3] = -100
    losses, gradients = cross_entropy.cross_entropy(logits, labels, -100)
    for came, expected in zip((losses, gradients), oracle(logits, labels), strict=True):
        torch.testing.assert_close(came.double(), expected, rtol=2e-6, atol=2e-6)
    assert not losses[::3].any()
    assert not gradients[::3].any()


@needs_kernels
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_loss_of_its_row_alone(odd: float) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 37] = odd
    losses, _ = cross_entropy.cross_entropy(logits, torch.zeros(3, dtype=torch.int64), -100)
    assert losses.isfinite().tolist() == [True, False, True]
    logits[1] = -torch.inf
    logits[1, 5] = 0.0
    losses, gradients = cross_entropy.cross_entropy(logits, torch.tensor([0, 5, 0]), -100)
    assert abs(float(losses[1])) < 1e-6
    assert float(gradients[1].abs().max()) < 1e-6


@needs_kernels
def test_the_number_of_threads_changes_nothing() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(50, 3000), torch.randint(0, 3000, (50,))
    made = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        made.append(cross_entropy.cross_entropy(logits, labels, -100))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("kernels", ["none", ""])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 23])
def test_a_head_in_chunks_against_its_logits(
    kernels: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels) if kernels else monkeypatch.delenv("COMERA_KERNELS", raising=False)
    monkeypatch.setattr(chunking, "CHUNK_CPU", 5 * 31 // 4)  # four or five rows at a time
    torch.manual_seed(0)
    x = torch.randn(rows, 6, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(31, 6, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(31, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, 31, (rows,))
    labels[::4] = -100
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = F.cross_entropy(F.linear(*exact), labels, reduction="sum")
    (3 * expected).backward()
    loss = head_cross_entropy(x, labels, 31, F.linear, [weight, bias])
    (3 * loss).backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for came, wanted in zip((loss, x.grad, weight.grad, bias.grad), (expected, *(t.grad for t in exact)), strict=True):
        assert came is not None
        torch.testing.assert_close(came.double(), wanted, rtol=tolerance, atol=tolerance)


def test_what_needs_no_gradient_gets_none() -> None:
    x, weight, labels = torch.randn(4, 6), torch.randn(9, 6, requires_grad=True), torch.arange(4)
    head_cross_entropy(x, labels, 9, F.linear, [weight]).backward()
    assert x.grad is None
    assert weight.grad is not None
    x.requires_grad_()
    loss = head_cross_entropy(x, labels, 9, F.linear, [weight.detach()])
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(loss, F.cross_entropy(F.linear(x, weight), labels, reduction="sum"))
