"""The C++ loss of a head of low rank (low_rank_cross_entropy.cpp), and the operation around it, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from comera.kernels import select
from comera.kernels.cpp import compiler
from comera.kernels.cpp.low_rank_cross_entropy import linear_cross_entropy as table_kernel
from comera.kernels.cpp.low_rank_cross_entropy import low_rank_cross_entropy as kernel
from comera.ops.cross_entropy import linear_cross_entropy, low_rank_cross_entropy

needs_kernels = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")

# rows, rank, classes: one of each, less than a tile, whole tiles, more than one and rests, rank 0
SIZES = [(1, 1, 1), (5, 3, 7), (96, 16, 48), (97, 8, 1000), (200, 33, 301), (17, 0, 30), (0, 4, 50)]


def operands(rows: int, rank: int, classes: int, bias: bool, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """P, [bias; B] and labels, a third of them ignored."""
    torch.manual_seed(0)
    p, b = scale * torch.randn(rows, rank), torch.randn(rank + bias, classes)
    labels = torch.randint(0, classes, (rows,))
    labels[::3] = -100
    return p, b, labels


def as_table(b: Tensor, bias: bool) -> tuple[Tensor, Tensor | None]:
    """[bias; B] as a table of the classes' rows, and the bias."""
    return b[int(bias) :].t().contiguous(), b[0] if bias else None


def oracle(p: Tensor, b: Tensor, labels: Tensor) -> list[Tensor]:
    """Losses, and the gradients of their sum, by torch in float64."""
    p, b = (t.detach().double().requires_grad_() for t in (p, b))
    with_ones = F.pad(p, (b.shape[0] - p.shape[1], 0), value=1.0)
    losses = F.cross_entropy(with_ones @ b, labels, reduction="none")
    return [losses.detach(), *torch.autograd.grad(losses.sum(), [p, b])]


@needs_kernels
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("threads", [1, 3])
def test_agrees_with_float64(sizes: tuple[int, int, int], bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    p, b, labels = operands(*sizes, bias)
    found, exact = kernel(p, b, labels, -100, True), oracle(p, b, labels)
    for came, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(came.double(), expected, rtol=1e-5, atol=1e-5)
    assert not found[0][::3].any()
    assert not found[1][::3].any()


@needs_kernels
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_table_gives_the_same_bits(sizes: tuple[int, int, int], bias: bool) -> None:
    p, b, labels = operands(*sizes, bias)
    losses, u, db = kernel(p, b, labels, -100, True)
    found = table_kernel(p, *as_table(b, bias), labels, -100, True)
    expected = [losses, u, db[int(bias) :].t(), *([db[0]] if bias else [])]
    assert all(torch.equal(came, each) for came, each in zip(found, expected, strict=True))
    assert all(map(torch.equal, table_kernel(p, *as_table(b, bias), labels, -100, False), expected[:2]))


@needs_kernels
@pytest.mark.parametrize("scale", [0.0, 30.0])
def test_flat_and_steep_logits(scale: float) -> None:
    p, b, labels = operands(50, 16, 2000, True, scale)
    for came, expected in zip(kernel(p, b, labels, -100, True), oracle(p, b, labels), strict=True):
        largest = max(1.0, float(expected.abs().max()))  # steep: a logit of 500 has an error of 3e-5
        torch.testing.assert_close(came.double() / largest, expected / largest, rtol=0, atol=5e-5)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("first", [1, 48, 100, 700])
def test_classes_that_a_bias_rules_out(first: int, threads: int) -> None:
    torch.set_num_threads(threads)
    p, b, labels = operands(97, 8, 1000, True)
    b[0, :first] = -torch.inf
    labels[labels >= 0] = labels[labels >= 0].clamp_min(first)
    for came, expected in zip(kernel(p, b, labels, -100, True), oracle(p, b, labels), strict=True):
        torch.testing.assert_close(came.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
def test_a_label_may_be_the_ignored_number() -> None:
    p, b, labels = operands(20, 4, 9, True)
    labels = labels.clamp_min(0)  # what was ignored is class 0, and class 5 is ignored
    exact = oracle(p, b, labels.where(labels != 5, -100))
    for came, expected in zip(kernel(p, b, labels, 5, True), exact, strict=True):
        torch.testing.assert_close(came.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_the_loss_of_its_row_alone(odd: float) -> None:
    p, b, _ = operands(5, 3, 60, False)
    p[2, 1] = odd
    losses, _, _ = kernel(p, b, torch.zeros(5, dtype=torch.int64), -100, False)
    assert losses.isfinite().tolist() == [True, True, False, True, True]


@needs_kernels
def test_the_same_threads_make_the_same_bits_and_unwanted_gradients_are_not_made() -> None:
    torch.set_num_threads(2)
    p, b, labels = operands(130, 20, 500, True)
    losses, u, db = kernel(p, b, labels, -100, True)
    again, u_again, none = kernel(p, b, labels, -100, False)
    assert torch.equal(losses, again)
    assert torch.equal(u, u_again)
    assert db.shape == b.shape
    assert none.numel() == 0


@pytest.mark.parametrize("kernels", ["none", "all"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("form", ["factors", "table"])
def test_the_operation_and_its_gradients(
    form: str, kernels: str, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    p, b, labels = operands(23, 6, 31, bias)
    losses, dp, db = oracle(p.to(dtype), b.to(dtype), labels)
    run, given, exact = low_rank_cross_entropy, (p, b), [dp, db]
    if form == "table":
        run, given = linear_cross_entropy, (p, *as_table(b, bias))
        exact = [dp, db[int(bias) :].t(), *([db[0]] if bias else [])]
    leaves = [None if t is None else t.to(dtype).clone().requires_grad_() for t in given]
    loss = run(*leaves, labels)
    (3 * loss).backward()
    came = (loss, *(t.grad for t in leaves if t is not None))
    for one, expected in zip(came, (losses.sum(), *(3 * grad for grad in exact)), strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_a_second_backward_adds_the_same_gradients(bias: bool) -> None:
    """The first one gives the gradients away that the forward made: they may be added to where they are."""
    p, b, labels = operands(23, 6, 31, bias)
    leaves = [t.clone().requires_grad_() for t in (p, *as_table(b, bias)) if t is not None]
    loss = linear_cross_entropy(*leaves, *([] if bias else [None]), labels)
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in leaves if t.grad is not None]
    (2 * loss).backward()
    for leaf, first in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 3 * first)


@pytest.mark.parametrize("kernels", ["none", "all"])
def test_what_needs_no_gradient_gets_none(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMERA_KERNELS", kernels)
    p, b, labels = operands(8, 3, 20, True)
    for wanted in (0, 1):
        leaves = [t.clone().requires_grad_(k == wanted) for k, t in enumerate((p, b))]
        low_rank_cross_entropy(*leaves, labels).backward()
        assert [t.grad is not None for t in leaves] == [k == wanted for k in range(2)]
    for wanted in range(3):
        leaves = [t.clone().requires_grad_(k == wanted) for k, t in enumerate((p, *as_table(b, True)))]
        linear_cross_entropy(*leaves, labels).backward()
        assert [t.grad is not None for t in leaves] == [k == wanted for k in range(3)]


@needs_kernels
def test_ranks_and_features_beyond_the_limits_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMERA_KERNELS", raising=False)
    few, many = torch.randn(4, select.HEAD_MOST_RANK), torch.randn(4, select.HEAD_MOST_RANK + 1)
    assert select.low_rank_head_backend(few, torch.randn(few.shape[1], 9)) == "cpp"
    assert select.low_rank_head_backend(many, torch.randn(many.shape[1], 9)) == "torch"
    for classes, most in (
        (select.HEAD_MANY_CLASSES - 1, select.HEAD_MOST_FEATURES),
        (select.HEAD_MANY_CLASSES, select.HEAD_MOST_FEATURES_OF_MANY),
    ):
        narrow, wide = (torch.zeros(classes, features) for features in (most, most + 1))
        assert select.is_low_rank_head(narrow, torch.randn(4, narrow.shape[1]))
        assert not select.is_low_rank_head(wide, torch.randn(4, wide.shape[1]))
    with torch.autocast("cpu", torch.bfloat16):
        assert not select.is_low_rank_head(narrow, torch.randn(4, narrow.shape[1]))
